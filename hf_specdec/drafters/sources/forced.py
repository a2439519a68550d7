"""`Forced`: tokens whose text a grammar of the call leaves no choice in."""

from collections.abc import Callable, Sequence

from ...budget import Acceptance, Evidence, Tree
from ...grammars import Matcher, Path
from ...protocol import Sequences
from .source import Source

CHANCE = 0.9
"""taken for a forced token's before anything was measured: its text is sure, where the token ends is not"""
LEAST = 0.05
"""chance, counted from where they join a tree, below which nothing is thought of behind a token"""


class Forced(Source):
    """The last to join: behind what others propose it goes on with what is forced there, and asks them what follows
    that. What the grammar does not allow has no chance."""

    name = kind = "forced"

    def __init__(
        self, beginning: Callable[[int], Path], columns: int, acceptance: Acceptance, others: Sequence[Source]
    ) -> None:
        """
        Args:
            beginning: of a row: `DraftContext.grammar`.
            columns: of the prompt.
            others: that join the same trees.
        """
        self.beginning, self.columns, self.acceptance, self.others = beginning, columns, acceptance, others
        self.paths: dict[int, Path] = {}

    def join(self, trees: Sequence[Tree], sequences: Sequences, room: list[int]) -> None:
        """Add to each row's tree what is forced behind its accepted tokens, and behind others' proposals."""
        self.paths = sequences.here(self.paths)
        for tree, row, tokens, length, most in zip(
            trees, sequences.rows, sequences.tokens, sequences.lengths, room, strict=True
        ):
            if most < 1:
                continue
            if row not in self.paths:
                self.paths[row] = self.beginning(row)
            if (path := self.paths[row]).move(tokens[len(tokens) - (length - self.columns) :]):
                self._visit(tree, -1, path.matcher, row, most, 1.0)

    def join_behind(self, tree: Tree, node: int, path: Sequence[int], row: int, room: int) -> None:
        """Add what is forced behind a node of a row's tree."""
        here = self.paths[row]
        text = list(here.text)
        if here.move([*text, *path]):
            self._add(tree, node, here.matcher, room)
        else:
            tree.chances[node] = 0.0
        here.move(text)

    def _visit(
        self, tree: Tree, node: int, matcher: Matcher, row: int, room: int, chance: float = 1.0, added: int = 0
    ) -> None:
        """A node that the grammar allows, behind which so many tokens may be drafted, and all below it.

        Args:
            added: tokens that are forced behind it, and are there already.
        """
        if room and not added and chance >= LEAST:
            end, added = self._add(tree, node, matcher, room)
            for source in self.others if 0 < added < room else ():
                source.join_behind(tree, end, tree.text(end), row, room - added)
        for child in tree.children(node) if room else ():
            if tree.chances[child] and matcher.take(tree.tokens[child]):
                self._visit(tree, child, matcher, row, room - 1, chance * tree.chances[child], max(0, added - 1))
                matcher.back(1)
            else:
                tree.chances[child] = 0.0

    def _add(self, tree: Tree, node: int, matcher: Matcher, room: int) -> tuple[int, int]:
        """Add what is forced behind a node, at most `room` deep; its last node, and how many there are."""
        tokens, evidence = list[int](), Evidence.of(self.name)
        chance = self.acceptance.chance(evidence, CHANCE)
        while len(tokens) < room and (more := matcher.forced()):
            known = len(tokens)
            for token in more[: room - known]:
                if not matcher.take(token):
                    break
                tokens.append(token)
            if len(tokens) - known < len(more):
                break
        matcher.back(len(tokens))
        for token in tokens:
            self.acceptance.add(tree, node, [(token, chance, (evidence,))])
            node = tree.at[node, token]
        return node, len(tokens)
