"""Draws judged: which of the tokens that were drawn at random from q stand, and what follows them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..protocol import Draft, Sequences
from ..schedule import Correct
from ..stats import SpeculationStats
from ..transfer import to_device, to_host
from .block import Block, Judgement
from .drafts import padded
from .randomness import Purpose, Randomness
from .rules import EXACT, Rules
from .successors import Successors
from .verification import accepted_lengths, accepts, block_verified, choose_candidate, distribution, draw, residual
from .verification import traverse as traversed


@dataclass
class Draws:
    """The tests of one call."""

    randomness: Randomness
    stats: SpeculationStats
    rules: Rules

    def whole(self, draft: Draft) -> bool:
        """Whether a draft is verified all together; the rest of q is needed for that."""
        return self.rules.verification == "block" and self.rules.lenience == EXACT and draft.q is not None

    def chain(
        self,
        draft: Draft,
        scores: Tensor,
        sequences: Sequences,
        sound: Tensor,
        likeliest: Successors,
        answered: list[int] | None,
        correct: Correct | None,
    ) -> Block:
        """Algorithm 1 on a batch of chains, or block verification."""
        rows, places, vocab = scores.shape
        k = draft.tokens.shape[1]
        assert draft.token_probs is not None
        p = distribution(scores)
        device = p.device
        drafted = draft.tokens.clamp(0, vocab - 1)
        limits = to_device(draft.lengths, device) * sound
        every = torch.arange(rows, device=device)
        lenience = self.rules.lenience
        whole = self.whole(draft) and correct is None and answered is None and places > k
        r, u = self._uniform(sequences, k, places, Purpose.BLOCK if whole else Purpose.ACCEPT, device)
        p_drafted = p[:, :k].gather(2, drafted[..., None])[..., 0]
        q_drafted = lenience * torch.nan_to_num(draft.token_probs, nan=1.0)
        weight: Tensor | None = None
        if whole:
            assert draft.q is not None
            n, weight = block_verified(p, draft.q.to(p), drafted, limits, r)
        else:
            n = accepted_lengths(accepts(p_drafted.double(), q_drafted.double(), r), limits)
        beta = (p_drafted / q_drafted.clamp_min(1e-30)).clamp(max=1.0).double()
        final = p[every, n.clamp(max=places - 1)]
        own_u = u[every, n.clamp(max=places - 1)]
        told = [n.double(), sound.double()[None], drafted.double().flatten(), beta.flatten(), likeliest.ids.double()]
        if correct is None and draft.q is not None:
            share = final if weight is None else (final * weight[:, None]).to(final)
            left = residual(share, draft.q[every, n.clamp(max=k - 1)].to(final))
            own = draw(torch.where((n < limits)[:, None], left, final), own_u)
            packed = to_host(torch.cat([own.double(), *told]))
            owns, packed = [int(token) for token in packed[:rows]], packed[rows:]
        else:
            packed = to_host(torch.cat(told))
            owns = []
        accepted, fine = [int(x) for x in packed[:rows]], bool(packed[rows])
        if not owns:  # what the drafter has to say goes into the draw
            for b, count in enumerate(accepted):
                if correct is not None and fine and count < draft.lengths[b]:
                    final[b] = correct(final[b], b, count)
            own = draw(final, own_u)
            owns = [int(token) for token in to_host(own)]
        self._note_acceptance(accepted, draft.lengths if fine else [0] * rows, packed[rows + 1 + rows * k :], k)
        tokens = [int(token) for token in packed[rows + 1 : rows + 1 + rows * k]]
        judged = []
        for b, count in enumerate(accepted):
            text = tokens[b * k : b * k + count]
            if count <= (places - 1 if answered is None else answered[b]):
                text.append(owns[b])
            judged.append(Judgement(list(range(count)), text))
        texts = torch.cat([drafted, drafted[:, :1]], dim=1).scatter(1, n[:, None], own[:, None])
        counted = [tokens[b * k :][: draft.lengths[b] if fine else 0] for b in range(rows)]
        found = likeliest.behind(packed, sequences, counted, None, answered)
        return Block(judged, scores, fine, texts, found)

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

    def tree(
        self,
        draft: Draft,
        scores: Tensor,
        sequences: Sequences,
        sound: Tensor,
        likeliest: Successors,
        kept: list[list[int]] | None,
    ) -> Block:
        """Trees, row by row. Siblings are independent draws, each from its q."""
        assert draft.parents is not None and draft.q is not None
        fine, *flat = to_host(torch.cat([sound.long()[None], draft.tokens.flatten(), likeliest.ids]))
        width, whole = draft.tokens.shape[1], self.whole(draft)
        judged, drafted = [], []
        for b, (row, length) in enumerate(zip(sequences.rows, sequences.lengths, strict=True)):
            tokens = flat[b * width : (b + 1) * width]
            there = range(width) if kept is None else kept[b]
            where = {-1: 0} | {node: i + 1 for i, node in enumerate(there) if node >= 0}
            count = draft.lengths[b] if fine else 0
            drafted.append(tokens[:count])
            one = _Tree(tokens, draft.parents[b][:count], draft.q[b], scores[b], where, row, length, self)
            path, left = one.traverse() if whole else one.descend()
            own: list[int] = []
            if left is not None:
                u = self.randomness.tensor([row], [length + len(path)], Purpose.CHOOSE, left.device)
                own = [int(draw(left[None], u))]
            judged.append(Judgement(path, [tokens[node] for node in path] + own))
        texts = padded([judgement.text for judgement in judged], scores.device)
        found = likeliest.behind(flat, sequences, drafted, kept)
        return Block(judged, scores, bool(fine), texts, found)

    def one_test(
        self, draft: Draft, i: int, p: Tensor, rows: list[int], position: int, correct: Correct | None
    ) -> Tensor:
        """Algorithm 1 at one position [B, V]: an accepted token's distribution has all its mass on it."""
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
            elif correct is not None:
                p[b] = correct(p[b], b, i)
            elif draft.q is not None:
                p[b] = residual(p[b, None], draft.q[b, i, None].to(p))[0]
        return p

    def _note_acceptance(self, accepted: list[int], lengths: list[int], beta: Sequence[float], width: int) -> None:
        for b, (n, k) in enumerate(zip(accepted, lengths, strict=True)):
            tested = min(n + 1, k)
            self.stats.acceptance_sum += sum(beta[b * width : b * width + tested])
            self.stats.acceptance_count += tested


@dataclass
class _Tree:
    """One row's."""

    tokens: Sequence[int]
    parents: Sequence[int]
    """of the nodes that count"""
    q: Tensor
    """[K, V]"""
    scores: Tensor
    """[N, V]"""
    where: dict[int, int]
    """the place of each node that there are scores for"""
    row: int
    length: int
    draws: Draws

    def children(self, node: int) -> list[int]:
        return [i for i in range(node + 1, len(self.parents)) if self.parents[i] == node]

    def p(self, node: int) -> Tensor | None:
        """[V] behind a node."""
        return distribution(self.scores[self.where[node]]) if node in self.where else None

    def traverse(self) -> tuple[list[int], Tensor | None]:
        """Leaf to root."""
        randomness = self.draws.randomness

        def r(node: int) -> float:
            return float(randomness.uniform([self.row], [self.length + node], Purpose.BLOCK, randomness.round)[0])

        found = traversed(-1, 1.0, self.children, self.p, lambda node: self.q[node], self.tokens, r)
        return found if found is not None else ([], self.p(-1))

    def descend(self) -> tuple[list[int], Tensor | None]:
        """Root to leaf: multi-candidate sampling."""
        path: list[int] = []
        randomness, lenience = self.draws.randomness, self.draws.rules.lenience
        while (p := self.p(path[-1] if path else -1)) is not None:
            position, children = self.length + len(path), self.children(path[-1] if path else -1)
            taken: int | None = None
            if children:
                r = [float(randomness.uniform([self.row], [position], Purpose.ACCEPT + i)[0]) for i in children]
                q = self.q[children].to(p)
                taken, p = choose_candidate(p, q, [self.tokens[i] for i in children], r, lenience)
            if taken is None:
                return path, p
            path.append(children[taken])
        return path, None


def drawn_from_points(draft: Draft, vocab: int) -> Draft:
    """Point masses as draws that could not come out otherwise: a tolerant test wants their q."""
    known = draft.tokens.clamp(0, vocab - 1)[..., None]
    q = torch.zeros(*draft.tokens.shape, vocab, device=known.device).scatter_(2, known, 1.0)
    return replace(draft, token_probs=torch.ones_like(draft.tokens, dtype=torch.float32), q=q)
