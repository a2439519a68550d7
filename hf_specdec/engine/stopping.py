"""Stopping criteria, judged token by token as plain decoding judges them."""

import torch
from torch import Tensor
from transformers.generation import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from ..transfer import to_device


class Stopping:
    """EOS and lengths are compared on the host; stop strings and time are asked per row; the rest is *opaque*: it sees
    plain decoding's calls (the whole batch, once per position) or none."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self.criteria = criteria
        self.eos: frozenset[int] = frozenset()
        self.max_length: int | None = None
        self.asked: list = []
        self.has_eos = any(hasattr(c, "eos_token_id") for c in criteria)
        for c in criteria:
            if type(c) is EosTokenCriteria:
                self.eos |= frozenset(c.eos_token_id.flatten().tolist())
            elif type(c) is MaxLengthCriteria:
                self.max_length = min(c.max_length, self.max_length or c.max_length)
            else:
                self.asked.append(c)
        self.opaque = any(type(c) not in (MaxTimeCriteria, StopStringCriteria) for c in self.asked)

    def batch(self, ids: Tensor, length: int, tokens: list[int], scores: tuple[Tensor, ...] | None) -> list[bool]:
        """Which rows of a rectangular batch are finished: the first `length` columns of `ids` [B, any], which end in
        `tokens`."""
        if self.max_length is not None and length >= self.max_length:
            done = [True] * len(tokens)
        else:
            done = [token in self.eos for token in tokens]
        for criterion in self.asked:
            # A criterion may also answer with one value for all rows.
            done = (to_device(done, ids.device, torch.bool) | criterion(ids[:, :length], scores)).tolist()
        return done

    def row(self, ids: Tensor, b: int, length: int, token: int) -> bool:
        """Whether row b of `ids` [B, any], of so many tokens of which `token` is the last, is finished (no opaque
        criteria)."""
        if token in self.eos or (self.max_length is not None and length >= self.max_length):
            return True
        return any(bool(criterion(ids[b : b + 1, :length], None).any()) for criterion in self.asked)
