"""`Copying`: what a row may carry that nobody had to draft. While the target verifies that, the worker drafts on."""

from collections.abc import Sequence

from ...budget import Survival, Tree
from ...protocol import DraftContext, Sequences, Verdict
from ..prompt_lookup import Copies, PromptLookupConfig

Chain = list[tuple[int, float]]
"""unverified tokens one behind the other, each with its q: 1 where the draft does not sample, and of copies"""


class Copying:
    """Copies of earlier text for the rows of one call that carry nothing."""

    def __init__(self, context: DraftContext, survival: Survival) -> None:
        """
        Args:
            survival: how often copied tokens have been right, by the match that they followed.
        """
        self.copies, self.survival = Copies(context, PromptLookupConfig(), survival), survival
        self.lockstep = context.lockstep
        self.trees: list[Tree] = []
        self.copied: dict[int, int] = {}
        """tokens that a row carries of its copy, by row; nobody has drawn them"""

    def copy(self, chains: Sequence[Chain], sequences: Sequences, room: Sequence[int], least: float) -> list[Chain]:
        """[B] copies for the rows that have no chain; empty for the others, and where there is none that is worth it.

        Args:
            room: [B] tokens that may be carried.
            least: the chance to be kept up to which a copy is carried: that of a token of the draft model's. So what
                is drafted behind a copy is as likely to be of use as what would be drafted without.
        """
        wanted = [0 if chain else most for chain, most in zip(chains, room, strict=True)]
        self.trees, self.copied = [Tree() for _ in chains], {}
        self.copies.join(self.trees, sequences, wanted)
        copies = [[(t.tokens[node], 1.0) for node, chance in t.chain() if chance >= least] for t in self.trees]
        if self.lockstep:  # rows that go on together carry as much as each other
            shortest = min((len(copy) for copy, most in zip(copies, wanted, strict=True) if most), default=0)
            copies = [copy[:shortest] for copy in copies]
        self.copied = {row: len(copy) for row, copy in zip(sequences.rows, copies, strict=True)}
        return copies

    def observe(self, verdict: Verdict) -> tuple[list[int], list[int]]:
        """Copies are judged by the text, carried or not. Returns how many tokens of the draft model's were tested, per
        row, and how many of them accepted."""
        self.survival.observe_trees(self.trees, verdict.tokens)
        own = [self.copied.get(row, 0) for row in verdict.rows]
        self.trees, self.copied = [], {}
        reached = [n >= mine for n, mine in zip(verdict.accepted, own, strict=True)]
        tested = [(of - mine) * at for of, mine, at in zip(verdict.drafted, own, reached, strict=True)]
        accepted = [(n - mine) * at for n, mine, at in zip(verdict.accepted, own, reached, strict=True)]
        return tested, accepted
