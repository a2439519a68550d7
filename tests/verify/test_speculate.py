"""`speculate`: what is drawn is distributed as f says, whatever is guessed, and f and g work at the same time.

The distribution is that of three steps in a row, 27 triples. 2,000 of them find a deviation Σ (p' - p)² / p of 0.05
at a level of 1e-4 with a power of 99.9% (`test_the_power_is_as_stated`).
"""

import threading
from collections import Counter
from collections.abc import Mapping
from functools import cache
from itertools import islice, product
from typing import Any

import pytest
import torch
from chi_square import chi_square

from hf_specdec import SpeculationError, speculate, theory
from hf_specdec.verify import speculate as module

LEVEL, TRIPLES = 1e-4, 2_000
Place = tuple[str, ...]
STEPS = ("left", "straight on", "right")


@cache
def random(place: Place, seed: int) -> dict[str, float]:
    """Chances that depend on the place and on nothing else."""
    number = seed + sum(3**i * (1 + STEPS.index(step)) for i, step in enumerate(place))
    return chances(torch.randn(3, generator=torch.Generator().manual_seed(number)).mul(1.5).softmax(-1).tolist())


def chances(values: list[float]) -> dict[str, float]:
    return dict(zip(STEPS, values, strict=True))


def f(place: Place) -> dict[str, float]:
    return random(place, 0)


def g(place: Place, step: str) -> Place:
    """Three steps, then a new beginning: triples are independent of each other."""
    return (*place, step) if len(place) < 2 else ()


def mixed(place: Place) -> dict[str, float]:
    return {step: 0.6 * chance + 0.4 * random(place, 100)[step] for step, chance in f(place).items()}


GUESSES: dict[str, Any] = {
    "f itself": f,
    "near": mixed,
    "far": lambda place: random(place, 100),
    "one": lambda place: {"right": 1.0},
    "nothing of f's": lambda place: {"up": 0.5, "down": 0.5},
    "some of f's, in another order": lambda place: {"up": 0.2, "right": 0.5, "left": 0.3},
}


def p_value(triples: int, q: Any, gamma: int) -> float:
    """Of a chi-square test of the triples."""
    torch.manual_seed(0)
    steps = [y for y, _ in islice(speculate(f, g, q, (), gamma), 3 * triples)]
    counts = Counter(zip(steps[::3], steps[1::3], steps[2::3], strict=True))
    exact = {(a, b, c): f(())[a] * f((a,))[b] * f((a, b))[c] for a, b, c in product(STEPS, repeat=3)}
    assert counts.keys() <= exact.keys()
    rare = [triple for triple, p in exact.items() if p * triples < 5]
    cells = [[triple] for triple in exact if triple not in rare] + [rare] * bool(rare)
    return chi_square(
        [sum(counts[triple] for triple in cell) for cell in cells],
        [triples * sum(exact[triple] for triple in cell) for cell in cells],
    )


def test_the_power_is_as_stated() -> None:
    from scipy import stats

    assert stats.ncx2.sf(stats.chi2.ppf(1 - LEVEL, 26), 26, nc=0.05 * TRIPLES) > 0.999


@pytest.mark.grid
@pytest.mark.parametrize(("guess", "gamma"), [*((guess, 3) for guess in GUESSES), ("near", 1), ("far", 2)])
def test_steps_are_distributed_as_f_says(guess: str, gamma: int) -> None:
    assert p_value(TRIPLES, GUESSES[guess], gamma) > LEVEL


def test_without_guesses_it_is_a_plain_walk() -> None:
    assert p_value(1_000, f, 0) > LEVEL


@pytest.mark.parametrize("planted", ["accepts", "residual"])
def test_the_test_catches_planted_errors(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"accepts": lambda p, q, r: True, "residual": lambda p, q: p}
    monkeypatch.setattr(module, planted, wrong[planted])
    assert p_value(TRIPLES, GUESSES["far"], 1) < LEVEL


@pytest.mark.parametrize("gamma", [1, 4])
def test_rounds_yield_as_many_steps_as_equation_1_says(gamma: int) -> None:
    """3,000 steps; a standard error of 2% of the mean or less."""
    p, q, guessed = chances([0.5, 0.3, 0.2]), chances([0.2, 0.3, 0.5]), []

    def guess(place: int) -> Mapping[str, float]:
        guessed.append(place)
        return q

    torch.manual_seed(0)
    steps = 3_000
    walk = speculate(lambda place: p, lambda place, step: place + 1, guess, 0, gamma)
    assert [place for _, place in islice(walk, steps)] == list(range(1, steps + 1))
    rounds = len(guessed) / gamma
    assert steps / rounds == pytest.approx(theory.expected_tokens(0.7, gamma), rel=0.06)


def test_f_and_g_work_at_the_same_time() -> None:
    """f answers only when all calls of a round have begun, and g has gone on from the guesses."""
    gamma = 3
    begun, gone_on = threading.Barrier(gamma + 1), threading.Event()

    def waiting(place: int) -> dict[int, float]:
        assert gone_on.wait(60)
        begun.wait(60)
        return {1: 1.0}

    def steps(place: int, step: int) -> int:
        if place + step == gamma:
            gone_on.set()
        return place + step

    walk = speculate(waiting, steps, lambda place: {1: 1.0}, 0, gamma)
    assert [place for _, place in islice(walk, gamma + 1)] == [1, 2, 3, 4]


def test_a_seed_fixes_the_walk() -> None:
    def walk(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        return list(islice(speculate(f, g, GUESSES["far"], (), 2), 50))

    assert walk(3) == walk(3) != walk(4)


@pytest.mark.parametrize("bad", [{}, {"left": 0.5}, {"left": 1.5, "right": -0.5}, {"left": float("nan")}])
@pytest.mark.parametrize("name", ["f", "q"])
def test_what_is_no_distribution_is_named(name: str, bad: dict[str, float]) -> None:
    functions: dict[str, Any] = {"f": f, "q": f} | {name: lambda place: bad}
    with pytest.raises(SpeculationError, match=f"{name} must give chances of 0 or more that sum to 1, got"):
        next(speculate(g=g, x=(), **functions))


def test_a_negative_window_is_refused_and_errors_of_f_come_through() -> None:
    with pytest.raises(SpeculationError, match="gamma is a number of steps and must be 0 or more, got -1"):
        next(speculate(f, g, f, (), -1))

    def fails(place: Place) -> dict[str, float]:
        raise KeyError("of f's own")

    with pytest.raises(KeyError, match="of f's own"):
        next(speculate(fails, g, f, ()))
