"""The judge of a round: from a draft and the target's logits to the tokens that are kept.

Two ways that give the same tokens: `block` processes all positions at once (known processors only), `stepwise` one
position after the other, so that a user's processor sees exactly plain decoding's calls.

A node that the target gave no logits for (it was pruned in mid-forward, or never fed) is tested like any other, by its
parent's logits. If it is accepted the row's text ends with it: there is nothing to draw another token from.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..protocol import Draft, Sequences
from ..schedule import Correct
from ..stats import SpeculationStats
from ..transfer import to_device, to_host
from .block import Block, Judgement
from .drafts import as_tree, depths_of_places, is_sound, padded
from .largest import argmax
from .noise import Noise
from .processing import Processing
from .randomness import Purpose, Randomness
from .rules import EXACT, Rules
from .sampled import Draws, drawn_from_points
from .successors import Successors
from .verification import distribution, draw, follow, gumbel_max, tolerance


@dataclass
class Judge:
    """Everything that decides which tokens are kept, for one call."""

    processing: Processing
    all_processors: Callable[[Tensor, Tensor], Tensor]
    """the call's whole processor list, for `stepwise`"""
    do_sample: bool
    """whether tokens are drawn; with `noise` the likeliest one is taken instead"""
    randomness: Randomness
    stats: SpeculationStats
    rules: Rules = field(default_factory=Rules)
    noise: Noise | None = None
    """of coupled sampling"""
    likeliest: int = 0
    """tokens to tell of every place; they come with what a round reads in any case"""
    draws: Draws = field(init=False)

    def __post_init__(self) -> None:
        self.draws = Draws(self.randomness, self.stats, self.rules)

    @property
    def tolerant(self) -> bool:
        """Whether a drafted token may stand in place of the one that the target chose: lenient greedy decoding."""
        return self.rules.lenience != EXACT and not self.do_sample

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
            if self.do_sample or self.processing.reads_prefix or self.tolerant:  # else they come with the answer
                kept = to_host(nodes)
        depth = depths_of_places(draft, places, kept)
        lengths = [n + d for n, below in zip(sequences.lengths, depth, strict=True) for d in below]
        scores = self._processed(logits, draft, sequences, depth, lengths, kept).view(rows, places, vocab)
        sound, likeliest = is_sound(draft, vocab), Successors.of(logits, self.likeliest)
        if self.do_sample and draft.tokens.shape[1]:
            if self.rules.lenience != EXACT and draft.token_probs is None:
                draft = drawn_from_points(draft, vocab)
            if draft.token_probs is not None and draft.parents is not None:
                return self.draws.tree(draft, scores, sequences, sound, likeliest, kept)
            if draft.token_probs is not None:
                return self.draws.chain(draft, scores, sequences, sound, likeliest, answered, correct)
        return self._chosen(draft, scores, sequences, lengths, sound, likeliest, nodes, kept, answered)

    def _chosen(
        self,
        draft: Draft,
        scores: Tensor,
        sequences: Sequences,
        lengths: list[int],
        sound: Tensor,
        likeliest: Successors,
        nodes: Tensor | None,
        kept: list[list[int]] | None,
        answered: list[int] | None,
    ) -> Block:
        """Point masses: the target chooses a token at every place, and a draft is accepted as far as it agrees."""
        rows, places, vocab = scores.shape
        width = draft.tokens.shape[1]
        owner = [row for row in sequences.rows for _ in range(places)]
        if self.noise is not None:
            noisy = scores.view(-1, vocab) + self.noise(owner, lengths, scores.view(-1, vocab))
            choices = gumbel_max(noisy).view(rows, places)
        elif self.do_sample:
            u = self.randomness.tensor(owner, lengths, Purpose.CHOOSE, scores.device)
            choices = draw(distribution(scores.view(-1, vocab)), u).view(rows, places)
        else:
            choices = argmax(scores)
        if self.tolerant and width:
            choices = self._tolerated(choices, draft, scores, sound, kept)
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

    def _tolerated(
        self, choices: Tensor, draft: Draft, scores: Tensor, sound: Tensor, kept: list[list[int]] | None
    ) -> Tensor:
        """Choices [B, N] where, of the drafted tokens behind a place that pass, the best one is the choice."""
        rows, places, vocab = scores.shape
        width = draft.tokens.shape[1]
        behind = []
        for b, count in enumerate(draft.lengths):
            there = range(width) if kept is None else kept[b]
            where = {-1: 0} | {node: i + 1 for i, node in enumerate(there) if node >= 0 and i + 1 < places}
            above = range(-1, width - 1) if draft.parents is None else draft.parents[b]
            behind.append([where.get(above[i], places) if i < count else places for i in range(width)])
        place = to_device(behind, scores.device).view(rows, width)  # one past the last for what counts nowhere
        every = torch.arange(rows, device=scores.device)[:, None]
        tokens = draft.tokens.clamp(0, vocab - 1)
        at = scores[every, place.clamp(max=places - 1)].view(-1, vocab)
        margin = tolerance(at, tokens.flatten(), self.rules.lenience).view(rows, width)
        margin = torch.where(sound & (place < places), margin, -1.0)
        best = margin.new_full((rows, places + 1), -1.0).scatter_reduce(1, place, margin, "amax")
        wins = (margin >= 0) & (margin == best.gather(1, place))
        taken = torch.where(wins, place, places)
        return torch.nn.functional.pad(choices, (0, 1)).scatter(1, taken, tokens)[:, :places]

    def stepwise(
        self, draft: Draft, logits: Tensor, sequences: Sequences, correct: Correct | None = None
    ) -> Iterator[tuple[list[int], list[bool], Tensor]]:
        """Judge a lockstep batch of chains position by position; the caller appends to `sequences.ids` between steps.

        Yields:
            tokens [B], whether each row agreed with its draft, the processed scores [B, V].
        """
        rows, places, vocab = logits.shape
        sound = bool(is_sound(draft, vocab))
        if self.do_sample and self.rules.lenience != EXACT and draft.token_probs is None:
            draft = drawn_from_points(draft, vocab)
        start = sequences.lengths[0]
        drafted = draft.tokens.tolist()
        for i in range(places):
            position = start + i
            scores = self.all_processors(sequences.ids[:, :position], logits[:, i].float().clone())
            tested = i < draft.tokens.shape[1] and sound
            at = [position] * rows
            if self.noise is not None:
                tokens = gumbel_max(scores + self.noise(sequences.rows, at, scores)).tolist()
            elif not self.do_sample:
                tokens = argmax(scores).tolist()
            else:
                p = distribution(scores)
                if tested and draft.token_probs is not None:
                    p = self.draws.one_test(draft, i, p, sequences.rows, position, correct)
                tokens = draw(p, self.randomness.tensor(sequences.rows, at, Purpose.CHOOSE, p.device)).tolist()
            if tested and self.tolerant:
                margins = tolerance(scores, draft.tokens[:, i], self.rules.lenience)
                passes = [margin >= 0 and i < n for margin, n in zip(margins.tolist(), draft.lengths, strict=True)]
                tokens = [drafted[b][i] if passes[b] else token for b, token in enumerate(tokens)]
            yield tokens, [tested and i < draft.lengths[b] and drafted[b][i] == tokens[b] for b in range(rows)], scores

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
