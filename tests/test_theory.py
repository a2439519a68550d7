"""The formulas agree with the papers' tables, with simulation, and at their edges."""

import math
import random

import pytest

from hf_specdec import theory
from hf_specdec.errors import SpeculationError

ALPHAS = [0.0, 0.1, 0.5, 0.8, 0.99, 1 - 1e-12, 1.0]
COSTS = [0.0, 0.01, 0.1, 0.5, 1.0, 2.0]


# ------------------------------------------------------------------ p and q


def pairs(count: int = 200, tokens: int = 6) -> list[tuple[list[float], list[float]]]:
    """Random p and q, many of which leave tokens out."""
    rng = random.Random(0)

    def distribution() -> list[float]:
        weights = [rng.expovariate(1) * (rng.random() < 0.8) for _ in range(tokens - 1)] + [0.1]
        return [weight / sum(weights) for weight in weights]

    return [(distribution(), distribution()) for _ in range(count)]


DISJOINT, EQUAL = ([0.3, 0.7, 0.0], [0.0, 0.0, 1.0]), ([0.3, 0.7, 0.0],) * 2


def test_d_lk_is_the_divergence_of_corollary_3_4() -> None:
    for p, q in pairs():
        assert 0 < theory.divergence(p, q) < 1
        assert theory.divergence(p, q) == pytest.approx(theory.divergence(q, p))
        assert theory.divergence(p, q) == pytest.approx(1 - sum(map(min, p, q)))  # Lemma 3.3
        assert theory.acceptance_rate(p, q) == pytest.approx(1 - theory.divergence(p, q))  # Theorem 3.5
    assert (theory.divergence(*EQUAL), theory.divergence(*DISJOINT)) == (0, 1)
    assert (theory.acceptance_rate(*EQUAL), theory.acceptance_rate(*DISJOINT)) == (1, 0)


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.1, 1e-9])
def test_lenience_accepts_more_and_keeps_its_promise(lenience: float) -> None:
    """A.5: α(l) is what a test of l · q accepts, and no token comes out with a chance above p / l."""
    for p, q in pairs():
        alpha, strict = theory.acceptance_rate(p, q, lenience), theory.acceptance_rate(p, q)
        tested = sum(qx * min(1, px / (lenience * qx)) for px, qx in zip(p, q, strict=True) if qx > 0)
        assert alpha == pytest.approx(tested)
        assert strict <= alpha <= min(1, strict / lenience)
        for px, qx in zip(p, q, strict=True):
            recovered = (1 - alpha) * max(0, px - qx) / (1 - strict)
            assert min(px / lenience, qx) + recovered <= px / lenience + 1e-12


def test_speculative_sampling_accepts_at_least_as_often_as_rejection_sampling() -> None:
    """A.2. The rates are those of the paper's steps, Σ q · p / (M q) and Σ q · min(1, p / q)."""
    for p, q in pairs():
        m = max(px / qx if qx > 0 else math.inf for px, qx in zip(p, q, strict=True) if px > 0)
        accepted = sum(qx * (px / (m * qx)) for px, qx in zip(p, q, strict=True) if qx > 0)
        assert theory.rejection_acceptance_rate(p, q) == pytest.approx(accepted)
        assert theory.rejection_acceptance_rate(p, q) <= theory.acceptance_rate(p, q) + 1e-12
    rejection, speculative = (
        sum(rate(p, q) for p, q in pairs()) for rate in (theory.rejection_acceptance_rate, theory.acceptance_rate)
    )
    assert rejection < 0.3 * speculative, "with six random chances each"
    assert theory.rejection_acceptance_rate(*EQUAL) == theory.acceptance_rate(*EQUAL) == 1
    assert theory.rejection_acceptance_rate(*DISJOINT) == theory.acceptance_rate(*DISJOINT) == 0


# ------------------------------------------------------------------ tables


@pytest.mark.parametrize("gamma", [0, 1, 5, 40])
@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.8, 0.99])
def test_expected_tokens_is_equation_1(alpha: float, gamma: int) -> None:
    assert theory.expected_tokens(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))


@pytest.mark.parametrize("gamma", [0, 1, 7, 1000])
def test_edges_are_exact(gamma: int) -> None:
    assert theory.expected_tokens(0.0, gamma) == 1
    assert theory.expected_tokens(1.0, gamma) == gamma + 1
    assert theory.expected_tokens(1 - 1e-15, gamma) == pytest.approx(gamma + 1)
    assert theory.improvement_factor(1.0, gamma, 0.0) == gamma + 1
    assert theory.improvement_factor(0.0, gamma, 0.0) == 1
    assert theory.operations_factor(1.0, gamma, 0.0) == 1
    assert theory.operations_factor(0.0, gamma, 1.0) == 2 * gamma + 1


@pytest.mark.parametrize(
    ("alpha", "gamma", "operations", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_table_1_of_the_paper(alpha: float, gamma: int, operations: float, speed: float) -> None:
    assert theory.operations_factor(alpha, gamma, 0.0) == pytest.approx(operations, abs=0.005)
    assert theory.improvement_factor(alpha, gamma, 0.0) == pytest.approx(speed, abs=0.005)


@pytest.mark.parametrize(
    ("alpha", "gamma", "c", "expected"),
    [
        (0.75, 7, 0.02, 3.2),
        (0.80, 7, 0.04, 3.3),
        (0.82, 7, 0.11, 2.5),
        (0.62, 7, 0.02, 2.3),
        (0.68, 5, 0.04, 2.4),
        (0.71, 3, 0.11, 2.0),
        (0.65, 5, 0.02, 2.4),
        (0.73, 5, 0.04, 2.6),
        (0.74, 3, 0.11, 2.0),
        (0.53, 5, 0.02, 1.9),
        (0.55, 3, 0.04, 1.8),
        (0.56, 3, 0.11, 1.6),
    ],
)
def test_table_4_of_the_paper(alpha: float, gamma: int, c: float, expected: float) -> None:
    """Its column EXP, from an α and a c that are rounded to two digits."""
    least = theory.improvement_factor(alpha - 0.005, gamma, c + 0.005)
    most = theory.improvement_factor(alpha + 0.005, gamma, c - 0.005)
    assert least - 0.05 <= expected <= most + 0.05


@pytest.mark.parametrize(("alpha", "speed"), [(0.75, 3.3), (0.75, 3.3), (0.8, 3.9), (0.87, 4.9)])
def test_the_speeds_of_greedy_lenience(alpha: float, speed: float) -> None:
    """A.5, with γ = 8 and c = 0.015."""
    assert theory.improvement_factor(alpha, 8, 0.015) == pytest.approx(speed, abs=0.05)


@pytest.mark.parametrize(("alpha", "best"), [(0.62, 2.33), (0.71, 2.94), (0.76, 3.45), (0.84, 4.79)])
def test_the_best_speeds_of_table_5(alpha: float, best: float) -> None:
    """With c = 0.015 and the best γ. The paper prints 2.5, 3.1, 3.6 and 5 without a γ."""
    assert theory.improvement_factor(alpha, theory.optimal_gamma(alpha, 0.015), 0.015) == pytest.approx(best, abs=0.005)


@pytest.mark.parametrize(("alpha", "printed"), [(0.62, 2.5), (0.71, 3.1), (0.76, 3.6)])
def test_three_speeds_of_table_5_are_out_of_reach(alpha: float, printed: float) -> None:
    """For any γ, and for the largest α that would be rounded to the paper's."""
    largest = alpha + 0.005
    assert theory.improvement_factor(largest, theory.optimal_gamma(largest, 0.015), 0.015) < printed - 0.05


def test_the_bigrams_speed() -> None:
    assert theory.improvement_factor(0.2, 3, 0.0) == pytest.approx(1.25, abs=0.005)  # section 3.6


@pytest.mark.parametrize("c", COSTS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_optimal_gamma_is_the_best_of_all_and_improves_where_corollary_3_9_says(alpha: float, c: float) -> None:
    best = theory.optimal_gamma(alpha, c, max_gamma=30)
    factor = theory.improvement_factor(alpha, best, c)
    assert all(theory.improvement_factor(alpha, gamma, c) <= factor for gamma in range(31))
    assert (best > 0) == (alpha > c)
    assert factor >= theory.least_improvement(alpha, c) >= 1


@pytest.mark.parametrize("c", COSTS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_oracle_bounds_every_window(alpha: float, c: float) -> None:
    oracle = theory.oracle_improvement(alpha, c)
    assert all(theory.improvement_factor(alpha, gamma, c) <= oracle * (1 + 1e-9) for gamma in range(40))


def test_oracle_and_pearl_edges() -> None:
    assert theory.oracle_improvement(1.0, 0.0) == math.inf
    assert theory.oracle_improvement(1.0, 0.25) == 4
    assert theory.oracle_improvement(0.5, 0.0) == theory.pearl_expected_tokens(0.5) == 2
    assert theory.pearl_expected_tokens(0.0) == 1
    assert theory.pearl_expected_tokens(1.0) == math.inf


def test_oracle_gain_is_the_papers_60_percent_at_most() -> None:
    gains = [
        theory.oracle_improvement(alpha, c) / theory.improvement_factor(alpha, theory.optimal_gamma(alpha, c), c)
        for alpha in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
        for c in (0.01, 0.02, 0.05, 0.1)
    ]
    assert 1.5 < max(gains) < 1.65


def test_expected_tokens_agree_with_simulation() -> None:
    rng = random.Random(0)

    def one_round(alpha: float, gamma: int, first: float) -> int:
        accepted = 0
        while accepted < gamma and rng.random() < (alpha if accepted else first):
            accepted += 1
        return accepted + 1

    for alpha, gamma, first in [(0.3, 2, None), (0.7, 5, None), (0.9, 8, None), (0.7, 5, 0.4), (0.5, 0, 0.4)]:
        rounds = [one_round(alpha, gamma, alpha if first is None else first) for _ in range(40_000)]
        expected = theory.expected_tokens(alpha, gamma, first=first)
        assert sum(rounds) / len(rounds) == pytest.approx(expected, rel=0.02)


def test_streams_and_a_draft_model_are_even_where_the_paper_says() -> None:
    """Equation 6: γ = 4, c = 1/10, ζ = 1.4 β; longer drafts or dearer streams move that."""
    assert theory.streams_over_draft(beta=2.0, zeta=2.8, gamma=4, c=0.1) == pytest.approx(1)
    assert theory.streams_over_draft(beta=2.0, zeta=2.8, gamma=5, c=0.1) > 1
    assert theory.streams_over_draft(beta=2.0, zeta=2.8, gamma=4, c=0.1, c_ss=1.3) == pytest.approx(1 / 1.3)


@pytest.mark.parametrize("relative", [0.6, 0.8, 1.0, 1.2, 1.4])
def test_figure_4_falls_towards_the_ratio_of_tokens(relative: float) -> None:
    """Speculative Streaming: the smaller the draft model, the less streams gain over it, and never less than β / ζ."""
    gains = [theory.streams_over_draft(1.0, relative, 4, 1 / ratio) for ratio in range(1, 101)]
    assert gains == sorted(gains, reverse=True) and gains[0] == pytest.approx(5 / relative)
    assert 1 / relative < gains[-1] < 1.05 / relative


def test_pearl_expectation_is_the_limit_of_wide_windows() -> None:
    for alpha in (0.0, 0.3, 0.9):
        assert theory.pearl_expected_tokens(alpha) == pytest.approx(theory.expected_tokens(alpha, 500))
        assert all(theory.expected_tokens(alpha, gamma) <= theory.pearl_expected_tokens(alpha) for gamma in range(9))


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.7, 0.9, 0.97, 0.99])
@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 10])
def test_pearls_best_window_is_the_speed_ratio(alpha: float, ratio: int) -> None:
    """Theorem 1, where a target forward takes as long at any width. The term in the paper's proof does not show it."""
    speeds = {gamma: theory.pearl_tokens_per_second(alpha, gamma, float(ratio), 1.0) for gamma in range(1, 40)}
    assert max(speeds, key=speeds.__getitem__) == ratio
    printed = [(gamma + ratio) / gamma for gamma in range(ratio, 40)]  # seconds per token beyond c, by Appendix B
    assert printed == sorted(printed, reverse=True)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_best_window_takes_the_measured_cost_of_width(alpha: float) -> None:
    def flat(width: int) -> float:
        return 0.25

    def linear(width: int) -> float:
        return 0.25 * width

    assert theory.best_window(alpha, flat, 0.03125, 20) == theory.optimal_gamma(alpha, 0.125, 20)
    assert theory.best_window(alpha, linear, 0.03125, 20) == 0  # each drafted token costs as much as a plain one
    assert theory.best_window(alpha, flat, 0.0, 0) == 0
    assert theory.best_window(1.0, flat, 0.0, 20) == 20


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: theory.expected_tokens(1.2, 3), "alpha"),
        (lambda: theory.expected_tokens(float("nan"), 3), "alpha"),
        (lambda: theory.expected_tokens(0.5, -1), "gamma"),
        (lambda: theory.improvement_factor(0.5, 3, -0.1), "c must"),
        (lambda: theory.streams_over_draft(2.0, 0.0, 4, 0.1), "zeta must be above 0, got 0"),
        (lambda: theory.best_window(0.5, lambda width: 0.0, 0.0, 3), "target_seconds"),
        (lambda: theory.best_window(0.5, lambda width: 1.0, 0.0, -3), "max_window"),
        (lambda: theory.divergence([0.5, 0.5], [1.0]), "the same tokens, got 2 and 1"),
        (lambda: theory.acceptance_rate([0.5, 0.4], [0.5, 0.5]), "p must hold chances"),
        (lambda: theory.rejection_acceptance_rate([0.5, 0.5], [1.5, -0.5]), "q must hold chances"),
        (lambda: theory.acceptance_rate([1.0], [1.0], 0.0), "lenience"),
    ],
)
def test_bad_arguments_are_named(call, named: str) -> None:
    with pytest.raises(SpeculationError, match=named):
        call()
