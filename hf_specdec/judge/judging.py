"""The judge of a round: from a draft and the target's logits to the tokens that are kept.

Two ways that give the same tokens: `block` processes all positions at once (known processors only), `stepwise` one
position after the other, so that a user's processor sees exactly plain decoding's calls.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..protocol import Draft, Sequences
from ..stats import SpeculationStats
from .processing import Processing
from .randomness import Purpose, Randomness
from .verification import (
    accepted_lengths,
    accepts,
    choose_candidate,
    distribution,
    draw,
    follow,
    residual,
)

Residual = Callable[[int, int], Tensor | None]
"""q [V] at (row, node) of the present draft, or None if the drafter cannot say"""


@dataclass
class Judgement:
    """What the target says of one row's draft."""

    path: list[int]
    """accepted nodes, from the root down"""
    own: int
    """the target's token after them: the correction, or the bonus token"""


@dataclass
class Judge:
    """Everything that decides which tokens are kept, for one call."""

    processing: Processing
    all_processors: Callable[[Tensor, Tensor], Tensor]
    """the call's whole processor list, for `stepwise`"""
    do_sample: bool
    randomness: Randomness
    stats: SpeculationStats

    def block(
        self, draft: Draft, logits: Tensor, sequences: Sequences, ask: Residual
    ) -> tuple[list[Judgement], Tensor, bool]:
        """Judge all rows at once.

        Args:
            logits: [B, K + 1, V] after the last accepted token and after every node.

        Returns:
            a judgement per row; the processed scores [B, K + 1, V]; whether the draft was sound. Of an unsound one
            (ids outside the vocabulary, q not a probability) no token is used.
        """
        rows, nodes, vocab = logits.shape
        depth = [[0, *depths] for depths in draft.depths()]
        lengths = [sequences.lengths[b] + d for b in range(rows) for d in depth[b]]
        scores = logits.float().reshape(-1, vocab)
        if self.processing.processors:
            # Bad ids are found out below; until then processors must not meet them.
            ids, index = self._prefixes(draft.tokens.clamp(0, vocab - 1), draft.parents, sequences, depth)
            scores = self.processing(ids, index, lengths, scores.clone() if logits.dtype == torch.float32 else scores)
        scores = scores.view(rows, nodes, vocab)
        sound = is_sound(draft, vocab)
        if self.do_sample and draft.token_probs is not None and nodes > 1:
            if draft.parents is None:
                judged, fine = self._sampled_chain(draft, scores, sequences, sound, ask)
            else:
                judged, fine = self._sampled_tree(draft, scores, sequences, sound, ask)
            return judged, scores, fine
        if self.do_sample:
            owner = [sequences.rows[b] for b in range(rows) for _ in range(nodes)]
            u = self.randomness.tensor(owner, lengths, Purpose.CHOOSE, scores.device)
            choices = draw(distribution(scores.view(-1, vocab)), u)
        else:
            choices = scores.argmax(-1)
        # One transfer to the host tells everything.
        packed = torch.cat([choices.flatten(), draft.tokens.flatten(), sound.long()[None]]).tolist()
        fine = bool(packed[-1])
        tokens = packed[rows * nodes : -1]
        parents = [[]] * rows if draft.parents is None else draft.parents.tolist()
        judged = []
        for b in range(rows):
            chosen = packed[b * nodes : (b + 1) * nodes]
            k = draft.lengths[b] if fine else 0
            start = b * (nodes - 1)
            path = follow(tokens[start : start + k], parents[b][:k] or None, chosen)
            judged.append(Judgement(path, chosen[path[-1] + 1 if path else 0]))
        return judged, scores, fine

    def _sampled_chain(
        self, draft: Draft, scores: Tensor, sequences: Sequences, sound: Tensor, ask: Residual
    ) -> tuple[list[Judgement], bool]:
        """Algorithm 1 on a batch of chains."""
        rows, nodes, vocab = scores.shape
        k = nodes - 1
        assert draft.token_probs is not None
        p = distribution(scores)
        p_drafted = p[:, :k].gather(2, draft.tokens.clamp(0, vocab - 1)[..., None])[..., 0]
        owner = [row for row in sequences.rows for _ in range(k)]
        positions = [length + i for length in sequences.lengths for i in range(k)]
        r = self.randomness.tensor(owner, positions, Purpose.ACCEPT, p.device).view(rows, k)
        q_drafted = torch.nan_to_num(draft.token_probs, nan=1.0)
        limits = torch.tensor(draft.lengths, device=p.device) * sound
        n = accepted_lengths(accepts(p_drafted.double(), q_drafted.double(), r), limits)
        beta = (p_drafted / q_drafted.clamp_min(1e-30)).clamp(max=1.0)
        packed = torch.cat([n.double(), sound.double()[None], beta.double().flatten()]).tolist()
        accepted, fine = [int(x) for x in packed[:rows]], bool(packed[rows])
        self._note_acceptance(accepted, draft.lengths if fine else [0] * rows, packed[rows + 1 :], k)
        final = p[torch.arange(rows, device=p.device), n]
        for b, count in enumerate(accepted):
            if fine and count < draft.lengths[b]:
                final[b] = self.corrected(final[b], b, count, ask)
        at = [length + count for length, count in zip(sequences.lengths, accepted, strict=True)]
        own = draw(final, self.randomness.tensor(sequences.rows, at, Purpose.CHOOSE, p.device)).tolist()
        return [Judgement(list(range(count)), token) for count, token in zip(accepted, own, strict=True)], fine

    def _sampled_tree(
        self, draft: Draft, scores: Tensor, sequences: Sequences, sound: Tensor, ask: Residual
    ) -> tuple[list[Judgement], bool]:
        """Multi-candidate sampling from the root down, row by row. Siblings are independent draws from one q."""
        fine = bool(sound)
        assert draft.parents is not None
        tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
        judged = []
        for b, (row, length) in enumerate(zip(sequences.rows, sequences.lengths, strict=True)):
            path: list[int] = []
            here = -1
            while True:
                position = length + len(path)
                p = distribution(scores[b, here + 1])
                k = draft.lengths[b] if fine else 0
                children = [i for i in range(here + 1, k) if parents[b][i] == here]
                q = ask(b, children[0]) if children else None
                taken: int | None = None
                if q is not None:
                    r = [float(self.randomness.uniform([row], [position], Purpose.ACCEPT + i)[0]) for i in children]
                    taken, p = choose_candidate(p, q, [tokens[b][i] for i in children], r)
                if taken is None:
                    u = self.randomness.tensor([row], [position], Purpose.CHOOSE, p.device)
                    judged.append(Judgement(path, int(draw(p[None], u))))
                    break
                here = children[taken]
                path.append(here)
        return judged, fine

    def stepwise(
        self, draft: Draft, logits: Tensor, sequences: Sequences, ask: Residual
    ) -> Iterator[tuple[list[int], list[bool], Tensor]]:
        """Judge a lockstep batch position by position; the caller appends to `sequences.ids` between two steps.

        Yields:
            tokens [B], whether each row agreed with its draft, the processed scores [B, V].
        """
        rows, nodes, vocab = logits.shape
        sound = bool(is_sound(draft, vocab))
        start = sequences.lengths[0]
        drafted = draft.tokens.tolist()
        for i in range(nodes):
            position = start + i
            scores = self.all_processors(sequences.ids[:, :position], logits[:, i].float().clone())
            tested = i < nodes - 1 and sound
            if not self.do_sample:
                tokens = scores.argmax(-1).tolist()
            else:
                p = distribution(scores)
                if tested and draft.token_probs is not None:
                    p = self._one_test(draft, i, p, sequences.rows, position, ask)
                at = [position] * rows
                tokens = draw(p, self.randomness.tensor(sequences.rows, at, Purpose.CHOOSE, p.device)).tolist()
            yield tokens, [tested and i < draft.lengths[b] and drafted[b][i] == tokens[b] for b in range(rows)], scores

    def _one_test(self, draft: Draft, i: int, p: Tensor, rows: list[int], position: int, ask: Residual) -> Tensor:
        """Algorithm 1 at one position [B, V]: an accepted token's distribution has all its mass on it."""
        assert draft.token_probs is not None
        r = self.randomness.uniform(rows, [position] * len(rows), Purpose.ACCEPT).tolist()
        x = draft.tokens[:, i].tolist()
        for b in range(len(x)):
            if i >= draft.lengths[b]:
                continue
            px, qx = float(p[b, x[b]]), float(draft.token_probs[b, i])
            self.stats.acceptance_sum += min(1.0, px / qx)
            self.stats.acceptance_count += 1
            if r[b] * qx < px:
                p[b] = torch.nn.functional.one_hot(draft.tokens[b, i], p.shape[1]).to(p)
            else:
                p[b] = self.corrected(p[b], b, i, ask)
        return p

    def corrected(self, p: Tensor, b: int, node: int, ask: Residual) -> Tensor:
        """p' [V] after node `node` of row b was rejected; p where the drafter broke down and cannot say q."""
        q = ask(b, node)
        return p if q is None else residual(p[None], q.to(p)[None])[0]

    def _note_acceptance(self, accepted: list[int], lengths: list[int], beta: Sequence[float], width: int) -> None:
        for b, (n, k) in enumerate(zip(accepted, lengths, strict=True)):
            tested = min(n + 1, k)
            self.stats.acceptance_sum += sum(beta[b * width : b * width + tested])
            self.stats.acceptance_count += tested

    def _prefixes(
        self, drafted: Tensor, tree: Tensor | None, sequences: Sequences, depth: list[list[int]]
    ) -> tuple[Tensor, list[int]]:
        """ids [R, capacity] and, per position, the row in it whose first columns come before the position."""
        rows, nodes = len(depth), len(depth[0])
        ids, k = sequences.ids, nodes - 1
        if not self.processing.reads_prefix:
            return ids, [0] * (rows * nodes)
        if tree is None:
            for b, length in enumerate(sequences.lengths):  # columns past the length are free to write to
                ids[b, length : length + k] = drafted[b, : ids.shape[1] - length]
            return ids, [b for b in range(rows) for _ in range(nodes)]
        expanded = ids.repeat_interleave(nodes, dim=0)
        parents = tree.tolist()
        for b, length in enumerate(sequences.lengths):
            for node in range(k):
                mine, above = b * nodes + node + 1, b * nodes + parents[b][node] + 1
                expanded[mine] = expanded[above]
                expanded[mine, length + depth[b][node + 1] - 1] = drafted[b, node]
        return expanded, list(range(rows * nodes))


def is_sound(draft: Draft, vocab: int) -> Tensor:
    """Whether all ids are in the vocabulary and all q are probabilities; a boolean on the draft's device."""
    fine = (draft.tokens >= 0) & (draft.tokens < vocab)
    if draft.token_probs is not None:
        fine &= (draft.token_probs > 0) & (draft.token_probs <= 1 + 1e-4)  # false for NaN
    width = draft.tokens.shape[1]
    if min(draft.lengths, default=width) < width:
        lengths = torch.tensor(draft.lengths, device=fine.device)[:, None]
        fine |= torch.arange(width, device=fine.device) >= lengths
    return fine.all()
