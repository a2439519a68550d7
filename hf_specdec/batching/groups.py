"""Rows whose tokens are chosen in the same way."""

from dataclasses import dataclass, field

from ..judge.judging import Judge
from ..judge.randomness import RowRandomness
from ..protocol import Draft
from .drafting import Drafting


@dataclass
class Group:
    """Rows of equal settings."""

    judge: Judge
    randomness: RowRandomness
    drafting: Drafting | None
    """its own; None where all rows share one, or nobody drafts"""
    rows: set[int] = field(default_factory=set)


@dataclass
class Part:
    """A group in one round."""

    group: Group
    places: list[int]
    """of its rows in the batch"""
    draft: Draft = field(init=False)
