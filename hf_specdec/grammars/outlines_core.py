"""outlines-core's guides, in outlines' processor."""

from itertools import combinations
from typing import Any

from torch import Tensor

from .grammar import Grammar, Matcher

KEPT = 256
"""tokens that a guide can take back: more than any draft is deep"""
FEW, NEAR = 16, 32
"""tokens of a state, beyond which there is a choice of text; and states behind one that are looked at"""


def grammar(processor: Any) -> Grammar | None:
    """Of `outlines.backends.outlines_core.OutlinesCoreLogitsProcessor`."""
    return Grammar(processor, _matchers, closed=True) if processor.is_first_token else None


def _matchers(processor: Any) -> tuple[list[Matcher], int]:
    ways = Ways(processor.index)
    return [OutlinesCore(guide, ways) for guide in processor._guides], processor._bitmasks[0].shape[1]


class Ways:
    """Which states of an index have one way out."""

    def __init__(self, index: Any) -> None:
        self.index = index
        self.known: dict[int, int | None] = {}

    def out(self, state: int) -> int | None:
        """The only token of a state, or the longest, where all are beginnings of one text: of any two, the state behind
        the longer one can be reached from the one behind the shorter. An index does not know its tokens' texts."""
        if state not in self.known:
            self.known[state] = self._out(state)
        return self.known[state]

    def _out(self, state: int) -> int | None:
        tokens = self.index.get_allowed_tokens(state)
        if len(tokens) == 1 or len(tokens) > FEW:
            return tokens[0] if len(tokens) == 1 else None
        behind = [self.index.get_next_state(state, token) for token in tokens]
        if None in behind or len(set(behind)) < len(behind):  # the text may end here, or has a choice of tokens
            return None
        near = {each: self._near(each) for each in behind}
        if any(a not in near[b] and b not in near[a] for a, b in combinations(behind, 2)):
            return None
        longest = (
            token for token, end in zip(tokens, behind, strict=True) if all(end in near[each] for each in behind)
        )
        return next(longest)

    def _near(self, state: int) -> set[int]:
        """A state, and those to which few tokens lead from it."""
        found = [state]
        for each in found:  # which become more meanwhile
            tokens = self.index.get_allowed_tokens(each) if len(found) < NEAR else ()
            ends = [self.index.get_next_state(each, token) for token in tokens] if len(tokens) <= FEW else []
            found += [end for end in dict.fromkeys(ends) if end is not None and end not in found]
        return set(found)


class OutlinesCore:
    """A `Guide`."""

    def __init__(self, guide: Any, ways: Ways) -> None:
        self.guide, self.ways = guide, ways
        self.taken: list[int] = []
        self.closed = False
        """whether the last of them is an end, which moves no guide"""

    @property
    def ended(self) -> bool:
        return self.guide.is_finished()

    def take(self, token: int) -> bool:
        if self.closed:
            return False
        if self.guide.accepts_tokens([token]):
            self.guide.advance(token, return_tokens=False)
        elif self.ended and token in self.guide.get_tokens():
            self.closed = True
        else:
            return False
        self.taken.append(token)
        return True

    def back(self, count: int) -> None:
        if not count:
            return
        del self.taken[-count:]
        moves, self.closed = count - self.closed, False
        if moves:
            self.guide.rollback_state(moves)

    def fill(self, mask: Tensor) -> None:
        self.guide.write_mask_into(mask.data_ptr(), mask.numel(), mask.element_size())

    def forced(self) -> int | None:
        return None if self.closed else self.ways.out(self.guide.get_state())

    def fork(self) -> Matcher:
        fork = OutlinesCore(type(self.guide)(self.ways.index, KEPT), self.ways)
        for token in self.taken:
            fork.take(token)
        return fork
