"""The target's likeliest tokens behind each token of a round: for drafters that remember them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..protocol import Sequences
from .largest import topk

Behind = list[list[tuple[int, list[int]]]]
"""[B] tokens that the target answered, each with its likeliest successors"""


@dataclass
class Successors:
    """They travel to the host at the end of what a round reads in any case."""

    ids: Tensor
    """[B · N · count]"""
    count: int

    @classmethod
    def of(cls, logits: Tensor, count: int) -> Self:
        """The `count` likeliest tokens at each place of logits [B, N, V]; 0 for none."""
        none = torch.empty(0, dtype=torch.long, device=logits.device)
        return cls(topk(logits, count)[1].flatten() if count else none, count)

    def behind(
        self,
        packed: Sequence[float],
        sequences: Sequences,
        drafted: Sequence[Sequence[int]],
        nodes: Sequence[Sequence[int]] | None = None,
        counts: Sequence[int] | None = None,
    ) -> Behind:
        """Which token each of them follows: a row's last accepted one, or one that was drafted.

        Args:
            packed: what was read, `ids` at its end.
            drafted: [B][any] the tokens of each row's nodes that count.
            nodes: [B][N - 1] the nodes that there are logits for, -1 for none; None for the first.
            counts: [B] how many of those there are in each row, where they are the first; None for all.
        """
        if not self.count:
            return []
        found = [int(token) for token in packed[len(packed) - len(self.ids) :]]
        places = len(found) // (self.count * len(drafted))
        told: Behind = []
        for b, (text, tokens) in enumerate(zip(sequences.tokens, drafted, strict=True)):
            first = range(places - 1 if counts is None else counts[b])
            answered = first if nodes is None else nodes[b]
            fed = [(0, token) for token in text[-1:]]  # none behind `inputs_embeds`
            fed += [(i, tokens[node]) for i, node in enumerate(answered, 1) if 0 <= node < len(tokens)]
            told.append([(token, found[(b * places + i) * self.count :][: self.count]) for i, token in fed])
        return told
