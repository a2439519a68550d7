"""`GreedyFinder`: which tokens greedy decoding accepts, in tensors of set shapes, to be recorded with the forward.
`follow` says the same of one row on the host."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..protocol import FedTree, Found
from .largest import argmax, topk
from .verification import last_two


class Told(NamedTuple):
    """What the host reads of a row."""

    sound: bool
    """whether the whole draft is; else nothing of it is accepted"""
    path: list[int]
    """the accepted nodes of its draft, from the root down"""
    tokens: list[int]
    """that it gains: the accepted ones, then the target's own"""
    drafted: list[int]
    """those of its draft, and whatever is behind it"""
    likeliest: list[int]
    """[W · successors] token ids"""

    @classmethod
    def of(cls, row: list[int], width: int) -> "Told":
        """From a row of `Found.told`, of a forward that was W wide."""
        (sound, n), places = row[:2], [slice(2 + i * width, 2 + (i + 1) * width) for i in range(3)]
        kept, texts, fed = [row[place] for place in places]
        path = [node - 1 for node in kept[1 : n + 1]]
        return cls(bool(sound), path, texts[: n + 1], fed[1:], row[2 + 3 * width :])


@dataclass(frozen=True)
class GreedyFinder:
    """A node is accepted whose parent is, where it is the target's choice behind that: of equal siblings the first."""

    vocab: int
    successors: int = 0
    """how many of the target's likeliest tokens to tell of every place"""

    def __call__(self, logits: Tensor, tokens: Tensor, counted: Tensor, tree: FedTree | None) -> Found:
        (rows, width), device = tokens.shape, tokens.device
        place, choices = torch.arange(width, device=device), argmax(logits)
        counts = (place <= counted[:, None]) & (place > 0)
        sound = ((tokens >= 0) & (tokens < self.vocab) | ~counts).all().expand(rows, 1)
        above = (place - 1).clamp(min=0).expand(rows, -1) if tree is None else tree.parents
        agrees = counts & (tokens == choices.gather(1, above)) & sound
        if tree is None:
            accepted, depth = agrees[:, 1:].long().cumprod(1), place.expand(rows, -1)
            accepted = torch.nn.functional.pad(accepted, (1, 0), value=1).bool()
        else:
            again = (above[:, :, None] == above[:, None]) & agrees[:, None] & (place[:, None] > place)
            agrees = (agrees & ~again.any(2)) | (place == 0)
            accepted, depth = (agrees[:, None] | ~tree.seen).all(2), tree.depth
        n = accepted.sum(1) - 1
        # What was not accepted is put behind all others, and left out.
        kept = torch.arange(width + 1, device=device).repeat(rows, 1)
        kept = kept.scatter_(1, torch.where(accepted, depth, width), place.expand(rows, -1))[:, :width]
        texts = choices.gather(1, kept)
        last = last_two(tokens[:, :1], texts, n)
        told = [sound.long(), n[:, None], kept, texts, tokens]
        if self.successors:
            told.append(topk(logits, self.successors)[1].flatten(1))
        return Found(torch.cat(told, 1), n, kept, texts, last)
