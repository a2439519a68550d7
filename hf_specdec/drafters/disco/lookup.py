"""A feature that costs no forward: does copying from earlier text propose what the draft proposes?"""

from collections.abc import Iterable, MutableMapping

N = 3
"""tokens that must recur"""
NONE = -1
"""where they do not"""


class Recurrence:
    """Knows which token followed the last occurrence of the last N tokens."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.followers: MutableMapping[tuple[int, ...], int] = {}
        self.tail: tuple[int, ...] = ()
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if len(self.tail) == N:
                self.followers[self.tail] = token
            self.tail = (*self.tail, token)[-N:]

    def proposal(self) -> int:
        """The token that would be copied, or `NONE`."""
        return self.followers.get(self.tail, NONE)


class Branch:
    """A drafted continuation of a text, which leaves the text's index as it is."""

    def __init__(self, text: Recurrence) -> None:
        self.text, self.own = text, Recurrence()
        self.own.tail = text.tail

    def append(self, token: int) -> None:
        self.own.extend([token])

    def proposal(self) -> int:
        found = self.own.proposal()
        return found if found != NONE else self.text.followers.get(self.own.tail, NONE)
