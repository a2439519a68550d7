"""A hierarchy of drafts: a draft model that is itself sped up by copies of the text, or by a smaller model.

What the draft model would draw next is guessed, and read in one forward together with the token before. The tokens are
drawn from its own distributions as ever; where they are as guessed, the next step is known already. So what is drafted,
and how likely it was, is what it would have been, and the same holds one floor further up (Leviathan 2023, §6).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...budget import Advance, Cost, DraftCost, Survival, most_per_second, steps_that_pay
from ...clock import now
from ...errors import SpeculationError, expect_model
from ...hub.tokenizer import sizes_apart
from ...target.probe import Support, ability, support
from ...transfer import to_device, to_host
from ...verify.largest import argmax
from .over_cache import OverCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MATCHES = (4, 3, 2)
"""tokens that an earlier place must share with the end of the text, the more the better"""
LONGEST = 8
"""tokens guessed at once"""
SMALLER = 0.6
"""how often the smaller model is taken to guess right before anything was measured"""
TOGETHER = Advance(lockstep=True)
"""a step is known where the guesses of all rows are right"""
HOW = "how_it_reads_ahead"
"""the attribute of a draft model that says so"""


@dataclass
class ReadingAhead:
    """How a draft model reads ahead, and what was measured of it."""

    smaller: "PreTrainedModel | None" = None
    """guesses; None for copies of the text"""
    survival: Survival = field(default_factory=Survival)
    """of guesses"""
    cost: Cost = field(default_factory=Cost)
    """of the draft model's forwards"""
    smaller_cost: DraftCost = field(default_factory=DraftCost)
    """of the smaller model's steps"""

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReadingAhead":
        return self


def read_ahead(draft_model: "PreTrainedModel", smaller: "PreTrainedModel | None" = None) -> None:
    """Speed up a draft model, in place, for whatever drafts with it, PEARL's worker included: before each of its steps
    the next ones are guessed, as many as promise to pay, and read with it. What it drafts stays the same.

    Args:
        smaller: a model of the same tokenizer, which guesses (and may itself read ahead); None guesses what followed
            the same words before.

    Raises:
        SpeculationError: no model (a drafter has its own as `drafter.draft_model`), a smaller one of another
            vocabulary, or one that reads ahead by this draft model.
    """
    expect_model("draft_model", draft_model)
    if smaller is not None:
        expect_model("smaller", smaller)
    below = smaller
    while below is not None:
        if below is draft_model:
            raise SpeculationError(
                "smaller must be another model than draft_model; pass a smaller one, or None to guess by copying"
            )
        below = how.smaller if (how := reading_ahead(below)) is not None else None
    if smaller is not None:
        mine, theirs = (model.config.get_text_config(decoder=True).vocab_size for model in (draft_model, smaller))
        if sizes_apart(mine, theirs):
            raise SpeculationError(
                f"smaller has a vocabulary of {theirs} tokens and the draft model one of {mine}; pass a model "
                "with the same tokenizer, or None to guess by copying"
            )
        if support(smaller) < Support.LOCKSTEP:
            raise SpeculationError(
                f"smaller is a {type(smaller).__name__}, which {ability(smaller).why}; pass a model with "
                "attention layers only, or None to guess by copying"
            )
    vars(draft_model)[HOW] = ReadingAhead(smaller)


def read_stepwise(draft_model: "PreTrainedModel") -> None:
    """Undo `read_ahead`."""
    vars(draft_model).pop(HOW, None)


def reading_ahead(draft_model: "PreTrainedModel") -> ReadingAhead | None:
    """How a draft model reads ahead; None where it does not."""
    return vars(draft_model).get(HOW)


class Guess(NamedTuple):
    """What one row's text may go on with."""

    tokens: Sequence[int]
    kinds: Sequence[Hashable]
    chances: Sequence[float]
    """of each token, where those before it are right"""


class Ahead:
    """What a draft model has read beyond the text of its rows."""

    def __init__(self, how: ReadingAhead, smaller: OverCache | None) -> None:
        """
        Args:
            smaller: the smaller model over its own cache, of the same rows.
        """
        self.how, self.smaller = how, smaller
        how.smaller_cost.begin()
        self.steps = self.known = 0
        """all, and those that needed no forward"""
        self._price = 0.0
        """of a look at the smaller model, as `DraftCost.asked` has it"""
        self.forget()

    def forget(self) -> None:
        """Nothing that was read is behind the text any more."""
        self._guesses: list[list[int]] = []
        self._kinds: list[Sequence[Hashable]] = []
        self._logits: Tensor | None = None
        self._right = 0

    def recall(self, ids: Tensor, lengths: Sequence[int]) -> Tensor | None:
        """Logits [B, V] behind one more token per row, where all of them were guessed; else None."""
        self.steps += 1
        if self._logits is None or self._right >= min(map(len, self._guesses)):
            return None
        here = self._right
        tokens = to_host(ids.gather(1, to_device(lengths, ids.device)[:, None] - 1)[:, 0])
        right = [guessed[here] == token for guessed, token in zip(self._guesses, tokens, strict=True)]
        for kinds, found in zip(self._kinds, right, strict=True):
            if here < len(kinds):
                self.how.survival.observe(kinds[here], found)
        if not all(right):
            return None
        self._right += 1
        self.known += 1
        return self._logits[:, self._right]

    def guess(self, ids: Tensor, lengths: Sequence[int], room: int) -> list[list[int]]:
        """[B] what each row may go on with: as many tokens in each, as many as promise to pay."""
        self.how.smaller_cost.kept([self._right] * len(lengths), self._price, self.how.cost, TOGETHER)
        self.forget()
        how, rows = self.how, len(lengths)
        guesses = self._copied(ids, lengths) if self.smaller is None else self._drafted(ids, lengths, room)
        longest = min(room, LONGEST, max(len(guess.tokens) for guess in guesses))
        if longest < 1:
            return [[] for _ in guesses]
        survival = [list(accumulate(guess.chances, mul)) for guess in guesses]
        count = how.cost.tried(rows)
        if count is None:
            count, _ = most_per_second(survival, how.cost.round(rows), advance=TOGETHER)
            count = count or int(self.smaller is not None)  # it was asked to be looked at
        self._kinds = [guess.kinds for guess in guesses]
        count = min(count, longest)
        # A row without a guess cannot be right: the first token of a vocabulary stands in.
        self._guesses = [[*guess.tokens[:count], *[0] * (count - len(guess.tokens))] for guess in guesses]
        return self._guesses

    def remember(self, logits: Tensor) -> None:
        """Logits [B, 1 + guesses, V] behind the text and behind each guess."""
        self._logits = logits if self._guesses and self._guesses[0] else None

    def _copied(self, ids: Tensor, lengths: Sequence[int]) -> list[Guess]:
        """What followed the last place that reads as the end of each row's text does."""
        survival, found = self.how.survival, []
        for row, length in zip(to_host(ids), lengths, strict=True):
            match, tokens = copied(np.array(row[:length]))
            kinds = [("copied", min(match + i, LONGEST)) for i in range(len(tokens))]
            chances = [survival.chance(kind, kind[1] / (kind[1] + 2)) for kind in kinds]
            found.append(Guess(tokens, kinds, chances))
        return found

    def _drafted(self, ids: Tensor, lengths: Sequence[int], room: int) -> list[Guess]:
        """What the smaller model goes on with, as far as its steps promise to pay."""
        how, model, rows = self.how, self.smaller, len(lengths)
        assert model is not None
        kinds = [("smaller", i) for i in range(LONGEST)]
        chances = [how.survival.chance(kind, SMALLER) for kind in kinds]
        steps, cost = LONGEST // 2, how.smaller_cost
        if cost.step is not None and how.cost.known:
            steps = steps_that_pay(
                [[]] * rows,
                [1.0] * rows,
                [chances[:1]] * rows,
                how.cost.round(rows),
                cost.step,
                advance=TOGETHER,
            )
        price = cost.asked(steps > 0, how.cost, rows)
        self._price = price or 0.0
        if price is None:
            return [Guess([], [], [])] * rows
        steps = min(max(steps, 1), room, model.context_limit - max(lengths))
        if steps < 1:
            return [Guess([], [], [])] * rows
        began, text, ends = now(), torch.nn.functional.pad(ids, (0, steps)), list(lengths)
        logits = model.catch_up(text, ends)
        for step in range(steps):
            text[torch.arange(rows), ends] = argmax(logits).to(text.device)
            ends = [end + 1 for end in ends]
            if step + 1 < steps:
                logits = model.feed(text, ends)
        model.roll_back()
        tokens = [row[length : length + steps] for row, length in zip(to_host(text), lengths, strict=True)]
        cost.observe((now() - began) / steps)
        return [Guess(mine, kinds[:steps], chances[:steps]) for mine in tokens]

    def notes(self) -> list[str]:
        """What it gained, in words."""
        if not self.steps:
            return []
        return [f"{self.known} of {self.steps} draft steps were read ahead and needed no forward of the draft model"]


def copied(text: np.ndarray) -> tuple[int, list[int]]:
    """How many tokens the last place that reads as the end of a text [n] shares with it, and what followed there."""
    for match in MATCHES:
        if len(text) <= match:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], match)
        places = np.flatnonzero((windows == text[-match:]).all(1))
        if len(places):
            start = int(places[-1]) + match
            return match, text[start : start + LONGEST].tolist()
    return 0, []
