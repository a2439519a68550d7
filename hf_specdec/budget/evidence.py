"""`Evidence`: what speaks for a drafted token."""

from bisect import bisect
from functools import cache
from typing import NamedTuple

EDGES = (0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97)
"""between bands of estimates: narrow where chances are small, as these are multiplied"""


class Proposer(NamedTuple):
    """Who proposes a token, and how."""

    name: str
    rank: int = 0
    """of the token among this source's candidates for its place, from 0"""
    match: int = 0
    """tokens of the text that were found again before a copied token; 0 for what is no copy"""


class Evidence(NamedTuple):
    """What speaks for a drafted token. Tokens with the same evidence are counted together."""

    sources: tuple[Proposer, ...]
    """that propose it"""
    agrees: bool | None = None
    """whether another source says the same of this place; None where no other one was asked"""
    band: int | None = None
    """of the source's own estimate, from the lowest; None where it has none"""

    @staticmethod
    @cache
    def of(name: str, rank: int = 0, match: int = 0) -> "Evidence":
        """One source alone."""
        return Evidence((Proposer(name, rank, match),))

    def at(self, estimate: float) -> "Evidence":
        """The same with an estimate, from 0 to 1, that the token is right."""
        return self._replace(band=bisect(EDGES, estimate))
