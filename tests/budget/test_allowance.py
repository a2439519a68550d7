"""What finding out may cost: a share of the time and no more, at intervals that grow, and nothing where it gains."""

import random

import pytest

from hf_specdec.budget import Allowance
from hf_specdec.budget.allowance import AT_HAND, DOUBLED, GIVEN, OWED, SHARE


def rounds(allowance: Allowance, price: float, most: int = 100_000) -> int:
    """To the next try."""
    return next(n for n in range(1, most) if allowance.try_for(price))


def spent() -> Allowance:
    """One that has nothing at hand."""
    allowance = Allowance()
    allowance.left = 0.0
    return allowance


@pytest.mark.parametrize("price", [0.1, 0.5, 1.0])
def test_what_is_new_is_tried_at_once_and_not_for_long(price: float) -> None:
    allowance = Allowance()
    tried = [allowance.try_for(price) for _ in range(20)]
    assert tried[0] and 0 < sum(tried) * price <= GIVEN
    assert not Allowance().try_for(1.1 * GIVEN), "but not at any price"


@pytest.mark.parametrize("price", [0.1, 0.4, 0.7])
def test_intervals_grow_while_tries_are_in_vain_and_another_text_begins_anew(price: float) -> None:
    allowance, least = spent(), price / SHARE
    assert DOUBLED == 2
    assert [rounds(allowance, price) for _ in range(4)] == pytest.approx(
        [least, 2 * least, 4 * least, 4 * least], abs=2
    )
    allowance.begin()
    assert rounds(allowance, price) == pytest.approx(least, abs=2)


@pytest.mark.parametrize("gained", [0.3, 0.5, 2.0])
def test_what_gains_what_it_takes_is_tried_again_at_once(gained: float) -> None:
    """And what it gains beyond that may be lost in later tries, as far as it can be saved up."""
    allowance, again = spent(), []
    rounds(allowance, 0.5)
    for _ in range(20):
        allowance.gain(gained, 0.5)
        again.append(allowance.try_for(0.5))
    assert all(again) is (gained >= 0.5)
    assert allowance.left <= AT_HAND


@pytest.mark.parametrize("said", [50.0, 1e9])
def test_however_dear_a_try_is_said_to_be_another_one_comes(said: float) -> None:
    """What it is said to take may have been disturbed, and is found out anew by trying."""
    allowance = spent()
    for _ in range(3):
        assert rounds(allowance, said) <= (OWED + AT_HAND) / SHARE + 2


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("price", [0.05, 0.5, 2.0, OWED])
def test_tries_lose_a_fiftieth_of_the_time_at_most(price: float, chance: float) -> None:
    """Whatever they gain, and what a text says of the next: begun anew every 30 rounds. Seeded; by construction, so
    that no power is to be stated."""
    allowance, dice, lost = Allowance(), random.Random(0), 0.0
    for n in range(20_000):
        if n % 30 == 0:
            allowance.begin()
        if allowance.try_for(price):
            gained = 3 * price * (dice.random() < chance)
            allowance.gain(gained, price)
            lost += price - gained
    assert lost <= GIVEN + price + SHARE * 20_000
