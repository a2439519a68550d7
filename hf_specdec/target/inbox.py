"""`Inbox`: all that a forward over static buffers is fed, filled in one transfer."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..protocol import FedTree
from ..transfer import fill
from .buffers import Buffers

Tokens = Tensor | Sequence[Sequence[int]]
"""[B, T] on the device, or in lists where the host knows them"""


class Inbox(NamedTuple):
    """What a step reads of R rows, W tokens each. What is padded hangs on a row's first token."""

    whole: Tensor
    """[R, 2 + W], or [R, 2 + 2 W] in a tree"""
    width: int

    @classmethod
    def of(cls, buffers: Buffers, width: int, is_tree: bool, is_kept: bool) -> "Inbox":
        """The one of steps of this width, which are recorded if it is kept."""
        columns = 2 + width * (1 + is_tree)
        if is_kept:
            return cls(buffers.input("inbox", columns, dtype=torch.long), width)
        return cls(torch.zeros(buffers.rows, columns, dtype=torch.long, device=buffers.device), width)

    @property
    def ends(self) -> Tensor:
        """[R] slots of each row that count; 0 in rows that nobody has."""
        return self.whole[:, 0]

    @property
    def counted(self) -> Tensor:
        """[R] tokens behind the first that are a row's own draft."""
        return self.whole[:, 1]

    @property
    def tokens(self) -> Tensor:
        """[R, W]"""
        return self.whole[:, 2 : 2 + self.width]

    def fill(
        self,
        tokens: Tokens,
        ends: Sequence[int],
        counted: Sequence[int],
        parents: Sequence[Sequence[int]] | None,
    ) -> None:
        """
        Args:
            ends: [R]
            counted: [B]
            parents: [B][T] as of `Runner.forward`; None for a chain.
        """
        width, known = self.width, None if isinstance(tokens, Tensor) else tokens
        values = []
        for b, end in enumerate(ends):
            row = [end, counted[b] if b < len(counted) else 0]
            for each in (known, parents) if parents is not None else (known,):
                mine = each[b] if each is not None and b < len(each) else ()
                row += [*mine, *[0] * (width - len(mine))]
            values.append(row)
        fill(self.whole, values)
        if isinstance(tokens, Tensor):
            self.tokens[: tokens.shape[0], : tokens.shape[1]] = tokens

    def tree(self) -> FedTree | None:
        """From the parents, by as many doublings as the deepest tree takes; None of a chain."""
        if self.whole.shape[1] == 2 + self.width:
            return None
        parents, place = self.whole[:, 2 + self.width :], torch.arange(self.width, device=self.whole.device)
        above = up = torch.where(parents < 0, place, parents)  # of what nothing stands above itself
        seen = (place[:, None] == place).expand(len(up), -1, -1)
        for _ in range((self.width - 1).bit_length()):
            seen = seen | seen.gather(1, up[:, :, None].expand_as(seen))
            up = up.gather(1, up)
        return FedTree(above, seen, seen.sum(-1) - 1)
