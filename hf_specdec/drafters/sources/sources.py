"""`Sources`: what joins other tokens in one tree, without a step of any model."""

from collections.abc import Sequence

from ...budget import Tree
from ...protocol import Sequences, Verdict
from ..prompt_lookup import Copies, PromptLookupConfig
from ..suffix import SuffixConfig
from ..suffix.memory import PAST, Memory
from .recycled import RECYCLED, Recycled

NAMES = {
    "copied": PromptLookupConfig.drafter_type,
    PAST: SuffixConfig.drafter_type,
    RECYCLED: RECYCLED,
}
"""in the statistics"""


class Sources:
    """Copies from the text itself, past outputs, what earlier forwards found likely: those of them that are wanted."""

    def __init__(
        self, drawn: str, copies: Copies | None = None, memory: Memory | None = None, recycled: Recycled | None = None
    ) -> None:
        """
        Args:
            drawn: in the statistics, the source of all other tokens.
        """
        self.copies, self.memory, self.recycled, self.drawn = copies, memory, recycled, drawn
        self.likeliest = 0 if recycled is None else recycled.likeliest

    def observe_prompt(self, verdict: Verdict) -> None:
        """The prompt was read."""
        if self.recycled is not None:
            self.recycled.observe(verdict)

    def join(self, trees: Sequence[Tree], sequences: Sequences, room: list[int]) -> None:
        """Add to each row's tree what may come behind its accepted tokens, at most `room` deep."""
        for source in (self.copies, self.memory, self.recycled):
            if source is not None:
                source.join(trees, sequences, room)

    def join_behind(self, tree: Tree, node: int, row: int, room: int) -> None:
        """Add what may come behind a node of a row's tree; past outputs are asked at its root alone."""
        for source in (self.copies, self.recycled):
            if source is not None:
                source.join_behind(tree, node, row, room)

    def named(self, trees: Sequence[Tree], nodes: Sequence[Sequence[int]]) -> list[str]:
        """[B] who proposes these nodes of each row's tree, for the statistics."""
        names = []
        for tree, mine in zip(trees, nodes, strict=True):
            known = {evidence.sources for node in mine for evidence in tree.evidence[node]}
            mentioned = {NAMES.get(source.name, self.drawn) for sources in known for source in sources}
            names.append("+".join(sorted(mentioned)) or "none")
        return names

    def observe(self, verdict: Verdict) -> None:
        """Rows have grown, and some have ended."""
        for source in (self.memory, self.recycled):
            if source is not None:
                source.observe(verdict)

    def close(self) -> None:
        """The call is over."""
        if self.memory is not None:
            self.memory.close()
