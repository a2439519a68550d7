"""`StaggeredRunner`: rows of any lengths for models whose cache and positions want equal ones. The cache holds what all
rows have; what a row has beyond that is fed once more with every forward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..budget import Cost
from ..protocol import Feature, Forward
from ..transfer import to_device
from .inputs import position_limit
from .lockstep import LockstepRunner

FARTHEST = 16
"""tokens that a row may be ahead of the slowest one in any case"""
EXTRA = 0.05
"""share of a step that feeding them once more may take"""


class StaggeredRunner:
    """Over a runner whose rows keep equal lengths."""

    widths: Sequence[int] = ()

    def __init__(self, runner: LockstepRunner) -> None:
        self.runner, self.ids = runner, runner.ids
        """the last: [B, columns] the text; what lies past a row's length does not count"""
        self.limit = position_limit(runner.model)
        self.lengths: list[int] = []

    @property
    def features(self) -> Sequence[Feature]:
        return self.runner.features

    @features.setter
    def features(self, names: Sequence[Feature]) -> None:
        self.runner.features = names

    def prefill(self) -> Forward:
        """The prompt's forward, as plain decoding does it."""
        answer = self.runner.prefill()
        self.lengths = self.runner.lengths
        return answer

    def forward(
        self, tokens: Tensor, parents: Sequence[Sequence[int]] | None = None, counts: Sequence[int] | None = None
    ) -> Forward:
        """Append tokens [B, T] to each row, a chain, of which `counts` count in each row."""
        assert parents is None, "trees need the ragged runner"
        self._settle()
        held, width, lengths = self.runner.length, tokens.shape[1], self.lengths
        places = to_device(lengths, self.ids.device)[:, None] + torch.arange(width, device=self.ids.device)
        columns = max(lengths) + width
        ids = torch.nn.functional.pad(self.ids[:, :columns], (0, max(0, columns - self.ids.shape[1])))
        self.ids = ids.scatter(1, places, tokens.to(ids.dtype))
        # What a short row is padded with may lie beyond the model's positions; a last token does so under ALiBi alone.
        answer = self.runner.forward(self.ids[:, held : min(columns, max(self.limit, max(lengths) + 1))])
        self.lengths = [n + k for n, k in zip(lengths, counts or [width] * len(lengths), strict=True)]
        if lengths == [held] * len(lengths):
            return answer
        index = (places - held).clamp(max=answer.logits.shape[1] - 1)
        rows = torch.arange(len(lengths), device=index.device)[:, None]
        features = {name: states[rows, index] for name, states in answer.features.items()}
        return Forward(answer.logits[rows, index], features=features, outputs=answer.outputs)

    def truncate(self, lengths: list[int]) -> None:
        """Roll every row back to its length."""
        self.lengths = list(lengths)

    def keep(self, lengths: list[int], paths: list[list[int]]) -> None:
        """Of chains, which are all that is fed here: to keep a path is to truncate behind it."""
        self.truncate([length + len(path) for length, path in zip(lengths, paths, strict=True)])

    def select(self, rows: list[int]) -> None:
        """Go on with these rows of the batch; one may come twice."""
        self.runner.select(rows)
        self.ids, self.lengths = self.ids[to_device(rows, self.ids.device)], [self.lengths[row] for row in rows]
        self._settle()

    def retire(self, stay: list[int], keep: bool) -> None:
        """Go on with the rows `stay`."""
        assert not keep, "a cache that outlives the call wants rows of equal lengths"
        self.select(stay)

    def finish(self, ids: Tensor | None) -> None:
        """Nobody goes on from this cache."""

    def _settle(self) -> None:
        """The cache holds what all rows have, or less where a slow one has left."""
        if self.lengths:
            self.runner.truncate([min(*self.lengths, self.runner.length)] * len(self.lengths))


def farthest(cost: Cost | None, rows: int) -> int:
    """Tokens that each of so many rows may be ahead of the slowest one, so that to feed them once more hardly takes any
    time.

    Args:
        cost: of the target's forwards; None where nobody may go by it.
    """
    if cost is None or not cost.known:
        return FARTHEST
    seconds = cost.round(rows)
    return next((n for n in range(FARTHEST, 0, -1) if seconds(1 + n) <= (1 + EXTRA) * seconds(1)), 0)
