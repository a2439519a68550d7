"""Drafts that were drawn at random from q: which of their tokens are accepted, and what is drawn behind them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..protocol import Draft, Sequences
from ..stats import SpeculationStats
from ..transfer import to_device
from .randomness import Purpose, Randomness
from .rules import EXACT, Rules
from .trial import Result, Trial
from .verification import (
    accepted_lengths,
    accepts,
    block_verified,
    choose_candidate,
    distribution,
    draw,
    residual,
)


@dataclass
class Draws:
    """The tests of one call."""

    randomness: Randomness
    stats: SpeculationStats
    rules: Rules

    def whole(self, draft: Draft) -> bool:
        """Whether a chain is verified all together, which needs q over the whole vocabulary."""
        return self.rules.verification == "block" and self.rules.lenience == EXACT and draft.q is not None

    # ------------------------------------------------------------------ chains

    def chain(self, trial: Trial) -> list[Result]:
        """Algorithm 1 on a batch of chains, or block verification."""
        draft, scores = trial.draft, trial.scores
        rows, places, vocab = scores.shape
        assert draft.token_probs is not None
        k, device, p = draft.tokens.shape[1], scores.device, distribution(scores)
        tokens = draft.tokens.clamp(0, vocab - 1)
        lengths = trial.counted
        every = torch.arange(rows, device=device)
        whole = self.whole(draft) and trial.answered is None and trial.forward.nodes is None
        r, u = self._uniform(trial.sequences, k, places, Purpose.BLOCK if whole else Purpose.ACCEPT, device)
        px = p[:, :k].gather(2, tokens[..., None])[..., 0]
        qx = self.rules.lenience * torch.nan_to_num(draft.token_probs, nan=1.0)
        one_by_one = accepted_lengths(accepts(px.double(), qx.double(), r), lengths)
        if whole:
            assert draft.q is not None
            n, w = block_verified(p, draft.q.to(p), tokens, lengths, r)
        else:
            n, w = one_by_one, torch.ones_like(r[:, 0])
        beta = (px / qx.clamp_min(1e-30)).clamp(max=1.0)
        last = n.clamp(max=places - 1)
        p_own, u_own = p[every, last], u[every, last]
        if draft.q is not None:
            left = residual((w[:, None] * p_own).to(p), draft.q[every, n.clamp(max=k - 1)].to(p))
            p_own = torch.where((n < lengths)[:, None], left, p_own)
        own = draw(p_own, u_own)
        trial.texts = self._texts(tokens, n, own)
        told = trial.meanwhile and partial(trial.meanwhile, n, trial.last_two(n, trial.texts))
        accepted, passed, beta_told, owns = trial.read(n, one_by_one, beta, own, meanwhile=told)
        self._note_acceptance(passed, trial.tokens, beta_told, k)
        return [
            trial.result(b, list(range(count)), owns[b] if count - 1 in trial.places(b) else None)
            for b, count in enumerate(accepted)
        ]

    @staticmethod
    def _texts(tokens: Tensor, n: Tensor, own: Tensor) -> Tensor:
        """[B, K + 1] the first n [B] of the drafted tokens [B, K], then the target's own [B]."""
        return torch.cat([tokens, tokens[:, :1]], dim=1).scatter(1, n[:, None], own[:, None])

    def _uniform(
        self, sequences: Sequences, k: int, places: int, tests: Purpose, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The numbers of the tests [B, k] and of the target's own draws [B, places], sent together."""
        attempt = self.randomness.round if tests == Purpose.BLOCK else 0
        numbers = [
            self.randomness.uniform([row] * count, range(length, length + count), purpose, again)
            for purpose, count, again in ((tests, k, attempt), (Purpose.CHOOSE, places, 0))
            for row, length in zip(sequences.rows, sequences.lengths, strict=True)
        ]
        sent = to_device([x for part in numbers for x in part], device, torch.float64)
        rows = len(sequences.rows)
        return sent[: rows * k].view(rows, k), sent[rows * k :].view(rows, places)

    def _note_acceptance(
        self, passed: Sequence[int], drafted: Sequence[Sequence[int]], beta: Sequence[float], k: int
    ) -> None:
        """Count α: the mean of min(1, p/q) over the tokens that Algorithm 1 tests.

        Whether it tests a token depends on earlier tokens alone, so the token is a draw from q like any other, and
        min(1, p/q) is β in the mean (Theorem 3.5). Block verification looks at later tokens, too, and keeps those whose
        p/q is high: over the tokens that it keeps, the mean would be too high.

        Args:
            passed: [B] how many tokens Algorithm 1 accepts with the same random numbers.
        """
        for b, (n, tokens) in enumerate(zip(passed, drafted, strict=True)):
            tested = min(n + 1, len(tokens))
            self.stats.acceptance_sum += sum(beta[b * k : b * k + tested])
            self.stats.acceptance_count += tested

    # ------------------------------------------------------------------ trees

    def tree(self, trial: Trial) -> list[Result]:
        """Trees, row by row. Siblings are independent draws, each from its q."""
        trial.read()
        results = [trial.result(b, *self._descend(trial, b)) for b in range(len(trial.tokens))]
        trial.texts = trial.as_texts(results)
        return results

    def _descend(self, trial: Trial, b: int) -> tuple[list[int], int | None]:
        """Multi-candidate sampling in row b, root to leaf: the accepted nodes, and what is drawn behind them (None:
        nothing)."""
        draft, tokens, places = trial.draft, trial.tokens[b], trial.places(b)
        row, length = trial.sequences.rows[b], trial.sequences.lengths[b]
        assert draft.parents is not None and draft.q is not None
        path, here, parents = list[int](), -1, draft.parents[b]
        while here in places:
            position, p = length + len(path), distribution(trial.scores[b, places[here]])
            children = [i for i in range(here + 1, len(tokens)) if parents[i] == here]
            r = [float(self.randomness.uniform([row], [position], Purpose.ACCEPT + i)[0]) for i in children]
            q, candidates = draft.q[b, children].to(p), [tokens[i] for i in children]
            taken, p = choose_candidate(p, q, candidates, r, self.rules.lenience)
            if taken is None:
                u = self.randomness.tensor([row], [position], Purpose.CHOOSE, p.device)
                return path, int(draw(p[None], u))
            here = children[taken]
            path.append(here)
        return path, None

    # ------------------------------------------------------------------ one position

    def one_test(self, draft: Draft, i: int, p: Tensor, rows: list[int], position: int) -> Tensor:
        """Algorithm 1 at one position, with p [B, V]: what each row's token is to be drawn from. An accepted token has
        all the mass."""
        assert draft.token_probs is not None
        r = self.randomness.uniform(rows, [position] * len(rows), Purpose.ACCEPT).tolist()
        for b, x in enumerate(draft.tokens[:, i].tolist()):
            if i >= draft.lengths[b]:
                continue
            px, qx = p[b, x].double(), self.rules.lenience * draft.token_probs[b, i].double()
            self.stats.acceptance_sum += min(1.0, float(px / qx))
            self.stats.acceptance_count += 1
            if accepts(px, qx, r[b]):
                p[b] = torch.nn.functional.one_hot(draft.tokens[b, i], p.shape[1]).to(p)
            elif draft.q is not None:
                p[b] = residual(p[b, None], draft.q[b, i, None].to(p))[0]
        return p


def drawn_from_points(draft: Draft, vocab: int) -> Draft:
    """Point masses as draws that could not come out otherwise: the lenient test of draws needs their q."""
    known = draft.tokens.clamp(0, vocab - 1)[..., None]
    q = torch.zeros(*draft.tokens.shape, vocab, device=known.device).scatter_(2, known, 1.0)
    return replace(draft, token_probs=torch.ones_like(draft.tokens, dtype=torch.float32), q=q)
