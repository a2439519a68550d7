"""The judge of a round: from a draft and the target's logits to the tokens that are kept.

Two ways that give the same tokens: `verify` processes all positions at once (known processors only), `stepwise` one
position after the other, so that a user's processor sees exactly plain decoding's calls.

A node without logits of its own (it was pruned in mid-forward, or never fed) is tested like any other, by its parent's
logits. If it is accepted the row's text ends with it: there is nothing to draw another token from.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..protocol import Found
from ..stats import SpeculationStats
from ..transfer import moved, to_device, to_host
from .drafts import as_tree, is_sound
from .greedy import Told
from .largest import argmax
from .noise import Noise
from .processing import Processing, depths_of_places
from .randomness import Purpose, Randomness
from .rules import EXACT, Rules
from .sampled import Draws, drawn_from_points
from .trial import Result, Trial
from .verification import accepted_lengths, distribution, draw, follow, gumbel_max, tolerance

Position = tuple[list[int], list[bool], Tensor | None]
"""tokens [B], whether each row agrees with its draft, processed scores [B, V] where they are wanted"""


@dataclass(eq=False)
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

    @property
    def tolerant(self) -> bool:
        """Whether a drafted token may stand in place of the one that the target chose: lenient greedy decoding."""
        return self.rules.lenience != EXACT and not self.do_sample

    # ------------------------------------------------------------------ all positions at once

    def verify(self, trial: Trial) -> list[Result]:
        """Judge all rows at once; returns what each gains [B], and completes the trial."""
        rows, places, vocab = trial.forward.logits.shape
        if trial.forward.found is not None:
            return self._found(trial, trial.forward.found)
        if trial.forward.nodes is None:
            trial.nodes = [range(count) for count in trial.answered or [places - 1] * rows]
        else:  # judged as a tree, whose walk knows which nodes there are
            trial.draft, trial.nodes = as_tree(trial.draft), to_host(trial.forward.nodes)
        draft = trial.draft
        trial.depths, trial.in_range = draft.depths(), is_sound(draft, vocab)
        depths = depths_of_places(trial)
        trial.scores = self.processing.of_trial(trial, depths)
        if self.do_sample and self.rules.lenience != EXACT and draft.tokens.shape[1] and draft.token_probs is None:
            trial.draft = draft = drawn_from_points(draft, vocab)
        if self.do_sample and draft.tokens.shape[1] and draft.token_probs is not None:
            draws = Draws(self.randomness, self.stats, self.rules)
            results = draws.chain(trial) if draft.parents is None else draws.tree(trial)
        else:
            results = self._chosen(trial, depths)
        self.randomness.advance(trial.sequences.rows)  # block tests of these places again need numbers of their own
        return results

    def _chosen(self, trial: Trial, depths: list[list[int]]) -> list[Result]:
        """Point masses: the target chooses a token at every place, and a draft is accepted as far as it agrees."""
        draft, places = trial.draft, trial.scores.shape[1]
        choices = self._choices(trial, depths)
        if self.tolerant and draft.tokens.shape[1]:
            choices = self._tolerated(choices, trial)

        def chain_told() -> None:
            """The same on the device."""
            if trial.meanwhile is not None and draft.parents is None:
                agrees = choices[:, : draft.tokens.shape[1]] == moved(draft.tokens, choices.device)
                n = accepted_lengths(agrees, trial.counted)
                trial.meanwhile(n, trial.last_two(n, choices))

        (chosen,) = trial.read(choices, meanwhile=chain_told)
        results = []
        for b, tokens in enumerate(trial.tokens):
            where, parents = trial.places(b), None if draft.parents is None else draft.parents[b]
            wanted = [chosen[b * places + where[i]] if i in where else None for i in range(-1, len(tokens))]
            path = follow(tokens, parents, wanted)
            results.append(trial.result(b, path, wanted[path[-1] + 1 if path else 0]))
        # In a chain an accepted token is the one that was chosen.
        trial.texts = choices if draft.parents is None else trial.as_texts(results)
        return results

    @property
    def takes_likeliest(self) -> bool:
        """Whether the target's own token is always the one that its logits, as they are, say is likeliest."""
        as_they_are = not self.processing.processors and not self.processing.opaque
        return as_they_are and not self.do_sample and self.noise is None and self.rules.lenience == EXACT

    def _found(self, trial: Trial, found: Found) -> list[Result]:
        """Read what was accepted with the forward."""
        draft, width = trial.draft, found.texts.shape[1]
        told_of_chain = trial.meanwhile and draft.parents is None and partial(trial.meanwhile, found.n, found.last)
        rows = [Told.of(row, width) for row in to_host(found.told, told_of_chain or None)]
        trial.nodes, trial.depths = [range(trial.forward.logits.shape[1] - 1)] * len(rows), draft.depths()
        trial.learn(rows[0].sound, [row.drafted for row in rows])
        trial.likeliest = [row.likeliest for row in rows]
        trial.texts = found.texts[:, : trial.forward.logits.shape[1]]
        return [trial.result(b, row.path, row.tokens[-1]) for b, row in enumerate(rows)]

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
        tokens = moved(draft.tokens, trial.scores.device).clamp(0, vocab - 1)
        at = trial.scores[every, place.clamp(max=places - 1)].view(-1, vocab)
        margin = tolerance(at, tokens.flatten(), self.rules.lenience).view(rows, width)
        counts = place < nowhere
        margin = torch.where(counts & trial.in_range if trial.in_range.numel() else counts, margin, -1.0)
        best = margin.new_full((rows, places + 1), -1.0).scatter_reduce(1, place, margin, "amax")
        wins = (margin >= 0) & (margin == best.gather(1, place))
        taken = torch.where(wins, place, nowhere)
        return torch.nn.functional.pad(choices, (0, 1)).scatter(1, taken, tokens)[:, :places]

    # ------------------------------------------------------------------ one position after the other

    def stepwise(self, trial: Trial) -> Iterator[Position]:
        """Judge a lockstep batch of chains position by position, over the places that there are logits for in every
        row. The caller appends to the sequences' ids between steps."""
        draft, sequences, logits = trial.draft, trial.sequences, trial.forward.logits
        rows, places, vocab = logits.shape
        if trial.forward.nodes is not None:
            places = 1 + min(row.index(-1) if -1 in row else len(row) for row in to_host(trial.forward.nodes))
        trial.sound = sound = bool(is_sound(draft, vocab).all())
        if self.do_sample and self.rules.lenience != EXACT and draft.token_probs is None:
            draft = drawn_from_points(draft, vocab)
        start, drafted = sequences.lengths[0], draft.tokens.tolist()
        draws = Draws(self.randomness, self.stats, self.rules)
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
                    p = draws.one_test(draft, i, p, sequences.rows, position)
                tokens = draw(p, self.randomness.tensor(sequences.rows, at, Purpose.CHOOSE, p.device)).tolist()
            if tested and self.tolerant:
                margins = tolerance(scores, draft.tokens[:, i], self.rules.lenience)
                passes = [margin >= 0 and i < n for margin, n in zip(margins.tolist(), draft.lengths, strict=True)]
                tokens = [drafted[b][i] if passes[b] else token for b, token in enumerate(tokens)]
            yield tokens, [tested and i < draft.lengths[b] and drafted[b][i] == tokens[b] for b in range(rows)], scores
