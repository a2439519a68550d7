"""The papers' formulas as pure functions, in the papers' letters.

- p, q: the distributions of target and draft behind one text, as chances of the same tokens in the same order.
- alpha: acceptance rate, the mean of β = Σ min(p, q) over texts, in [0, 1].
- gamma: window, draft tokens per round, 0 or more (0 is plain decoding).
- c: time of one draft step over the time of one target step, 0 or more; PEARL's c is its inverse, the *speed ratio*.

An argument out of its range raises `SpeculationError`.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from .errors import SpeculationError

SUM_TOLERANCE = 1e-4
"""by how much chances in single precision may miss 1"""


def divergence(p: Sequence[float], q: Sequence[float]) -> float:
    """D_LK(p, q) = Σ |p − M| with M = (p + q) / 2, in [0, 1] (Definition 3.2): the total variation distance.

    Symmetric; 0 where p = q, 1 where no token is possible in both (Corollary 3.4). It is 1 − Σ min(p, q) (Lemma 3.3).
    """
    _check_distributions(p, q)
    return min(math.fsum(abs(px - (px + qx) / 2) for px, qx in zip(p, q, strict=True)), 1.0)


def acceptance_rate(p: Sequence[float], q: Sequence[float], lenience: float = 1.0) -> float:
    """β = Σ min(p, q), the chance that a token drawn from q is accepted (Theorem 3.5); its mean over texts is α
    (Corollary 3.6).

    Args:
        lenience: l, above 0 and up to 1; then it is Σ min(p / l, q) (A.5).
    """
    _check_distributions(p, q)
    if not 0 < lenience <= 1:
        raise SpeculationError(f"lenience must be above 0 and up to 1 (1 is exact), got {lenience}")
    return min(math.fsum(min(px / lenience, qx) for px, qx in zip(p, q, strict=True)), 1.0)


def rejection_acceptance_rate(p: Sequence[float], q: Sequence[float]) -> float:
    """The chance that rejection sampling accepts a token drawn from q: 1 / M with M = max p / q (A.2).

    It draws from p itself after a rejection, and is exact, too, but M is set by the one token that q underrates most.
    So it is never above `acceptance_rate`, and 0 where q leaves out a token that p has.
    """
    _check_distributions(p, q)
    return min(min(qx / px for px, qx in zip(p, q, strict=True) if px > 0), 1.0)


def expected_tokens(alpha: float, gamma: int, rescue: float = 0.0, first: float | None = None) -> float:
    """Tokens per round with window gamma, (1 − α^(γ+1)) / (1 − α) (Leviathan et al. 2023, Equation 1).

    Summed as 1 + α + … + α^γ, which is exact at α = 0 and α = 1, too.

    Args:
        rescue: chance that another candidate is right where a drafted token is not; adds the chance that one is not,
            1 − α^γ, times this.
        first: α of the first drafted token, where it is another one: accepted tokens come in runs. Then alpha is that
            behind an accepted token, and α^γ becomes first · α^(γ−1).
    """
    first = alpha if first is None else first
    _check_alpha(alpha)
    _check_alpha(first, "first")
    _check_at_least_zero("gamma", gamma)
    if gamma == 0:
        return 1.0
    tokens = 1.0
    for _ in range(gamma - 1):
        tokens = 1.0 + alpha * tokens
    return 1.0 + first * tokens + (1 - first * alpha ** (gamma - 1)) * rescue


def improvement_factor(alpha: float, gamma: int, c: float) -> float:
    """Wall-time speed-up over plain decoding (Theorem 3.8), where a wide verification costs no more than one token."""
    _check_at_least_zero("c", c)
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def least_improvement(alpha: float, c: float) -> float:
    """What some window gives at least: (1 + α) / (1 + c) where α > c, else 1, by not drafting (Corollary 3.9)."""
    return improvement_factor(alpha, 1, c) if alpha > c else improvement_factor(alpha, 0, c)


def operations_factor(alpha: float, gamma: int, c_hat: float) -> float:
    """Growth of arithmetic operations per token (Theorem 3.11).

    Args:
        c_hat: operations per token of the draft over those of the target (Definition 3.10).
    """
    _check_at_least_zero("c_hat", c_hat)
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def optimal_gamma(alpha: float, c: float, max_gamma: int = 64) -> int:
    """The smallest window in 0…max_gamma with the highest improvement factor (§3.5)."""
    return best_window(alpha, lambda width: 1.0, c, max_gamma)


def oracle_improvement(alpha: float, c: float) -> float:
    """Upper bound of the speed-up over all choices of gamma, even one per round (§3.5).

    An oracle drafts exactly the tokens that will be accepted, α / (1 − α) per round on average, and gets
    1 / (1 − α) tokens for the time of one target step and that many draft steps: 1 / (1 − α + αc).
    It drafts nothing where c is above 1. Infinite at α = 1, c = 0.
    """
    _check_alpha(alpha)
    _check_at_least_zero("c", c)
    cost_per_token = 1 - alpha + alpha * min(c, 1.0)
    return 1 / cost_per_token if cost_per_token > 0 else math.inf


def streams_over_draft(beta: float, zeta: float, gamma: int, c: float, c_ss: float = 1.0) -> float:
    """Speed-up of streams over a draft model, (γc + 1) β / (ζ C_ss) (Bhendawade et al. 2024, Equation 6).

    Args:
        beta: tokens per call with streams, above 0.
        zeta: tokens per call with the draft model, above 0.
        c_ss: time of a call with streams over that of a target step, above 0; Figure 4 takes it as 1.
    """
    for name, value in (("beta", beta), ("zeta", zeta), ("c_ss", c_ss)):
        if not value > 0:
            raise SpeculationError(f"{name} must be above 0, got {value}")
    _check_at_least_zero("gamma", gamma)
    _check_at_least_zero("c", c)
    return (gamma * c + 1) * beta / (zeta * c_ss)


def pearl_expected_tokens(alpha: float) -> float:
    """Tokens until a PEARL draft is rejected, the target's own included: 1 / (1 − α), infinite at α = 1.

    Corrects the paper's Theorem 2, 1 / (1 − α) + 1: Σ k (1 − α) α^k over the accepted lengths k is α / (1 − α).
    """
    _check_alpha(alpha)
    return 1 / (1 - alpha) if alpha < 1 else math.inf


def pearl_tokens_per_second(
    alpha: float, gamma: int, target: float, draft: float, foreseen: float = 0.0, first: float | None = None
) -> float:
    """Tokens per second of PEARL without overhead (Liu et al. 2024, Figure 3).

    A row is either before its first accepted token (the target tests x1) or behind it (γ tests, x2 … x(γ+1)). A round
    that accepts all waits for the drafting of γ tokens, one that rejects does not.

    Args:
        target: seconds of a target forward.
        draft: seconds of a draft step.
        foreseen: share of corrections that were drafted for. The row goes on behind such a one with γ tests.
        first: α of the token behind a correction, where it is another one: accepted tokens come in runs.
    """
    first = alpha if first is None else first
    _check_alpha(alpha)
    _check_alpha(first, "first")
    passed, passed_foreseen = alpha**gamma, first * alpha ** (gamma - 1)
    passed_behind = (1 - foreseen) * first + foreseen * passed_foreseen
    # How many rounds come behind a correction, and how many behind an acceptance: each kind as often as it is entered.
    behind, on = 1 - passed, passed_behind
    more = (1 - alpha ** (gamma - 1)) / (1 - alpha) if alpha < 1 else gamma - 1.0
    tokens = behind * (1 - foreseen) + behind * foreseen * (1 + first * more) + on * (1 + alpha * more)
    accepted = behind * passed_behind + on * passed
    wholes = accepted + (behind + on - accepted) * foreseen
    return tokens / (wholes * max(target, gamma * draft) + (behind + on - wholes) * max(target, draft))


def tokens_per_second(
    alpha: float,
    gamma: int,
    target_seconds: Callable[[int], float],
    draft_seconds: float,
    first: float | None = None,
) -> float:
    """Speed of window gamma from measured times, E(γ) / (T(γ + 1) + γ · T_draft).

    Args:
        target_seconds: duration of a target forward by its width in tokens.
        draft_seconds: duration of one draft step.
        first: as in `expected_tokens`.
    """
    _check_at_least_zero("draft_seconds", draft_seconds)
    seconds = target_seconds(gamma + 1) + gamma * draft_seconds
    if not seconds > 0:
        raise SpeculationError(f"target_seconds({gamma + 1}) must be above 0 seconds, got {seconds}; measure it first")
    return expected_tokens(alpha, gamma, first=first) / seconds


def best_window(
    alpha: float,
    target_seconds: Callable[[int], float],
    draft_seconds: float,
    max_window: int,
    first: float | None = None,
) -> int:
    """The fastest window in 0…max_window by measured times; 0 means that drafting does not pay.

    Theorem 3.8 takes a verification of any width to cost one target step; this takes what it costs.
    The smallest of equally fast windows wins. Arguments as in `tokens_per_second`.
    """
    _check_at_least_zero("max_window", max_window)

    def speed(gamma: int) -> float:
        return tokens_per_second(alpha, gamma, target_seconds, draft_seconds, first)

    return max(range(max_window + 1), key=speed)


def line_through(table: Mapping[int, float], weights: Mapping[int, float] | None = None) -> Callable[[int], float]:
    """Time by width as a straight line through measured widths (least squares), which never falls with the width.

    Args:
        table: seconds of a target forward by its width in tokens, at least one entry; a single one is taken for all.
        weights: how often each width was measured; None for all alike.
    """
    if not table:
        raise SpeculationError("table must hold the measured time of at least one width, got an empty one")
    count = {width: 1 if weights is None else weights[width] for width in table}
    n = sum(count.values())
    mean_w = sum(count[w] * w for w in table) / n
    mean_t = sum(count[w] * t for w, t in table.items()) / n
    spread = sum(count[w] * (w - mean_w) ** 2 for w in table)
    slope = sum(count[w] * (w - mean_w) * t for w, t in table.items()) / spread if len(table) > 1 else 0.0
    return lambda width: max(mean_t + max(slope, 0.0) * (width - mean_w), 1e-9)


def _check_alpha(alpha: float, name: str = "alpha") -> None:
    if not 0 <= alpha <= 1:
        raise SpeculationError(f"{name} is an acceptance rate and must be from 0 to 1, got {alpha}")


def _check_distributions(p: Sequence[float], q: Sequence[float]) -> None:
    if len(p) != len(q):
        raise SpeculationError(f"p and q must hold chances of the same tokens, got {len(p)} and {len(q)} of them")
    for name, chances in (("p", p), ("q", q)):
        total = math.fsum(chances)
        if not (all(chance >= 0 for chance in chances) and abs(total - 1) <= SUM_TOLERANCE):
            raise SpeculationError(f"{name} must hold chances of 0 or more that sum to 1, got a sum of {total}")


def _check_at_least_zero(name: str, value: float) -> None:
    if not value >= 0:
        raise SpeculationError(f"{name} must be 0 or more, got {value}")
