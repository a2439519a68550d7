"""The judge of a round: from a draft and the target's logits to the tokens that are kept.

Two ways that give the same tokens: `block` processes all positions at once (known processors only), `stepwise` one
position after the other, so that a user's processor sees exactly plain decoding's calls.

A node that the target gave no logits for (it was pruned in mid-forward, or never fed) is tested like any other, by its
parent's logits. If it is accepted the row's text ends with it: there is nothing to draw another token from.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..protocol import Draft, Sequences
from ..schedule import Correct
from ..stats import SpeculationStats
from ..transfer import to_device, to_host
from .drafts import as_tree, depths_of_places, is_sound, padded
from .processing import Processing
from .randomness import Purpose, Randomness
from .successors import Behind, Successors
from .verification import accepted_lengths, accepts, choose_candidate, distribution, draw, follow, residual


@dataclass
class Judgement:
    """What the target says of one row's draft."""

    path: list[int]
    """accepted nodes, from the root down"""
    text: list[int]
    """the tokens that it adds: theirs, then the target's own (the correction, or the bonus token), if there is one"""


class Block(NamedTuple):
    """What the target says of a round's drafts."""

    rows: list[Judgement]
    scores: Tensor
    """[B, N, V] processed, at every place that there are logits for"""
    sound: bool
    """whether ids and probabilities were in range; of an unsound draft no token is used"""
    texts: Tensor
    """[B, W] the rows' texts on the device; what lies past a row's is undefined"""
    likeliest: Behind
    """as in `Verdict`"""


@dataclass
class Judge:
    """Everything that decides which tokens are kept, for one call."""

    processing: Processing
    all_processors: Callable[[Tensor, Tensor], Tensor]
    """the call's whole processor list, for `stepwise`"""
    do_sample: bool
    randomness: Randomness
    stats: SpeculationStats
    likeliest: int = 0
    """tokens to tell of every place; they come with what a round reads in any case"""

    def block(
        self,
        draft: Draft,
        logits: Tensor,
        sequences: Sequences,
        nodes: Tensor | None = None,
        answered: list[int] | None = None,
        correct: Correct | None = None,
    ) -> Block:
        """Judge all rows at once.

        Args:
            logits: [B, N, V] after the last accepted token and after N - 1 nodes.
            nodes: [B, N - 1] which ones (`Forward.nodes`); None for the first.
            answered: [B] how many of those count in each row; None for all.
            correct: what to draw from after a rejection; None where `draft.q` says it.
        """
        rows, places, vocab = logits.shape
        kept: list[list[int]] | None = None
        if nodes is not None:  # judged as a tree, whose walk knows which nodes there are
            draft = draft if draft.parents is not None else as_tree(draft)
            if self.do_sample or self.processing.reads_prefix:  # else they come with the answer
                kept = to_host(nodes)
        depth = depths_of_places(draft, places, kept)
        lengths = [n + d for n, below in zip(sequences.lengths, depth, strict=True) for d in below]
        scores = self._processed(logits, draft, sequences, depth, lengths, kept).view(rows, places, vocab)
        sound, likeliest = is_sound(draft, vocab), Successors.of(logits, self.likeliest)
        if self.do_sample and draft.token_probs is not None and draft.tokens.shape[1]:
            if draft.parents is not None:
                return self._sampled_tree(draft, scores, sequences, sound, likeliest, kept)
            return self._sampled_chain(draft, scores, sequences, sound, likeliest, answered, correct)
        return self._chosen(draft, scores, sequences, lengths, sound, likeliest, nodes, answered)

    def _chosen(
        self,
        draft: Draft,
        scores: Tensor,
        sequences: Sequences,
        lengths: list[int],
        sound: Tensor,
        likeliest: Successors,
        nodes: Tensor | None,
        answered: list[int] | None,
    ) -> Block:
        """Point masses: the target chooses a token at every place, and a draft is accepted as far as it agrees."""
        rows, places, vocab = scores.shape
        width = draft.tokens.shape[1]
        if self.do_sample:
            owner = [row for row in sequences.rows for _ in range(places)]
            u = self.randomness.tensor(owner, lengths, Purpose.CHOOSE, scores.device)
            choices = draw(distribution(scores.view(-1, vocab)), u).view(rows, places)
        else:
            choices = scores.argmax(-1)
        # One transfer to the host tells everything.
        told = [choices.flatten(), draft.tokens.flatten(), sound.long()[None]]
        told += [] if nodes is None else [nodes.flatten()]
        packed = to_host(torch.cat([*told, likeliest.ids]))
        end = rows * (places + width) + 1
        fine = bool(packed[end - 1])
        kept = None if nodes is None else [packed[end + b * (places - 1) :][: places - 1] for b in range(rows)]
        judged, drafted = [], []
        for b in range(rows):
            chosen = packed[b * places : (b + 1) * places]
            start = rows * places + b * width
            tokens = packed[start : start + (draft.lengths[b] if fine else 0)]
            drafted.append(tokens)
            if kept is not None:
                where = {node: 1 + i for i, node in enumerate(kept[b]) if node >= 0}
                chosen = [chosen[0], *(chosen[where[i]] if i in where else None for i in range(len(tokens)))]
            elif answered is not None:
                chosen = chosen[: answered[b] + 1]
            path = follow(tokens, None if draft.parents is None else draft.parents[b], chosen)
            own = chosen[path[-1] + 1 if path else 0] if not path or path[-1] + 1 < len(chosen) else None
            judged.append(Judgement(path, [tokens[node] for node in path] + ([] if own is None else [own])))
        found = likeliest.behind(packed, sequences, drafted, kept, answered)
        if draft.parents is None:  # an accepted token is the one that was chosen
            return Block(judged, scores, fine, choices, found)
        return Block(judged, scores, fine, padded([judgement.text for judgement in judged], scores.device), found)

    def _sampled_chain(
        self,
        draft: Draft,
        scores: Tensor,
        sequences: Sequences,
        sound: Tensor,
        likeliest: Successors,
        answered: list[int] | None,
        correct: Correct | None,
    ) -> Block:
        """Algorithm 1 on a batch of chains."""
        rows, places, vocab = scores.shape
        k = draft.tokens.shape[1]
        assert draft.token_probs is not None
        p = distribution(scores)
        device = p.device
        drafted = draft.tokens.clamp(0, vocab - 1)
        p_drafted = p[:, :k].gather(2, drafted[..., None])[..., 0]
        r, u = self._uniform(sequences, k, places, device)
        q_drafted = torch.nan_to_num(draft.token_probs, nan=1.0)
        limits = to_device(draft.lengths, device) * sound
        n = accepted_lengths(accepts(p_drafted.double(), q_drafted.double(), r), limits)
        beta = (p_drafted / q_drafted.clamp_min(1e-30)).clamp(max=1.0).double()
        every = torch.arange(rows, device=device)
        at = n.clamp(max=places - 1)
        final = p[every, at]
        told = [n.double(), sound.double()[None], drafted.double().flatten(), beta.flatten(), likeliest.ids.double()]
        if correct is None and draft.q is not None:
            left = residual(final, draft.q[every, n.clamp(max=k - 1)].to(final))
            own = draw(torch.where((n < limits)[:, None], left, final), u[every, at])
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
            own = draw(final, u[every, at])
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

    def _uniform(self, sequences: Sequences, k: int, places: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The numbers of the tests [B, k] and of the target's own draws [B, places], sent together."""
        numbers = [
            self.randomness.uniform([row] * count, range(length, length + count), purpose)
            for purpose, count in ((Purpose.ACCEPT, k), (Purpose.CHOOSE, places))
            for row, length in zip(sequences.rows, sequences.lengths, strict=True)
        ]
        sent = to_device([x for part in numbers for x in part], device, torch.float64)
        rows = len(sequences.rows)
        return sent[: rows * k].view(rows, k), sent[rows * k :].view(rows, places)

    def _sampled_tree(
        self,
        draft: Draft,
        scores: Tensor,
        sequences: Sequences,
        sound: Tensor,
        likeliest: Successors,
        kept: list[list[int]] | None,
    ) -> Block:
        """Multi-candidate sampling from the root down, row by row. Siblings are independent draws, each from its q."""
        assert draft.parents is not None and draft.q is not None
        fine, *flat = to_host(torch.cat([sound.long()[None], draft.tokens.flatten(), likeliest.ids]))
        width = draft.tokens.shape[1]
        judged, drafted = [], []
        for b, (row, length) in enumerate(zip(sequences.rows, sequences.lengths, strict=True)):
            tokens, parents = flat[b * width : (b + 1) * width], draft.parents[b]
            drafted.append(tokens[: draft.lengths[b] if fine else 0])
            there = range(width) if kept is None else kept[b]
            where = {-1: 0} | {node: i + 1 for i, node in enumerate(there) if node >= 0}
            path: list[int] = []
            own: int | None = None
            while (here := path[-1] if path else -1) in where:
                position = length + len(path)
                p = distribution(scores[b, where[here]])
                children = [i for i in range(here + 1, draft.lengths[b] if fine else 0) if parents[i] == here]
                taken: int | None = None
                if children:
                    r = [float(self.randomness.uniform([row], [position], Purpose.ACCEPT + i)[0]) for i in children]
                    q = draft.q[b, children].to(p)
                    taken, p = choose_candidate(p, q, [tokens[i] for i in children], r)
                if taken is None:
                    u = self.randomness.tensor([row], [position], Purpose.CHOOSE, p.device)
                    own = int(draw(p[None], u))
                    break
                path.append(children[taken])
            judged.append(Judgement(path, [tokens[node] for node in path] + ([] if own is None else [own])))
        texts = padded([judgement.text for judgement in judged], scores.device)
        found = likeliest.behind(flat, sequences, drafted, kept)
        return Block(judged, scores, bool(fine), texts, found)

    def stepwise(
        self, draft: Draft, logits: Tensor, sequences: Sequences, correct: Correct | None = None
    ) -> Iterator[tuple[list[int], list[bool], Tensor]]:
        """Judge a lockstep batch of chains position by position; the caller appends to `sequences.ids` between steps.

        Yields:
            tokens [B], whether each row agreed with its draft, the processed scores [B, V].
        """
        rows, places, vocab = logits.shape
        sound = bool(is_sound(draft, vocab))
        start = sequences.lengths[0]
        drafted = draft.tokens.tolist()
        for i in range(places):
            position = start + i
            scores = self.all_processors(sequences.ids[:, :position], logits[:, i].float().clone())
            tested = i < draft.tokens.shape[1] and sound
            if not self.do_sample:
                tokens = scores.argmax(-1).tolist()
            else:
                p = distribution(scores)
                if tested and draft.token_probs is not None:
                    p = self._one_test(draft, i, p, sequences.rows, position, correct)
                at = [position] * rows
                tokens = draw(p, self.randomness.tensor(sequences.rows, at, Purpose.CHOOSE, p.device)).tolist()
            yield tokens, [tested and i < draft.lengths[b] and drafted[b][i] == tokens[b] for b in range(rows)], scores

    def _one_test(
        self, draft: Draft, i: int, p: Tensor, rows: list[int], position: int, correct: Correct | None
    ) -> Tensor:
        """Algorithm 1 at one position [B, V]: an accepted token's distribution has all its mass on it."""
        assert draft.token_probs is not None
        r = self.randomness.uniform(rows, [position] * len(rows), Purpose.ACCEPT).tolist()
        for b, x in enumerate(draft.tokens[:, i].tolist()):
            if i >= draft.lengths[b]:
                continue
            px, qx = p[b, x].double(), draft.token_probs[b, i].double()
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

    def _processed(
        self,
        logits: Tensor,
        draft: Draft,
        sequences: Sequences,
        depth: list[list[int]],
        lengths: list[int],
        kept: list[list[int]] | None,
    ) -> Tensor:
        """Scores [B · N, V] after the call's processors."""
        scores = logits.float().reshape(-1, logits.shape[-1])
        if not self.processing.processors:
            return scores
        # Bad ids are found out below; until then processors must not meet them.
        drafted = draft.tokens.clamp(0, logits.shape[-1] - 1)
        ids, index = self._prefixes(drafted, draft.parents, sequences, depth, kept)
        return self.processing(ids, index, lengths, scores.clone() if logits.dtype == torch.float32 else scores)

    def _prefixes(
        self,
        drafted: Tensor,
        tree: Sequence[Sequence[int]] | None,
        sequences: Sequences,
        depth: list[list[int]],
        kept: list[list[int]] | None,
    ) -> tuple[Tensor, list[int]]:
        """ids [R, capacity] and, per place, the row in it whose first columns come before the place."""
        rows, places = len(depth), len(depth[0])
        ids, k = sequences.ids, drafted.shape[1]
        if not self.processing.reads_prefix:
            return ids, [0] * (rows * places)
        if tree is None:
            for b, length in enumerate(sequences.lengths):  # columns past the length are free to write to
                ids[b, length : length + k] = drafted[b, : ids.shape[1] - length]
            return ids, [b for b in range(rows) for _ in range(places)]
        nodes = k + 1
        expanded = ids.repeat_interleave(nodes, dim=0)
        for b, length in enumerate(sequences.lengths):
            below = [0] * nodes
            for node in range(k):
                parent = tree[b][node]
                mine, above = b * nodes + node + 1, b * nodes + parent + 1
                below[node + 1] = below[parent + 1] + 1
                expanded[mine] = expanded[above]
                expanded[mine, length + below[node + 1] - 1] = drafted[b, node]
        if kept is None:
            return expanded, [b * nodes + i for b in range(rows) for i in range(places)]
        return expanded, [b * nodes + node + 1 for b in range(rows) for node in (-1, *kept[b])]
