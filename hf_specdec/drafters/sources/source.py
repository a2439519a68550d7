"""`Source`: proposes tokens without a step of any model, as nodes of a session's trees."""

from collections.abc import Sequence

from ...budget import Tree
from ...protocol import Sequences, Verdict


class Source:
    """Several may join the same trees. A source of its own writes `join`."""

    name = ""
    """of its tokens, as evidence"""
    kind = ""
    """in the statistics"""
    likeliest = 0
    """how many of the target's likeliest tokens it reads at each place"""

    def observe_prompt(self, verdict: Verdict) -> None:
        """The target has read the prompt."""

    def join(self, trees: Sequence[Tree], sequences: Sequences, room: list[int]) -> None:
        """Add to each row's tree what may follow its accepted tokens, at most `room` deep."""
        raise NotImplementedError

    def join_behind(self, tree: Tree, node: int, path: Sequence[int], row: int, room: int) -> None:
        """Add what may follow a node of a row's tree, whose tokens down to it are `path`, at most `room` deeper."""

    def observe(self, verdict: Verdict) -> None:
        """A round is over: rows have grown, and some have ended."""

    def close(self) -> None:
        """The call is over."""


def named(trees: Sequence[Tree], nodes: Sequence[Sequence[int]], kinds: dict[str, str], drawn: str) -> list[str]:
    """[B] who proposes these nodes of each row's tree, for the statistics.

    Args:
        kinds: of sources, by their names.
        drawn: of all other tokens.
    """
    names = []
    for tree, mine in zip(trees, nodes, strict=True):
        known = {evidence.sources for node in mine for evidence in tree.evidence[node]}
        mentioned = {kinds.get(source.name, drawn) for sources in known for source in sources}
        names.append("+".join(sorted(mentioned)) or "none")
    return names
