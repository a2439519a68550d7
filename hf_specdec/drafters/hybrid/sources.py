"""`Sources`: what joins a draft model's tokens in one tree without a forward."""

from collections.abc import Sequence

from ...budget import Tree
from ...protocol import Sequences, Verdict
from ..prompt_lookup import Copies
from ..suffix.memory import Memory


class Sources:
    """Copies from the text itself and, where there is a memory, from past outputs."""

    def __init__(self, copies: Copies, memory: Memory | None) -> None:
        self.copies, self.memory = copies, memory

    def join(self, trees: Sequence[Tree], sequences: Sequences, budget: list[int]) -> None:
        """Add to each row's tree what may come behind its accepted tokens, at most `budget` deep."""
        self.copies.join(trees, sequences, budget)
        if self.memory is not None:
            self.memory.join(trees, sequences, budget)

    def join_behind(self, tree: Tree, node: int, row: int, room: int) -> None:
        """Add what may come behind a node of a row's tree; past outputs are asked at its root alone."""
        self.copies.join_behind(tree, node, row, room)

    def observe(self, verdict: Verdict) -> None:
        """Rows have grown, and some have ended."""
        if self.memory is not None:
            self.memory.observe(verdict)

    def close(self) -> None:
        """The call is over."""
        if self.memory is not None:
            self.memory.close()
