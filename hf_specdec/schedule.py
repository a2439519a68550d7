"""In which order drafting and verifying go on: what the engine and a drafter with a schedule of its own both know."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from .protocol import Draft, DraftContext, Sequences, Verdict
from .session import DraftSession
from .stats import SpeculationStats

T = TypeVar("T")


class Guarded(Protocol):
    """A session that never raises: one that does is dropped with one warning, and answers nothing more."""

    @property
    def alive(self) -> bool:
        """Whether it has not been dropped."""

    def ask(self, action: Callable[[Any], T]) -> T | None:
        """What the session says; None where it was dropped. With a target over several ranks all are told the same."""

    def tell(self, action: Callable[[Any], T]) -> T | None:
        """The same where nobody reads the answer: of several ranks the leader's session alone is told."""

    def drop(self, reason: str) -> None:
        """Give the drafter up for the rest of the call, with one warning."""


@dataclass
class Round:
    """What a schedule knows of the round it is to order."""

    sequences: Sequences
    room: list[int]
    """[B] tokens that may be drafted behind each row's end: the target's own one needs a place, too. 0 where drafting
    is paused: what a row carries is let go of"""
    passive: list[bool]
    """[B] rows of a lockstep batch that are finished and fed padding, as in plain decoding"""
    lockstep: bool


Meanwhile = Callable[[Tensor, Tensor], object]
"""told of chains, while that is on its way to the host, how many tokens are accepted [B], and the last two tokens
[B, 2] of each text then; all on the device"""


class Schedule(Protocol):
    """In which order drafting and verifying go on. Its methods are called once per round, from top to bottom."""

    def feed(self, round: Round) -> Draft:
        """What the target verifies. Drafting behind it may begin."""

    def test(self, fed: Draft) -> tuple[Draft, list[int] | None]:
        """What is judged, once the forward has been launched: it may be more than was fed. Also how many nodes of each
        row [B] the forward answers for; None for all. A row that is accepted beyond them gets no token of the target's
        own."""

    def settle(self, verdict: Verdict) -> None:
        """The round is over. The session has been told already."""


class AnyDrafter(Protocol):
    """What the engine asks of a drafter; `hf_specdec.Drafter` says what each is for."""

    proposes_trees: bool
    brings_runner: bool
    recordable: bool
    last_stats: SpeculationStats | None
    because: str

    def start(self, context: DraftContext) -> DraftSession: ...

    def why_not(self, prompt_ids: Tensor, source: dict[str, Any] | None) -> str: ...

    def takes_ragged(self) -> bool: ...

    def schedule(self, session: Guarded, context: DraftContext) -> Schedule | None: ...
