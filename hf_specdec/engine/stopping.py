"""Stopping criteria, judged token by token as plain decoding judges them."""

from collections.abc import Callable
from functools import partial
from typing import Any

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

HARNESS = {"initial_decoder_input_length", "sequence", "sequence_id_len", "tokenizer"}
"""of lm-evaluation-harness's `MultiTokenEOSCriteria`"""


class Stopping:
    """EOS and lengths are compared on the host; stop strings and time are asked per row; the rest is *opaque*: it sees
    plain decoding's calls (the whole batch, once per position) or none. lm-evaluation-harness's stop strings hold up a
    batch until all rows have one, and it cuts what is behind each: rows at their own pace end there."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self.criteria = criteria
        self.eos: frozenset[int] = frozenset()
        self.max_length: int | None = None
        self.asked: list = []
        self.asked_of_rows: list[Callable[[Tensor], bool]] = []
        self.has_eos = any(hasattr(c, "eos_token_id") for c in criteria)
        for c in criteria:
            if type(c) is EosTokenCriteria:
                self.eos |= frozenset(c.eos_token_id.flatten().tolist())
            elif type(c) is MaxLengthCriteria:
                self.max_length = min(c.max_length, self.max_length or c.max_length)
            else:
                self.asked.append(c)
                self.asked_of_rows += of_one_row(c)
        self.opaque = len(self.asked_of_rows) < len(self.asked)

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
        return any(stops(ids[b : b + 1, :length]) for stops in self.asked_of_rows)


def of_one_row(criterion: Any) -> list[Callable[[Tensor], bool]]:
    """What a criterion says of a text [1, T] alone; nothing of one that has to see the whole batch."""
    if type(criterion) in (MaxTimeCriteria, StopStringCriteria):
        return [lambda ids: bool(criterion(ids, None).any())]
    if type(criterion).__name__ == "MultiTokenEOSCriteria" and vars(criterion).keys() >= HARNESS:
        return [partial(_ends_in_string, criterion)]
    return []


def _ends_in_string(criterion: Any, ids: Tensor) -> bool:
    """As the harness's criterion looks at each row: at its last few tokens."""
    behind = ids[0, criterion.initial_decoder_input_length :][-criterion.sequence_id_len :]
    return criterion.sequence in criterion.tokenizer.decode(behind)
