"""`EveryWidth`: drafts of one width after the other, which nobody expects to be right."""

from collections.abc import Sequence
from itertools import cycle

from ..drafters.base import Drafter
from ..protocol import Draft, DraftContext, Feature, Sequences
from ..session import DraftSession
from ..target.buffers import WIDTHS


class EveryWidth(Drafter):
    """Its drafts have one width after the other, as chains and as trees."""

    proposes_trees = True

    def __init__(self, drafter: Drafter | None = None, widths: Sequence[int] = WIDTHS) -> None:
        """
        Args:
            drafter: for whose calls they are.
            widths: tokens per row of the forwards.
        """
        super().__init__()
        self.drafter, self.widths = drafter, widths

    def start(self, context: DraftContext) -> DraftSession:
        if self.drafter is None:
            return _Widths(context, self.widths)
        asked = self.drafter.start(context)
        asked.close()
        return _Widths(context, self.widths, asked.features, asked.likeliest)


class _Widths(DraftSession):
    weighs = True

    def __init__(
        self, context: DraftContext, widths: Sequence[int], features: Sequence[Feature] = (), likeliest: int = 0
    ) -> None:
        """
        Args:
            features: that the forwards give; those that give others are other recordings.
        """
        super().__init__(context)
        self.features, self.likeliest = features, likeliest
        self.shapes = cycle([(width, tree) for width in widths for tree in (False, True)])

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        width, tree = next(self.shapes)
        tokens, above = [1] * (width - 1), -1 if tree and self.context.trees else None
        rows = [(tokens, [above] * len(tokens) if above is not None else list(range(-1, width - 2))) for _ in room]
        return Draft.from_trees(rows)
