"""How often copies are right, by the length of the match that they follow."""

from collections.abc import Sequence

MEMORY = 0.98
"""weight of the past at each observation, so that the figures follow the text"""


class CopyRates:
    """An acceptance rate per length of match, so that a match of one token and one of eight are told apart."""

    def __init__(self, max_match: int) -> None:
        # Per match length a prior of two tokens, one of them accepted.
        self._accepted, self._tested = [1.0] * (max_match + 1), [2.0] * (max_match + 1)

    def alpha(self, match: int) -> float:
        """Measured acceptance rate of what was copied after a match of this length."""
        return self._accepted[match] / self._tested[match]

    def observe_lookup(self, match: int, copied: Sequence[int], emitted: Sequence[int]) -> None:
        """Compare a copy, drafted or not, with what the target went on to say: lookups are judged in every round."""
        tested = min(len(copied), len(emitted))
        agreed = next((i for i in range(tested) if copied[i] != emitted[i]), tested)
        self._accepted[match] = MEMORY * self._accepted[match] + agreed
        self._tested[match] = MEMORY * self._tested[match] + min(agreed + 1, tested)
