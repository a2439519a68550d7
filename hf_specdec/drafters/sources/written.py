"""`Written`: what the rows of a call have written so far, in which each finds what others went on with: several answers
to one prompt say much alike."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from .store import GRAMS, Continuations

SAMPLES = 64
"""rows in which a match is looked for at most"""


class Written:
    """The outputs of rows that go on, with the last place behind each n-gram in each of them."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}
        self._ends: dict[tuple[int, ...], dict[int, int]] = {}

    def extend(self, row: int, tokens: Iterable[int]) -> None:
        """Add accepted tokens to a row, which may be a new one."""
        text = self.texts.setdefault(row, [])
        for token in tokens:
            text.append(token)
            for gram in _ending(text):
                self._ends.setdefault(gram, {})[row] = len(text)

    def end(self, row: int) -> list[int]:
        """Forget a row; its text."""
        text = self.texts.pop(row)
        for length in range(len(text) + 1):
            for gram in _ending(text[max(0, length - GRAMS[0]) : length]):
                if (ends := self._ends.get(gram)) is not None:
                    ends.pop(row, None)
                    if not ends:
                        del self._ends[gram]
        return text

    def continuations(self, row: int, length: int, max_match: int) -> Continuations:
        """What followed the longest match of a row's end in others, at most `length` tokens of each."""
        suffix = self.texts[row][-max_match:]
        for gram in _ending(suffix):
            ends = islice(reversed(self._ends.get(gram, {}).items()), SAMPLES)
            places = [(self.texts[other], end) for other, end in ends if other != row]
            places = [(text, end) for text, end in places if end < len(text)]
            if places:
                matches = [_agreeing(text, end, suffix) for text, end in places]
                longest = max(matches)
                found = [place for place, match in zip(places, matches, strict=True) if match == longest]
                return Continuations(longest, [text[end : end + length] for text, end in found])
        return Continuations(0, [])


def _ending(text: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The n-grams that a text ends with, the longest first."""
    return (tuple(text[-n:]) for n in GRAMS if len(text) >= n)


def _agreeing(text: Sequence[int], end: int, suffix: Sequence[int]) -> int:
    """How many of the tokens before a place are the last ones of `suffix`."""
    count, most = 0, min(end, len(suffix))
    while count < most and text[end - count - 1] == suffix[-count - 1]:
        count += 1
    return count
