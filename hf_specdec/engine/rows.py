"""`Rows`: the texts of a batch whose rows come and go, in the order of the target's runner."""

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..clock import now
from ..protocol import Sequences
from ..transfer import moved, to_device
from ..verify.block import expect_token
from ..verify.randomness import Randomness
from .answer import Answer
from .call import Call

BLOCK = 256
"""columns by which the buffer of token ids grows"""


@dataclass
class Row:
    """One request."""

    number: int
    """nobody else ever has it"""
    call: Call
    """as transformers prepared it"""
    settings: Hashable
    """rows of equal settings have their tokens chosen in the same way"""
    answer: Answer
    randomness: Randomness
    began: float
    """by the clock: when its turn came"""
    tokens: list[int]
    """the prompt and what is accepted"""
    failed: Exception | None = None
    """what its own settings have raised: it leaves"""

    @property
    def end(self) -> int:
        """Tokens that it may have in the end."""
        most = self.call.stopping.max_length
        assert most is not None  # a request without an end is not taken
        return most

    def finish(self, error: BaseException | None = None) -> None:
        """The request is over."""
        answer = self.answer
        answer.stats.total_seconds = now() - self.began
        answer.stats.plain_steps = max(0, len(answer.tokens) - 1)
        ended = bool(answer.tokens) and self.tokens[-1] in self.call.stopping.eos
        reason = "length" if len(self.tokens) >= self.end and not ended else "stop"
        first = answer.finish(None if error is not None else "cancelled" if answer.cancelled else reason, error)
        if first and self.call.streamer is not None:
            with suppress(Exception):  # its owner has gone
                self.call.streamer.end()


class Rows:
    """Ids on the target's device, tokens on the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.all: list[Row] = []
        self.ids = torch.zeros(0, BLOCK, dtype=torch.long, device=device)
        """[B, capacity]"""

    def __len__(self) -> int:
        return len(self.all)

    @property
    def lengths(self) -> list[int]:
        """[B] tokens."""
        return [len(row.tokens) for row in self.all]

    def join(self, row: Row) -> None:
        """One more, with its prompt."""
        self.all.append(row)
        self.reserve(len(row.tokens))
        prompt = torch.nn.functional.pad(moved(row.call.input_ids, self.device), (0, self.ids.shape[1]))
        self.ids = torch.cat([self.ids, prompt[:, : self.ids.shape[1]]])

    def leave(self, order: Sequence[int]) -> None:
        """Go on with these, in this order."""
        self.all = [self.all[b] for b in order]
        self.ids = self.ids[to_device(list(order), self.device)]

    def view(self, places: Sequence[int]) -> Sequences:
        """A copy of some rows."""
        rows = [self.all[b] for b in places]
        everybody = list(places) == list(range(len(self.all)))
        ids = self.ids.clone() if everybody else self.ids[to_device(list(places), self.device)]
        return Sequences(ids, [len(r.tokens) for r in rows], [r.number for r in rows], [list(r.tokens) for r in rows])

    def last(self) -> Tensor:
        """The last token of each row [B, 1]."""
        return to_device([[row.tokens[-1]] for row in self.all], self.device)

    def append(self, new: Sequence[Sequence[int]]) -> list[bool]:
        """Tokens for every row [B][any], each cut where the row stops; whether it does."""
        self.reserve(max(map(len, new)) + max(self.lengths))
        width = max(map(len, new))
        columns = [[len(row.tokens) + i for i in range(width)] for row in self.all]
        padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in new]
        both = to_device([columns, padded], self.device)
        self.ids.scatter_(1, both[0], both[1])
        return [self._grow(b, tokens) for b, tokens in enumerate(new)]

    def _grow(self, b: int, new: Sequence[int]) -> bool:
        row = self.all[b]
        for token in new:
            row.tokens.append(token)
            try:
                expect_token(token)
                if row.failed is not None or row.call.stopping.row(self.ids, b, len(row.tokens), token):
                    return True
            except Exception as error:  # of a criterion, or no token can be drawn
                row.failed = error
                return True
        return False

    def reserve(self, columns: int) -> None:
        """Room for that many tokens in every row."""
        missing = columns - self.ids.shape[1]
        if missing > 0:
            self.ids = torch.nn.functional.pad(self.ids, (0, -(-missing // BLOCK) * BLOCK))


def settings_of(call: Call) -> Hashable:
    """What two calls have in common whose tokens are chosen in the same way."""
    processors = tuple((type(p).__qualname__, _frozen(vars(p))) for p in call.processing.processors)
    return bool(call.config.do_sample), call.rules, tuple(sorted(call.stopping.eos)), processors


def _frozen(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple(
            (str(name), _frozen(inner)) for name, inner in sorted(value.items(), key=lambda item: str(item[0]))
        )
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, Tensor):
        return tuple(value.shape), _frozen(value.tolist())
    return value if isinstance(value, (int, float, str, type(None), torch.device)) else repr(value)
