"""`Drawn`: what is drafted at once, place by place."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..protocol import DraftContext, Sequences
from ..transfer import to_device

Pick = Callable[[Tensor, int], tuple[Tensor, ...]]
"""from logits [B, V] at the place i behind the accepted tokens: tokens [B], and the q [B, V] that they were drawn from
if they were; or the k likeliest tokens [B, k] and their chances [B, k]"""


class Draw(Protocol):
    """The next token [B] of each row, from logits [B, V]."""

    def __call__(self, logits: Tensor, said: Tensor | None = None) -> Tensor:
        """
        Args:
            said: [B] what else speaks for it, from 0 to 1, where anything does.
        """


class Drawn:
    """The tokens of a draft, each with its q or beside its next likeliest ones, as they are drawn."""

    def __init__(self, pick: Pick) -> None:
        self.places: list[tuple[Tensor, ...]] = []
        """what was picked at each"""
        self._pick = pick

    def draw(self, logits: Tensor, said: Tensor | None = None) -> Tensor:
        """As `Draw`. What is said stands in the place of the chance of the likeliest token; what a token was drawn from
        stays."""
        tokens, *more = self._pick(logits, len(self.places))
        if said is not None and tokens.ndim == 2:
            more = [torch.cat([said[:, None].to(more[0]), more[0][:, 1:]], dim=1)]
        tokens = tokens if tokens.ndim == 2 else tokens[:, None]
        self.places.append((tokens, *more))
        return tokens[:, 0]

    def all(self) -> tuple[Tensor, ...]:
        """Tokens [B, K, k], and q [B, K, V] where they were drawn at random, or chances [B, K, k]."""
        return tuple(torch.stack(several, 1) for several in zip(*self.places, strict=True))


def by_text(context: DraftContext, sequences: Sequences, most: int, candidates: int | None) -> Pick:
    """Through the call's processors, which may look at the text and what was drawn of it.

    Args:
        most: tokens that will be drawn per row, at most.
        candidates: k; None where one token is picked as the call's sampling does it.
    """
    ids = with_room(sequences, most)

    def pick(logits: Tensor, i: int) -> tuple[Tensor, ...]:
        lengths, logits = [n + i for n in sequences.lengths], logits.to(context.device)
        if candidates is not None:
            tokens, chances = context.pick.likeliest(ids, lengths, sequences.rows, logits, candidates)
            write_tokens(ids, tokens[:, 0], lengths)
            return tokens, chances
        drawn, q = context.pick(ids, lengths, sequences.rows, logits)
        write_tokens(ids, drawn, lengths)
        return (drawn,) if q is None else (drawn, q)

    return pick


def write_tokens(ids: Tensor, tokens: Tensor, columns: list[int]) -> None:
    """Put one token [B] into each row of ids [B, capacity]."""
    if len(set(columns)) == 1:
        ids[:, columns[0]] = tokens
    else:
        ids.scatter_(1, to_device(columns, ids.device)[:, None], tokens[:, None])


def with_room(sequences: Sequences, width: int) -> Tensor:
    """The sequences' ids with columns to write the draft to."""
    missing = max(sequences.lengths) + width - sequences.ids.shape[1]
    return sequences.ids if missing <= 0 else torch.nn.functional.pad(sequences.ids, (0, missing))
