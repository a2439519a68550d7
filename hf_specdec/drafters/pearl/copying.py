"""`Copying`: what a row may carry that nobody had to draft."""

from collections.abc import Callable, Sequence

from ...budget import Acceptance, Advance, Tree, most_per_second
from ...protocol import DraftContext, Sequences, Verdict
from ..prompt_lookup import Copies, PromptLookupConfig

Chain = list[tuple[int, float]]
"""unverified tokens one behind the other, each with its q: 1 where the draft does not sample, and of copies"""


Worth = Callable[[list[list[float]]], list[int]]
"""how much rows copy: of each so many tokens, by their chances to be kept"""


def as_likely_as(least: float) -> Worth:
    """Tokens whose chance to be kept is at least this."""
    return lambda rows: [sum(chance >= least for chance in row) for row in rows]


def faster_than(speed: float, seconds: Callable[[int], float], lockstep: bool) -> Worth:
    """What promises most tokens per second for all these rows, if that is more than the draft does.

    Args:
        speed: tokens per second that a row is promised by the draft.
        seconds: duration of a round by the width of its forward.
        lockstep: rows advance together.
    """

    def worth(rows: list[list[float]]) -> list[int]:
        n, promised = most_per_second(rows, seconds, advance=Advance(lockstep))
        pays = promised > speed * (1 if lockstep else len(rows))
        return [min(n, len(row)) if pays else 0 for row in rows]

    return worth


class Copying:
    """Copies of earlier text for the rows of one call that carry nothing."""

    def __init__(self, context: DraftContext, acceptance: Acceptance) -> None:
        """
        Args:
            acceptance: how often copied tokens have been right, by the match that they followed.
        """
        self.copies, self.acceptance = Copies(context, PromptLookupConfig(), acceptance), acceptance
        self.lockstep = context.lockstep
        self.trees: list[Tree] = []
        self.copied: dict[int, int] = {}
        """tokens that a row carries of its copy, by row; nobody has drawn them"""

    def copy(self, chains: Sequence[Chain], sequences: Sequences, room: Sequence[int], worth: Worth) -> list[Chain]:
        """[B] copies for the rows that have no chain; empty for the others, and where there is none that is worth it.

        Args:
            room: [B] tokens that may be carried.
            worth: how much of each copy is.
        """
        wanted = [0 if chain else most for chain, most in zip(chains, room, strict=True)]
        self.trees, self.copied = [Tree() for _ in chains], {}
        self.copies.join(self.trees, sequences, wanted)
        found = [tree.chain() for tree in self.trees]
        waiting = [b for b, most in enumerate(wanted) if most]  # others go on with a chain, or have ended
        counts = dict(zip(waiting, worth([[chance for _, chance in found[b]] for b in waiting]), strict=True))
        copies = [
            [(tree.tokens[node], 1.0) for node, _ in nodes[: counts.get(b, 0)]]
            for b, (tree, nodes) in enumerate(zip(self.trees, found, strict=True))
        ]
        if self.lockstep:  # rows that go on together carry as much as each other
            shortest = min((len(copy) for copy, most in zip(copies, wanted, strict=True) if most), default=0)
            copies = [copy[:shortest] for copy in copies]
        self.copied = {row: len(copy) for row, copy in zip(sequences.rows, copies, strict=True)}
        return copies

    def observe(self, verdict: Verdict) -> tuple[list[int], list[int]]:
        """Copies are judged by the text, carried or not. Returns how many tokens of the draft model's were tested, per
        row, and how many of them accepted."""
        self.acceptance.observe_trees(self.trees, verdict.tokens)
        own = [self.copied.get(row, 0) for row in verdict.rows]
        self.trees, self.copied = [], {}
        reached = [n >= mine for n, mine in zip(verdict.accepted, own, strict=True)]
        tested = [(of - mine) * at for of, mine, at in zip(verdict.drafted, own, reached, strict=True)]
        accepted = [(n - mine) * at for n, mine, at in zip(verdict.accepted, own, reached, strict=True)]
        return tested, accepted
