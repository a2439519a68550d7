"""The judge of a round: from a draft and the target's logits to the tokens that are kept.

Two ways that give the same tokens: `block` processes all positions at once (known processors only), `stepwise` one
position after the other, so that a user's processor sees exactly plain decoding's calls.

A node without logits of its own (it was pruned in mid-forward, or never fed) is tested like any other, by its parent's
logits. If it is accepted the row's text ends with it: there is nothing to draw another token from.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..protocol import Draft, Sequences
from ..schedule import Correct, Meanwhile
from ..stats import SpeculationStats
from ..transfer import to_device, to_host
from .block import Block, Judgement, Trial
from .drafts import NO_VALUES, as_tree, is_sound, to_host_together
from .largest import argmax, topk
from .noise import Noise
from .processing import Processing, depths_of_places
from .randomness import Purpose, Randomness
from .rules import EXACT, Rules
from .sampled import Draws, drawn_from_points
from .verification import accepted_lengths, distribution, draw, follow, gumbel_max, tolerance


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
    """how many of the target's likeliest tokens to tell of every place"""
    draws: Draws = field(init=False)

    def __post_init__(self) -> None:
        self.draws = Draws(self.randomness, self.stats, self.rules)

    @property
    def tolerant(self) -> bool:
        """Whether a drafted token may stand in place of the one that the target chose: lenient greedy decoding."""
        return self.rules.lenience != EXACT and not self.do_sample

    # ------------------------------------------------------------------ all positions at once

    def block(
        self,
        draft: Draft,
        logits: Tensor,
        sequences: Sequences,
        nodes: Tensor | None = None,
        answered: list[int] | None = None,
        correct: Correct | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Block:
        """Judge all rows at once.

        Args:
            logits: [B, N, V] after the last accepted token and after N - 1 nodes.
            nodes: [B, N - 1] which ones (`Forward.nodes`); None for the first.
            answered: [B] how many of those count in each row; None for all.
            correct: what to draw from after a rejection; None where `draft.q` says it.
            meanwhile: told of chains what the host is about to read.
        """
        rows, places, vocab = logits.shape
        kept: list[list[int]] | None = None
        if nodes is not None:  # judged as a tree, whose walk knows which nodes there are
            draft, kept = draft if draft.parents is not None else as_tree(draft), to_host(nodes)
        depths = depths_of_places(draft, places, kept)
        trial = Trial(
            draft,
            sequences,
            self.processing.of_draft(logits, draft, sequences, depths, kept),
            kept or [range(count) for count in answered or [places - 1] * rows],
            is_sound(draft, vocab),
            topk(logits, self.likeliest)[1] if self.likeliest else NO_VALUES,
        )
        if self.do_sample and draft.tokens.shape[1]:
            if self.rules.lenience != EXACT and draft.token_probs is None:
                trial.draft = draft = drawn_from_points(draft, vocab)
            if draft.token_probs is not None:
                chain = draft.parents is None
                return self.draws.chain(trial, correct, meanwhile) if chain else self.draws.tree(trial)
        return self._chosen(trial, depths, meanwhile)

    def _chosen(self, trial: Trial, depths: list[list[int]], meanwhile: Meanwhile | None) -> Block:
        """Point masses: the target chooses a token at every place, and a draft is accepted as far as it agrees."""
        draft, places = trial.draft, trial.scores.shape[1]
        choices = self._choices(trial, depths)
        if self.tolerant and draft.tokens.shape[1]:
            choices = self._tolerated(choices, trial)

        def chain_told() -> None:
            """The same on the device."""
            if meanwhile is not None and draft.parents is None:
                agrees = choices[:, : draft.tokens.shape[1]] == draft.tokens
                meanwhile(accepted_lengths(agrees, trial.counted), choices)

        told = trial.sound, choices, draft.tokens, trial.likeliest
        sound, chosen, flat, likeliest = to_host_together(*told, meanwhile=chain_told)
        drafted, judged = trial.tokens(flat, all(sound)), []
        for b, tokens in enumerate(drafted):
            where, parents = trial.places(b), None if draft.parents is None else draft.parents[b]
            wanted = [chosen[b * places + where[i]] if i in where else None for i in range(-1, len(tokens))]
            path = follow(tokens, parents, wanted)
            own = wanted[path[-1] + 1 if path else 0]
            judged.append(Judgement(path, [tokens[node] for node in path] + ([] if own is None else [own])))
        # In a chain an accepted token is the one that was chosen.
        return trial.decided(judged, all(sound), drafted, likeliest, choices if draft.parents is None else None)

    def _choices(self, trial: Trial, depths: list[list[int]]) -> Tensor:
        """The target's own token at every place [B, N]."""
        rows, places, _ = trial.scores.shape
        if not self.do_sample and self.noise is None:
            return argmax(trial.scores)
        s, scores = trial.sequences, trial.scores.flatten(0, 1)
        owners = [row for row in s.rows for _ in range(places)]
        lengths = [length + depth for length, below in zip(s.lengths, depths, strict=True) for depth in below]
        if self.noise is not None:
            return gumbel_max(scores + self.noise(owners, lengths, scores)).view(rows, places)
        u = self.randomness.tensor(owners, lengths, Purpose.CHOOSE, scores.device)
        return draw(distribution(scores), u).view(rows, places)

    def _tolerated(self, choices: Tensor, trial: Trial) -> Tensor:
        """Choices [B, N] where, of the drafted tokens behind a place that pass, the best one is the choice."""
        draft, (rows, places, vocab) = trial.draft, trial.scores.shape
        width, nowhere = draft.tokens.shape[1], places
        behind = []
        for b, count in enumerate(draft.lengths):
            where = trial.places(b)
            above = range(-1, width - 1) if draft.parents is None else draft.parents[b]
            behind.append([where.get(above[i], nowhere) if i < count else nowhere for i in range(width)])
        place = to_device(behind, trial.scores.device).view(rows, width)
        every = torch.arange(rows, device=trial.scores.device)[:, None]
        tokens = draft.tokens.clamp(0, vocab - 1)
        at = trial.scores[every, place.clamp(max=places - 1)].view(-1, vocab)
        margin = tolerance(at, tokens.flatten(), self.rules.lenience).view(rows, width)
        margin = torch.where(trial.sound & (place < nowhere), margin, -1.0)
        best = margin.new_full((rows, places + 1), -1.0).scatter_reduce(1, place, margin, "amax")
        wins = (margin >= 0) & (margin == best.gather(1, place))
        taken = torch.where(wins, place, nowhere)
        return torch.nn.functional.pad(choices, (0, 1)).scatter(1, taken, tokens)[:, :places]

    # ------------------------------------------------------------------ one position after the other

    def stepwise(
        self, draft: Draft, logits: Tensor, sequences: Sequences, correct: Correct | None = None
    ) -> Iterator[tuple[list[int], list[bool], Tensor]]:
        """Judge a lockstep batch of chains position by position; the caller appends to `sequences.ids` between steps.

        Yields:
            tokens [B], whether each row agreed with its draft, the processed scores [B, V].
        """
        rows, places, vocab = logits.shape
        sound = bool(is_sound(draft, vocab).all())
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
