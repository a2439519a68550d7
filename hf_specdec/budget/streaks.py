"""`Streaks`: accepted tokens come in runs, so chances are seen in the light of what each row has just had."""

from collections.abc import Sequence

FADES = 0.8
"""weight of the past at each round in which a row might draft, whether it does or not"""
AS_EXPECTED = 2.0
"""tokens that are taken to have been right as often as expected, and as many to have been wrong"""


class Streaks:
    """By row of a call, how many tokens were right just before and how many wrong, and how many were expected to be."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[float, float, float, float]] = {}  # right, expected right; wrong, expected wrong

    def begin(self, rows: Sequence[int]) -> None:
        """A round of these rows begins; others have ended."""
        faded = {row: self._of[row] for row in rows if row in self._of}
        self._of = {row: (FADES * a, FADES * b, FADES * c, FADES * d) for row, (a, b, c, d) in faded.items()}

    def chance(self, row: int, estimate: float) -> float:
        """What becomes of an estimate: its odds times how much oftener than expected tokens were right, over how much
        oftener they were wrong."""
        if row not in self._of:
            return estimate
        right, rightly, wrong, wrongly = (n + AS_EXPECTED for n in self._of[row])
        odds = estimate * (right / rightly) * (wrongly / wrong)
        return odds / (odds + 1 - estimate)

    def observe(self, row: int, estimate: float, right: bool) -> None:
        """One token of this row, which had this estimate before it was seen in the light of others, was tested."""
        a, b, c, d = self._of.get(row, (0.0, 0.0, 0.0, 0.0))
        self._of[row] = (a + right, b + estimate, c + (not right), d + 1 - estimate)
