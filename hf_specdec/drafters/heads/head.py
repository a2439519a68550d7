"""`Head`: what a kind of heads reads of the target, and how it draws from that. Each kind has a file of its own."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...protocol import DraftContext, Feature
from ...target.cache import RaggedCache
from ...transfer import moved
from ..drawn import Draw

StateT = TypeVar("StateT")


class News(NamedTuple):
    """What heads have not read yet: N places, of which the first `counts` are each row's."""

    states: Tensor
    """[B, N, H] hidden states of the target, or whatever is read of it, side by side"""
    tokens: Tensor
    """[B, N] the token that the target chose from each state"""
    counts: Tensor
    """[B], at least 1"""
    first: Tensor
    """[B, 1] the position of each row's first slot: above 0 where the call went on from a cache"""

    def slots(self, cache: RaggedCache) -> Tensor:
        """[B, N] of the states, which stand behind what is in the cache."""
        return cache.slots.ends[:, None] + torch.arange(self.tokens.shape[1], device=self.tokens.device)

    def last(self, values: Tensor, back: int = 1) -> Tensor:
        """[B, 1, ...] of values [B, N, ...] each row's last, or as many back as there are."""
        rows = torch.arange(len(self.counts), device=self.counts.device)
        return values[rows, (self.counts - back).clamp(min=0)][:, None]


class Head(ABC):
    """Of one call. A kind of heads says here what it is like, and writes `draft`."""

    features: Sequence[Feature] = (-1,)
    """of the target's forwards, which are read side by side"""
    at_once = True
    independent = False
    """both as of `Steps`"""
    forwards = 1
    """of a draft; where not all is drafted at once, of a step"""
    again = 0
    """slots at the end of each row that are read anew in every round, because drafted tokens filled them"""
    beyond = 0
    """slots that a draft takes behind what it reads"""

    def __init__(self, context: DraftContext, model: Any, device: torch.device, most: int) -> None:
        """
        Args:
            model: the head's own.
            device: where that reads states.
            most: K, tokens of a draft.
        """
        assert context.target is not None, "heads draft where the target is"
        self.target, self.model, self.device, self.most = context.target, model, device, most
        self.held: PreTrainedConfig = model.config
        """of the layers whose keys and values are kept"""

    @property
    def usual(self) -> int:
        """Places that a draft reads at most if the round before had one, too."""
        return self.most + 1 + self.again

    @abstractmethod
    def draft(self, news: News, cache: RaggedCache, most: int, draw: Draw) -> None:
        """Read the news into the cache, and draw at most so many tokens per row behind them. It asks the device
        nothing; a step that is recorded does the same whenever news of this shape come again."""


class ChainHead(Head, Generic[StateT]):
    """One step after the other, each from a state that the one before has made, and the token that was drawn there."""

    at_once = False

    @abstractmethod
    def begin(self, news: News, cache: RaggedCache, most: int) -> StateT:
        """Read the news: the state from which the first of at most so many tokens is drawn."""

    @abstractmethod
    def step(self, state: StateT, tokens: Tensor) -> StateT:
        """The next state, behind tokens [B, 1] that were drawn from this one."""

    @abstractmethod
    def logits(self, state: StateT) -> Tensor:
        """[B, V] over the target's vocabulary."""

    def draft(self, news: News, cache: RaggedCache, most: int, draw: Draw) -> None:
        state = self.begin(news, cache, most)
        for k in range(most):
            tokens = draw(self.logits(state))
            if k + 1 < most:
                state = self.step(state, moved(tokens, self.device)[:, None])
