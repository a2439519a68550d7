"""What finding out may cost: a share of the time and no more, and nothing where it gains."""

import random

import pytest

from hf_specdec.budget import Account
from hf_specdec.budget.account import GIVEN, OWED, SAVED, SHARE


def rounds(account: Account, price: float) -> int:
    """Without a draft, to the next try."""
    waited = 0
    while account.missing(price):
        assert waited + account.missing(price) <= (min(price, SAVED) - account.left) / SHARE + waited + 1
        account.wait()
        waited += 1
    return waited


@pytest.mark.parametrize("price", [0.1, 0.5, 1.0])
def test_what_is_new_is_tried_at_once_and_not_for_long(price: float) -> None:
    account, tried = Account(), 0
    while not account.missing(price):
        account.charge(price)
        tried += 1
    assert 0 < tried * price <= GIVEN


@pytest.mark.parametrize("price", [0.1, 0.4, 0.7])
def test_a_pause_is_as_long_as_the_account_needs(price: float) -> None:
    account = Account()
    account.left = 0.0
    for _ in range(3):
        assert rounds(account, price) == pytest.approx(price / SHARE, abs=2)
        account.charge(price)


@pytest.mark.parametrize("said", [50.0, 1e9])
def test_however_dear_a_try_is_said_to_be_another_one_comes(said: float) -> None:
    """What it is said to take may have been disturbed, and is found out anew by trying."""
    account = Account()
    for _ in range(3):
        assert rounds(account, said) <= (OWED + SAVED) / SHARE + 2
        account.charge(said)


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("price", [0.05, 0.5, 2.0, OWED])
def test_tries_lose_a_share_of_the_time_at_most(price: float, chance: float) -> None:
    """Whatever they gain. Seeded; by construction, so that no power is to be stated."""
    account, dice, lost = Account(), random.Random(0), 0.0
    for _ in range(20_000):
        if account.missing(price):
            account.wait()
            continue
        net = price - 3 * price * (dice.random() < chance)
        account.charge(net)
        lost += net
        assert account.left <= max(SAVED, GIVEN)
    assert lost <= GIVEN + price + SHARE * 20_000


def test_an_account_that_was_given_all_never_pauses() -> None:
    account = Account()
    account.left = 1e9
    for _ in range(100):
        account.charge(1.0)
        account.wait()
    assert not account.missing(5.0)
