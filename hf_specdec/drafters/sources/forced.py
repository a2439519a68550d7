"""`Forced`: tokens whose text a grammar of the call leaves no choice in."""

from collections.abc import Sequence

from ...budget import Acceptance, Evidence, Tree
from ...grammars import Grammar, Matcher, Path
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

    def __init__(self, grammar: Grammar, acceptance: Acceptance, others: Sequence[Source]) -> None:
        """
        Args:
            grammar: of the call.
            others: that join the same trees.
        """
        self.grammar, self.acceptance, self.others = grammar, acceptance, others
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
                self.paths[row] = self.grammar.path_of(row)
            if (path := self.paths[row]).move(self.grammar.behind_prompt(tokens, length)):
                self._visit(tree, -1, path.matcher, row, most, 1.0, set())

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
        self, tree: Tree, node: int, matcher: Matcher, row: int, room: int, chance: float, inside: set[int]
    ) -> None:
        """A node that the grammar allows, behind which so many tokens may be drafted, and all below it.

        Args:
            inside: nodes behind which the rest of a forced text stands already.
        """
        if room and node not in inside and chance >= LEAST:
            forced = self._add(tree, node, matcher, room)
            inside.update(forced[:-1])
            for source in self.others if 0 < len(forced) < room else ():
                source.join_behind(tree, forced[-1], tree.text(forced[-1]), row, room - len(forced))
        for child in tree.children(node) if room else ():
            if tree.chances[child] and matcher.take(tree.tokens[child]):
                self._visit(tree, child, matcher, row, room - 1, chance * tree.chances[child], inside)
                matcher.back(1)
            else:
                tree.chances[child] = 0.0

    def _add(self, tree: Tree, node: int, matcher: Matcher, room: int) -> list[int]:
        """Add what is forced behind a node, at most `room` deep; its nodes."""
        tokens, evidence = list[int](), Evidence.of(self.name)
        while len(tokens) < room and (token := matcher.forced()) is not None and matcher.take(token):
            tokens.append(token)
        matcher.back(len(tokens))
        chance, nodes = self.acceptance.chance(evidence, CHANCE), [node]
        for token in tokens:
            self.acceptance.add(tree, nodes[-1], [(token, chance, (evidence,))])
            nodes.append(tree.at[nodes[-1], token])
        return nodes[1:]
