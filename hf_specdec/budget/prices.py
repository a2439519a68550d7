"""`Prices`: what a machine takes for a target's forwards and a drafter's steps, measured once. Calls that go by them
draft the same whatever else the machine does meanwhile."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from .cost import Cost, DraftCost


@dataclass(frozen=True)
class Prices:
    """In seconds, for one number of rows."""

    rows: int
    forwards: dict[int, float]
    """of the target, by tokens per row"""
    between: dict[bool, float]
    """of a round beside drafting and the forward, by whether it has a draft"""
    draft: tuple[float, float, float] | None = None
    """`step`, `opening` and `reading` of a `DraftCost`; None of a drafter that makes no steps"""
    rounds: tuple[float, float] | None = None
    """of a plain round and of one with a draft; None of a drafter that weighs by itself"""
    agreed: bool = True
    """whether they were measured twice alike, and so are for later processes, too"""

    @classmethod
    def of(cls, rows: int, cost: Cost, draft: DraftCost | None, rounds: tuple[float, float] | None) -> "Prices | None":
        """As they were observed; None where they say too little. A disturbance only makes a forward slower."""
        forwards, between = cost.figures(rows)
        is_begun = draft is not None and draft.step is None and draft.of(1) > 0
        if is_begun or not _say_enough(forwards, between):
            return None
        steps = None if draft is None or draft.least is None else (draft.least, draft.opening, draft.reading)
        agreed = forwards[1].agrees and all(times.agrees for times in forwards.values() if len(times.last) > 2)
        shortest = {width: times.least for width, times in forwards.items()}
        beside = {kind: times.least for kind, times in between.items()}
        return cls(rows, shortest, beside, steps, rounds, agreed)

    def cost(self) -> Cost:
        """The target's, which learns nothing more."""
        return Cost.set_to({(self.rows, width): seconds for width, seconds in self.forwards.items()}, self.between)

    def as_json(self) -> dict[str, Any]:
        return {"rows": self.rows, "draft": self.draft, "rounds": self.rounds} | {
            name: [*getattr(self, name).items()] for name in ("forwards", "between")
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Prices":
        """
        Raises:
            KeyError, TypeError, ValueError: it is no such content.
        """
        forwards = {int(width): float(seconds) for width, seconds in content["forwards"]}
        between = {bool(kind): float(seconds) for kind, seconds in content["between"]}
        draft, rounds = (None if content[n] is None else tuple(map(float, content[n])) for n in ("draft", "rounds"))
        if not _say_enough(forwards, between):
            raise ValueError("there are too few figures")
        return cls(int(content["rows"]), forwards, between, draft, rounds)  # type: ignore[arg-type]


def _say_enough(forwards: Collection[int], between: Collection[bool]) -> bool:
    """Whether figures of these widths, a single token's among them, and of rounds beside them make a line."""
    return len(forwards) > 1 and 1 in forwards and len(between) > 0
