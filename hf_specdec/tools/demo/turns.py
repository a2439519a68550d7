"""The demo's measuring: methods take turns, prompt by prompt, until the time is up.

In a turn all of them answer the same prompt, one right after the other: what a machine does meanwhile, it does to all.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import cycle

from torch import Tensor

from ...clock import now
from ...drafters import Drafter
from ...errors import SpeculationError
from ..bench.decoding import Generation
from ..bench.measure import Bench
from ..bench.method import Method
from ..bench.methods import PLAIN
from ..bench.plan import Unit

FIRST = 2
"""methods that the demo is about, plain decoding and ours; they are in every turn"""


@dataclass
class Turn:
    """A prompt, or a batch of them, and what methods made of it."""

    unit: Unit
    made: dict[str, Generation] = field(default_factory=dict)
    """by method"""


class Turns:
    """The turns that were taken, and those for which there is time."""

    def __init__(self, bench: Bench, ends: float) -> None:
        """
        Args:
            bench: with one pass; of its methods the first two are in every turn.
            ends: when the time is up, by `clock.now`.
        """
        self.bench, self.ends = bench, ends
        self.taken: list[Turn] = []

    @property
    def left(self) -> float:
        """Seconds; below 0 where the first turn took more."""
        return self.ends - now()

    def take(self, units: Sequence[Unit]) -> Iterator[Generation]:
        """One turn in any case, and more while they fit: each generation as it is made."""
        for unit in cycle(units):
            methods = [method for method in self.bench.passes[0] if unit.batch_size == 1 or not method.single_row]
            if unit is units[0]:
                for method in self.bench.passes[0]:
                    forget(method.drafter)
            if self.taken and sum(self._expected(method, unit) for method in methods[:FIRST]) > self.left:
                return
            self.taken.append(Turn(unit))
            for place, method in enumerate(methods):
                if place < FIRST or self._expected(method, unit) <= self.left:
                    yield self._answer(method)

    def _answer(self, method: Method) -> Generation:
        """A method's part in the last turn; before its first one it is warmed up."""
        turn = self.taken[-1]
        inputs = inputs_of(self.bench, turn.unit)
        if not any(method.name in before.made for before in self.taken):
            self.bench.warm_up(turn.unit, [method])
        made = turn.made[method.name] = self.bench.generate(method, turn.unit, inputs)
        return made

    def _expected(self, method: Method, unit: Unit) -> float:
        """Seconds that it took last, with this prompt rather than another; plain decoding's where it had no turn."""
        known = (
            (name == method.name, turn.unit is unit, number, made.stats.total_seconds)
            for number, turn in enumerate(self.taken)
            for name, made in turn.made.items()
            if name in (method.name, PLAIN)
        )
        return max(known, default=(False, False, 0, 0.0))[-1]


def inputs_of(bench: Bench, unit: Unit) -> dict[str, Tensor]:
    """
    Raises:
        SpeculationError: a prompt that does not fit into the target's context.
    """
    inputs = bench.tokenize(unit)
    if inputs is None:
        raise SpeculationError(f"the target's context is too short for the demo's {unit.dataset}; name another target")
    return inputs


def forget(drafter: Drafter | None) -> None:
    """Whoever asks something asks it once: an answer that a drafter remembers is not to be copied in a later turn."""
    if (store := getattr(drafter, "store", None)) is not None:
        drafter.store = copy(store)  # type: ignore[union-attr]  # empty, see there
