"""Targets and heads over their states, of every format and with random weights."""

from typing import Any

import dflash_models
import eagle_heads
import gemma4_models
import mtp_heads
import pytest

from hf_specdec import DFlashDrafter, EagleDrafter, Gemma4Drafter, MtpDrafter
from hf_specdec.budget import Controller, nodes_that_pay
from hf_specdec.drafters.heads import HeadDrafter
from hf_specdec.engine import guard

WIDE = 24
"""nodes that are verified at least, where there are so many"""
HEADS: dict[type[HeadDrafter], Any] = {
    MtpDrafter: mtp_heads,
    DFlashDrafter: dflash_models,
    EagleDrafter: eagle_heads,
    Gemma4Drafter: gemma4_models,
}
"""Of each kind a module with `PAIRS`, targets and drafters by name; `SMALL`, drafters for `small` by name; `drafter`,
one for a target of 40 tokens, two layers and a width of 8, if it can; and `alone`, what a drafter drafts behind a text
by another way."""
PAIRS: dict[str, Any] = {name: pair for kind in HEADS.values() for name, pair in kind.PAIRS.items()}
SMALL: dict[str, Any] = {name: make for kind in HEADS.values() for name, make in kind.SMALL.items()}
LENGTHS = [[9], [7, 7, 7], [3, 11, 6]]


def never_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random heads are hardly ever right; where they do not pay nothing would be drafted, or verified."""
    plan = Controller.plan

    def planned(self: Controller, drafted: Any, most: int, enough: int = 1) -> int:
        as_ever = plan(self, drafted, most, enough)
        return min(self.fixed or most, most) if self.who == HeadDrafter.who else as_ever

    monkeypatch.setattr(Controller, "plan", planned)
    monkeypatch.setattr(guard, "nodes_that_pay", lambda *known: max(WIDE, nodes_that_pay(*known)))


@pytest.fixture(autouse=True)
def drafting_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    never_declined(monkeypatch)


@pytest.fixture(scope="module")
def small() -> Any:
    return mtp_heads.small_target()
