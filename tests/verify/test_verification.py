"""The pure functions: exact by enumeration, safe for any input."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from hf_specdec.verify.verification import (
    accepted_lengths,
    accepts,
    choose_candidate,
    distribution,
    draw,
    drawable,
    follow,
    residual,
)

BAD = [math.nan, math.inf, -math.inf]


def random_p(vocab: int, seed: int, zeros: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(vocab, generator=generator)
    p[torch.randperm(vocab, generator=generator)[:zeros]] = 0.0
    return p / p.sum()


def pairs(vocab: int = 6) -> list[tuple[str, Tensor, Tensor]]:
    """p and q from identical to disjoint."""
    p, far = random_p(vocab, 0), random_p(vocab, 1)
    half = torch.arange(vocab) < vocab // 2
    return [
        ("identical", p, p),
        ("near", p, 0.9 * p + 0.1 * far),
        ("far", p, far),
        ("q misses some", p, random_p(vocab, 2, zeros=3)),
        ("p misses some", random_p(vocab, 3, zeros=3), far),
        ("disjoint", p * half / (p * half).sum(), p * ~half / (p * ~half).sum()),
        ("point masses, equal", torch.eye(vocab)[2], torch.eye(vocab)[2]),
        ("point masses, different", torch.eye(vocab)[2], torch.eye(vocab)[4]),
    ]


PAIRS = pytest.mark.parametrize(("p", "q"), [pair[1:] for pair in pairs()], ids=[pair[0] for pair in pairs()])


# ------------------------------------------------------------------ one test


@pytest.mark.parametrize("q", [0.0, 1e-30, 0.3, 1.0])
def test_a_token_of_probability_0_is_never_accepted(q: float) -> None:
    zero = torch.zeros(1)
    assert not accepts(zero, torch.tensor([q]), zero).any(), "r = 0 and p = 0: the test is strict"


def test_accepts_is_strict_and_certain_where_p_is_not_below_q() -> None:
    half = torch.tensor([0.5])
    assert not accepts(half, torch.ones(1), half).any(), "r = p/q is a rejection"
    r = torch.tensor([0.0, 0.3, 1 - 2**-24])
    assert accepts(torch.tensor(0.4), torch.tensor(0.4), r).all()
    assert accepts(torch.tensor(0.4), torch.tensor(0.1), r).all()


@pytest.mark.parametrize("which", ["p", "q", "r"])
@pytest.mark.parametrize("bad", BAD)
def test_accepts_takes_any_input(which: str, bad: float) -> None:
    values = {"p": 0.5, "q": 0.5, "r": 0.5} | {which: bad}
    result = accepts(*(torch.tensor([values[name]]) for name in "pqr"))
    assert result.dtype == torch.bool
    if math.isnan(bad):
        assert not result.any()


@PAIRS
def test_algorithm_1_gives_p_exactly(p: Tensor, q: Tensor) -> None:
    """Summed over the drafted token, min(p, q) + P(rejected) p' is p: no sampling needed."""
    kept = torch.minimum(p, q)
    assert torch.allclose(kept + (1 - kept.sum()) * residual(p[None], q[None])[0], p, atol=1e-6)


@PAIRS
def test_the_acceptance_probability_is_min_1_p_over_q(p: Tensor, q: Tensor) -> None:
    r = (torch.arange(10_000) + 0.5) / 10_000
    for x in range(len(p)):
        share = accepts(p[x].expand(len(r)), q[x].expand(len(r)), r).float().mean()
        expected = 1.0 if p[x] >= q[x] and p[x] > 0 else float(p[x] / q[x]) if q[x] > 0 else 0.0
        assert share == pytest.approx(expected, abs=2e-4)


# ------------------------------------------------------------------ residual


def test_residual_of_equal_distributions_is_p() -> None:
    """max(0, p - q) sums to zero: a rejection there was rounding, and p is the answer."""
    p = random_p(5, 0)[None]
    assert torch.equal(residual(p, p.clone()), p)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("which", ["p", "q"])
def test_residual_of_bad_q_is_never_nan(bad: float, everywhere: bool, which: str) -> None:
    p, q = random_p(5, 0)[None], random_p(5, 1)[None]
    spoilt = q.clone()
    spoilt[0, slice(None) if everywhere else 2] = bad
    if which == "q":
        left = residual(p, spoilt)
        assert left.isfinite().all() and (left >= 0).all()
        assert left.sum() == pytest.approx(1.0, abs=1e-6)


def test_residual_rows_are_independent() -> None:
    p = torch.stack([random_p(6, seed) for seed in range(8)])
    q = torch.stack([random_p(6, 100 + seed) for seed in range(8)])
    q[3] = p[3]
    rows = torch.cat([residual(p[i : i + 1], q[i : i + 1]) for i in range(8)])
    assert torch.equal(residual(p, q), rows)


# ------------------------------------------------------------------ distribution and draw


@pytest.mark.parametrize("bad", [*BAD, -1e38, 1e38])
def test_a_drafts_distribution_is_never_nan(bad: float) -> None:
    for scores in (torch.full((3, 7), bad), torch.randn(3, 7).index_fill(1, torch.tensor([2]), bad)):
        p = drawable(distribution(scores))
        assert p.dtype == torch.float32 and p.isfinite().all() and (p >= 0).all()
        assert torch.allclose(p.sum(-1), torch.ones(3), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_distribution_is_float32(dtype: torch.dtype) -> None:
    scores = torch.randn(2, 9).to(dtype)
    assert torch.equal(distribution(scores), torch.softmax(scores.float(), -1))


@PAIRS
def test_draw_inverts_the_cumulated_p(p: Tensor, q: Tensor) -> None:
    n = 20_000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    counts = torch.bincount(draw(p.expand(n, -1), u), minlength=len(p)) / n
    assert torch.allclose(counts, p, atol=2 / n)
    assert (counts[p == 0] == 0).all()


@pytest.mark.parametrize("u", [0.0, 2**-32, 0.5, 1 - 2**-32, 1 - 2**-53])
def test_draw_never_gives_a_token_of_probability_0(u: float) -> None:
    masks = torch.tensor(list(itertools.product([0.0, 1.0], repeat=5))[1:])
    p = masks / masks.sum(-1, keepdim=True)
    tokens = draw(p, torch.full((len(p),), u, dtype=torch.float64))
    assert (p.gather(1, tokens[:, None]) > 0).all()


# ------------------------------------------------------------------ chains and trees


def test_accepted_lengths_counts_the_leading_tests() -> None:
    for passed in itertools.product([False, True], repeat=4):
        for length in range(5):
            leading = list(itertools.takewhile(lambda x: x, passed[:length]))
            assert accepted_lengths(torch.tensor([passed]), torch.tensor([length])).tolist() == [len(leading)]
    assert accepted_lengths(torch.zeros(2, 0, dtype=torch.bool), torch.tensor([0, 0])).tolist() == [0, 0]


def trees(nodes: int) -> list[tuple[int, ...]]:
    return list(itertools.product(*[range(-1, i) for i in range(nodes)]))


@pytest.mark.parametrize("parents", trees(4))
def test_follow_finds_the_longest_path(parents: tuple[int, ...]) -> None:
    """Against all paths of the tree, for every labelling with two tokens and every choice of the target."""
    paths = [[]]
    for node in range(4):
        above = next(path for path in paths if (path[-1] if path else -1) == parents[node])
        paths.append([*above, node])
    for tokens in itertools.product(range(2), repeat=4):
        for choices in itertools.product(range(2), repeat=5):
            right = [p for p in paths if all(tokens[n] == choices[parents[n] + 1] for n in p)]
            found = follow(tokens, parents, choices)
            assert found in right
            if len(set(zip(parents, tokens, strict=True))) == 4:  # of twins below one parent the first is followed
                assert len(found) == max(map(len, right))


@pytest.mark.parametrize("length", range(5))
def test_follow_of_a_chain_is_the_matching_prefix(length: int) -> None:
    for tokens in itertools.product(range(2), repeat=length):
        for choices in itertools.product(range(2), repeat=length + 1):
            n = next((i for i in range(length) if tokens[i] != choices[i]), length)
            assert follow(tokens, None, choices) == list(range(n))


@pytest.mark.parametrize("branches", [1, 2, 3])
@PAIRS
def test_choosing_among_candidates_is_exact(p: Tensor, q: Tensor, branches: int) -> None:
    """Over all candidates drawn independently from q: accepted mass + rejected mass × what is drawn then = p."""
    total = torch.zeros(len(p), dtype=torch.float64)
    support = [x for x in range(len(q)) if q[x] > 0]
    for candidates in itertools.product(support, repeat=branches):
        weight = math.prod(float(q[x]) for x in candidates)
        left = p
        for x in candidates:
            # The least r that rejects is p/q; just below it the candidate must be taken.
            ratio = min(1.0, float(left[x]) / float(q[x]))
            total[x] += weight * ratio
            weight *= 1 - ratio
            left = residual(left[None], q[None])[0]
        total += weight * left.double()
        chosen, final = choose_candidate(p, q.expand(branches, -1), candidates, [1.0] * branches)
        if chosen is None:
            assert torch.allclose(final, left, atol=1e-6)
        if p[candidates[0]] > 0:
            assert choose_candidate(p, q.expand(branches, -1), candidates, [0.0] * branches)[0] == 0
    assert torch.allclose(total, p.double(), atol=1e-5)


@pytest.mark.parametrize("beside", ["always the same", "by the draw"])
@PAIRS
def test_a_token_that_nobody_drew_may_stand_beside_a_draw(p: Tensor, q: Tensor, beside: str) -> None:
    """All mass on itself: tested against what the draw has left of p, whatever it was chosen by."""
    total = torch.zeros(len(p), dtype=torch.float64)
    for x in (x for x in range(len(q)) if q[x] > 0):
        y = 0 if beside == "always the same" else (x + 1) % len(p)
        each = torch.stack([q, torch.eye(len(p))[y].to(q)])
        ratio = min(1.0, float(p[x]) / float(q[x]))
        total[x] += float(q[x]) * ratio
        left = residual(p[None], q[None])[0]
        weight = float(q[x]) * (1 - ratio)
        total[y] += weight * float(left[y])
        chosen, final = choose_candidate(p, each, [x, y], [1.0, 1.0])
        if chosen is None:
            total += weight * (1 - float(left[y])) * final.double()
        elif ratio < 1:  # all that was left was y
            assert chosen == 1 and float(left[y]) == pytest.approx(1.0)
    assert torch.allclose(total, p.double(), atol=1e-5)


def test_candidates_of_probability_0_are_never_chosen_at_r_0() -> None:
    p, q = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.5, 0.0])
    chosen, left = choose_candidate(p, q.expand(3, -1), [0, 1, 0], [0.0, 0.0, 0.0])
    assert chosen is None and torch.equal(left, p)


@pytest.mark.parametrize("bad", BAD)
def test_choosing_with_bad_q_stays_finite(bad: float) -> None:
    p, q = random_p(4, 0), torch.full((2, 4), bad)
    _, left = choose_candidate(p, q, [1, 2], [0.5, 0.5])
    assert left.isfinite().all() and left.sum() == pytest.approx(1.0, abs=1e-5)
