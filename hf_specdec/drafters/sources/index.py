"""`LookupIndex`: the longest earlier match of a growing sequence's suffix, at a cost that ignores its length.

A trie of contexts read backwards: the node at depth n stands for "the last n tokens were ...", and knows which token
followed most often. A context seen once is a leaf that only remembers where; it grows children when it is seen again,
so ordinary text takes fewer than two nodes per token, whatever `max_match` is.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_SHIFT = 32
_POSITION = (1 << _SHIFT) - 1
_LEAF = -1


class Match(NamedTuple):
    """An earlier occurrence of the current suffix."""

    length: int
    """Tokens that agree, at most `max_match`; 0 where nothing matched."""
    positions: list[int]
    """Where the text goes on, each with another token: first the most frequent continuation, the latest of equals."""


class LookupIndex:
    """Tokens of one row, appended as they are accepted. `append` and `longest_match` take O(`max_match`) steps."""

    def __init__(self, max_match: int) -> None:
        self.max_match = max_match
        self.tokens: list[int] = []
        self._children: dict[int, int] = {}  # node << 32 | token → node
        # A continuation is worth count << 32 | latest position: a plain comparison is "most frequent, then latest".
        self._worth: dict[int, int] = {}  # node << 32 | next token → worth; inner nodes only
        self._top = array("q", [0, 0])  # per node the worths of the best two; _LEAF as second: a context seen once

    def extend(self, tokens: Iterable[int]) -> None:
        """Append accepted tokens."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Append one accepted token: the contexts that precede it learn that it followed."""
        tokens, position = self.tokens, len(self.tokens)
        node = 0
        for depth in range(1, min(self.max_match, position) + 1):
            key = node << _SHIFT | tokens[position - depth]
            child = self._children.get(key)
            if child is None:
                self._add_leaf(key, position)
                break
            if self._top[2 * child + 1] == _LEAF:
                self._open(child, depth)
            self._count(child, token, position)
            node = child
        tokens.append(token)

    def _add_leaf(self, key: int, position: int) -> None:
        self._children[key] = len(self._top) // 2
        self._top.extend((1 << _SHIFT | position, _LEAF))

    def _open(self, leaf: int, depth: int) -> None:
        """Turn a leaf into an inner node: its one occurrence moves a level down."""
        worth = self._top[2 * leaf]
        position = worth & _POSITION
        self._worth[leaf << _SHIFT | self.tokens[position]] = worth
        self._top[2 * leaf + 1] = 0
        if depth < self.max_match and position > depth:
            self._add_leaf(leaf << _SHIFT | self.tokens[position - depth - 1], position)

    def _count(self, node: int, token: int, position: int) -> None:
        """One more occurrence of `token` after `node`; keeps the node's best two continuations."""
        key, top = node << _SHIFT | token, self._top
        before = self._worth.get(key, 0)
        self._worth[key] = worth = (before >> _SHIFT) + 1 << _SHIFT | position
        best = top[2 * node]
        if before == best:  # a worth names its token, because positions differ
            top[2 * node] = worth
        elif worth > best:
            top[2 * node], top[2 * node + 1] = worth, best
        elif worth > top[2 * node + 1]:
            top[2 * node + 1] = worth

    def longest_match(self, min_match: int = 1, branches: int = 1, drafted: Sequence[int] = ()) -> Match:
        """The longest earlier match of the tokens' suffix, if it has at least `min_match` tokens.

        `drafted` tokens are taken for accepted: the suffix ends with them.

        With `branches` above 1, `positions` goes on with other continuations: rarer ones of that match, then those of
        its shorter suffixes down to `min_match`.
        """
        tokens = self.tokens
        suffix = [*tokens[-self.max_match :], *drafted] if drafted else tokens
        reach = min(self.max_match, len(suffix))
        path, node, length = [0], 0, 0
        while length < reach:
            child = self._children.get(node << _SHIFT | suffix[-length - 1])
            if child is None:
                break
            node, length = child, length + 1
            path.append(node)
            if self._top[2 * node + 1] == _LEAF:  # seen once: the text itself tells how far the match reaches
                position = self._top[2 * node] & _POSITION
                while length < min(reach, position) and tokens[position - length - 1] == suffix[-length - 1]:
                    length += 1
                break
        if length < min_match:
            return Match(0, [])
        positions: dict[int, int] = {}  # next token → where it stood
        for node in reversed(path[min_match:] or path[-1:]):
            for worth in self._top[2 * node : 2 * node + 2]:
                if worth > 0 and len(positions) < branches:
                    positions.setdefault(tokens[worth & _POSITION], worth & _POSITION)
            if len(positions) == branches:
                break
        return Match(length, list(positions.values()))

    def agreed(self, match: Match, most: int, drafted: Sequence[int] = ()) -> int:
        """How many tokens before the first of a match's places agree with the suffix, up to `most` (or `max_match`, if
        that is more): many where a long text comes again."""
        if match.length < self.max_match:
            return match.length
        suffix, place = [*self.tokens[-most:], *drafted] if drafted else self.tokens, match.positions[0]
        length, most = match.length, min(most, len(suffix), place)
        while length < most and self.tokens[place - length - 1] == suffix[-length - 1]:
            length += 1
        return length

    def copy_from(self, position: int, length: int, drafted: Sequence[int] = ()) -> list[int]:
        """`length` tokens from `position` on, `drafted` ones behind the accepted; a copy that reaches their end goes on
        with its own tokens (a loop)."""
        copied = [*self.tokens[position : position + length], *drafted][:length]
        period = len(self.tokens) + len(drafted) - position
        while len(copied) < length:
            copied.append(copied[len(copied) - period])
        return copied

    def __len__(self) -> int:
        return len(self.tokens)
