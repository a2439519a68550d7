"""`Rows`: the texts of a batch, in the order of the target's runner.

Token ids lie on the target's device, lengths and tokens on the host as well. Drafters are shown copies: what they write
into those spoils their own drafts only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..protocol import Draft, Sequences
from ..stats import SpeculationStats
from ..transfer import moved, to_device
from ..verify.judging import Judge
from .call import Call
from .drafting import Drafting

BLOCK = 256
"""columns by which the buffer of token ids grows"""


@dataclass(eq=False)
class Row:
    """One text that is being written."""

    number: int
    """its index in the call's batch; where rows come and go a number of its own"""
    call: Call
    """as transformers prepared it"""
    tokens: list[int]
    """the prompt, without left padding, and what is accepted"""
    length: int
    """columns of `Rows.ids` that count, left padding included"""
    judge: Judge
    """who chooses its tokens; one for all rows of equal settings"""
    drafting: Drafting | None = None
    """who drafts them, also for other rows; None where nobody does"""
    end: int = 2**31
    """columns behind which nothing can be drafted: the target's own token, or its position, would have no place"""
    stats: SpeculationStats | None = None
    """of this row alone"""
    stopped: bool = False
    failed: Exception | None = None
    """what its own settings raised, where that ends this row alone"""
    shown: list[int] = field(init=False)
    """the tokens again, for drafters"""

    def __post_init__(self) -> None:
        self.shown = list(self.tokens)

    @property
    def pad(self) -> int | None:
        """What a finished row of a lockstep batch is fed, as in plain decoding where there is an EOS; None for a row
        that goes on."""
        return self.call.pad_token_id if self.stopped and self.call.stopping.has_eos else None


class Rows:
    """A batch of texts; they may join and leave."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.all: list[Row] = []
        self.ids = torch.zeros(0, BLOCK, dtype=torch.long, device=device)
        """[B, capacity]; what lies past a row's length is undefined"""
        self._ends: Tensor | None = None

    def __len__(self) -> int:
        return len(self.all)

    @property
    def lengths(self) -> list[int]:
        """[B] columns that count."""
        return [row.length for row in self.all]

    @property
    def ends(self) -> Tensor:
        """[B] the same on the device."""
        if self._ends is None:
            self._ends = to_device(self.lengths, self.device)
        return self._ends

    @property
    def even(self) -> bool:
        """Whether all rows are equally long."""
        return len(set(self.lengths)) <= 1

    # ------------------------------------------------------------------ who is there

    def join(self, rows: Sequence[Row], ids: Tensor) -> None:
        """More rows, with their prompts [B, P]."""
        self.all += rows
        self._ends = None
        self.reserve(1)
        prompts = torch.nn.functional.pad(moved(ids, self.device).long(), (0, self.ids.shape[1] - ids.shape[1]))
        self.ids = torch.cat([self.ids, prompts])

    def leave(self, order: Sequence[int]) -> None:
        """Go on with these, in this order."""
        for b in set(range(len(self.all))) - set(order):
            self.all[b].shown = []  # nobody drafts for them any more
        self.all = [self.all[b] for b in order]
        self.ids, self._ends = self.ids[to_device(list(order), self.device)], None

    def reserve(self, more: int) -> None:
        """Room for so many more tokens in every row."""
        missing = max(self.lengths) + more - self.ids.shape[1]
        if missing > 0:
            self.ids = torch.nn.functional.pad(self.ids, (0, -(-missing // BLOCK) * BLOCK))

    # ------------------------------------------------------------------ what others see

    def sequences(self, places: Sequence[int], copied: bool = False) -> Sequences:
        """Some rows, in their order: as judges see them, who may write behind their ends; or in a copy, as drafters
        do."""
        ids, rows = self.ids, [self.all[b] for b in places]
        if len(rows) < len(self.all):
            ids = ids[to_device(list(places), self.device)]
        elif copied:
            ids = ids.clone()
        tokens = [row.shown if copied else row.tokens for row in rows]
        return Sequences(ids, [row.length for row in rows], [row.number for row in rows], tokens)

    def last(self, places: Sequence[int]) -> Tensor:
        """The last accepted token of some rows, in their order [B, 1]."""
        if self.even:
            end = self.all[0].length
            tokens = self.ids[:, end - 1 : end]
        else:
            tokens = self.ids.gather(1, self.ends[:, None] - 1)
        return tokens if len(places) == len(self.all) else tokens[to_device(list(places), self.device)]

    def before(self, draft: Draft) -> Tensor | list[list[int]]:
        """The last accepted token of each row, followed by its draft [B, K + 1]: in lists where the host knows it, else
        on the device."""
        if draft.known is None:
            return torch.cat([self.last(range(len(self.all))), moved(draft.tokens, self.device)], 1)
        return [[row.tokens[-1], *known] for row, known in zip(self.all, draft.known, strict=True)]

    # ------------------------------------------------------------------ growing

    def write(self, texts: Tensor, places: Sequence[int]) -> None:
        """Put tokens [B, W] behind the ends of some rows. They count once they are appended."""
        width = texts.shape[1]
        everywhere = len(places) == len(self.all)
        if everywhere and self.even:
            start = self.all[0].length
            self.ids[:, start : start + width] = texts
            return
        columns = self.ends[:, None] + torch.arange(width, device=self.device)
        if everywhere:
            self.ids.scatter_(1, columns, texts)
        else:
            index = to_device(list(places), self.device)
            self.ids[index[:, None], columns[index]] = texts

    def append(self, b: int, tokens: Sequence[int]) -> None:
        """Row b accepts tokens that were written."""
        row, self._ends = self.all[b], None
        row.tokens += tokens
        row.shown += tokens
        row.length += len(tokens)
