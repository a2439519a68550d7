"""Sampled text has the target's distribution: chi-square tests of the joint distribution of three tokens in a row.

A vocabulary of 5, 50,000 rows, a level of 1e-4 per test (seeds are fixed, so a pass stays a pass). With 125 cells such
a test finds a deviation of Σ (p' - p)² / p = 0.004 with a power of 99.9%; 10,000 rows find 0.02
(`test_the_power_is_as_stated`). The default run takes all rows in one case and 10,000 in three others; `-m slow` takes
100,000 in all cases, which finds 0.002.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toy_drafters as drafters
from chi_square import chi_square
from sampled_triples import FEWER, LEVEL, ROWS, SETTINGS, VOCAB, joint, p_value, sample, table, target
from torch import Tensor
from transformers.generation import logits_process as lp

from hf_specdec import DraftModelDrafter
from hf_specdec.drafters.base import Drafter
from hf_specdec.verify import sampled
from hf_specdec.verify.randomness import Purpose, Randomness
from hf_specdec.verify.verification import accepted_lengths, accepts, draw, residual

__all__ = ["target"]


def unlikely(last: Tensor) -> Tensor:
    """Nearly a point mass on one token after the other: far from any p."""
    return 30.0 * torch.nn.functional.one_hot((last + 1) % VOCAB, VOCAB).float()


DRAFTS: dict[str, Callable[[Any], Drafter]] = {
    "identical": lambda target: DraftModelDrafter(target, num_draft_tokens=3),
    "other": lambda target: drafters.with_logits(table(1), 3),
    "nearly disjoint": lambda target: drafters.with_logits(unlikely, 3),
    "tree": lambda target: drafters.with_logits(table(1), 2, branches=2),
    "point-mass tree": lambda target: drafters.Toy(_bush, trees=True),
}


def _bush(context: Any, sequences: Any, room: list[int]) -> Any:
    """Tokens 0, 1 and 2, and 3 and 4 below 1, whatever the text."""
    rows = len(sequences.rows)
    tokens, parents = torch.tensor([[0, 1, 2, 3, 4]] * rows), torch.tensor([[-1, -1, -1, 1, 1]] * rows)
    return drafters.Draft(tokens, [5] * rows, parents)


def test_the_power_is_as_stated() -> None:
    from scipy import stats

    freedom, threshold = VOCAB**3 - 1, stats.chi2.ppf(1 - LEVEL, VOCAB**3 - 1)
    assert stats.ncx2.sf(threshold, freedom, nc=0.004 * ROWS) > 0.999
    assert stats.ncx2.sf(threshold, freedom, nc=0.02 * FEWER) > 0.999
    counts, wanted = [30, 41, 52], [40.0, 40.0, 43.0]
    assert chi_square(counts, wanted) == pytest.approx(stats.chisquare(counts, wanted, sum_check=False).pvalue)


# ------------------------------------------------------------------ through generate

QUICK = [
    ("temperature", "other", FEWER),
    ("top-k", "nearly disjoint", FEWER),
    ("penalties", "tree", FEWER),
    ("top-p", "identical", FEWER),
]
ALL = [pytest.param(setting, draft, 2 * ROWS, marks=pytest.mark.slow) for setting in SETTINGS for draft in DRAFTS]


@pytest.mark.grid
@pytest.mark.parametrize(("setting", "draft", "rows"), QUICK + ALL)
def test_the_joint_distribution_of_three_tokens(target: Any, setting: str, draft: str, rows: int) -> None:
    told, processors = SETTINGS[setting]
    drafter = DRAFTS[draft](target)
    counts = sample(target, drafter, rows, **told)
    assert counts.sum() == rows
    assert p_value(counts, joint(target, processors)) > LEVEL
    if draft == "identical":
        assert drafter.last_stats is not None and drafter.last_stats.alpha == pytest.approx(1.0, abs=1e-4)


class Untouched(lp.LogitsProcessor):
    """A user's processor: it asks for judgement step by step."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


@pytest.mark.parametrize("opaque", [False, True])
def test_a_batch_in_lockstep(target: Any, opaque: bool) -> None:
    """A streamer or a processor of the user's keeps rows together; 4,000 of them here."""
    told, processors = SETTINGS["temperature"]
    extra = {"logits_processor": [Untouched()]} if opaque else {"return_dict_in_generate": False}
    chunk, rows = (10, 2_000) if opaque else (10_000, 20_000)
    counts = sample(target, drafters.with_logits(table(1), 3), rows=rows, chunk=chunk, **told, **extra)
    assert p_value(counts, joint(target, processors)) > LEVEL


@pytest.mark.slow
@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("draft", ["identical", "other", "tree"])
def test_one_row_5000_times(target: Any, draft: str, opaque: bool) -> None:
    told, processors = SETTINGS["temperature"]
    extra = {"logits_processor": [Untouched()]} if opaque else {}
    counts = sample(target, DRAFTS[draft](target), rows=5_000, chunk=1, **told, **extra)
    assert p_value(counts, joint(target, processors)) > LEVEL


# ------------------------------------------------------------------ by the pure functions


def mixtures() -> list[tuple[float, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    p = torch.softmax(torch.randn(8, generator=generator), -1) * (torch.arange(8) < 5)
    q = torch.softmax(torch.randn(8, generator=generator), -1) * (torch.arange(8) >= 5)
    p, q = p / p.sum(), q / q.sum()
    return [(share, p, share * q + (1 - share) * p) for share in (0.0, 0.2, 0.5, 0.9, 1.0)]


@pytest.mark.parametrize(("share", "p", "q"), mixtures(), ids=lambda value: str(value)[:3])
def test_algorithm_1_by_the_pure_functions(share: float, p: Tensor, q: Tensor) -> None:
    """A million rounds of two drafted tokens, from an identical draft to a disjoint one."""
    n, randomness = 1_000_000, Randomness(9)
    cpu = torch.device("cpu")
    rows = range(n)

    def uniform(position: int, purpose: Purpose) -> Tensor:
        return randomness.tensor(rows, [position] * n, purpose, cpu)

    x = torch.stack([draw(q.expand(n, -1), uniform(i, Purpose.DRAFT)) for i in (0, 1)], 1)
    r = torch.stack([uniform(i, Purpose.ACCEPT) for i in (0, 1)], 1)
    count = accepted_lengths(accepts(p[x].double(), q[x].double(), r), torch.full((n,), 2))
    final = torch.where(count[:, None] < 2, residual(p[None], q[None]), p[None])
    own = draw(final, torch.where(count == 0, uniform(0, Purpose.CHOOSE), uniform(1, Purpose.CHOOSE)))
    first = torch.where(count > 0, x[:, 0], own)
    assert p_value(torch.bincount(first, minlength=8), p.double() / p.double().sum()) > LEVEL
    second = torch.where(count > 1, x[:, 1], own)[count > 0]
    if len(second):
        assert p_value(torch.bincount(second, minlength=8), p.double() / p.double().sum()) > LEVEL
    assert float((count > 0).double().mean()) == pytest.approx(1 - share, abs=5e-3)


# ------------------------------------------------------------------ a test of the test


class RawQ(drafters.DrawingSession):
    """Says q before the processors."""

    def _draw(self, ids: Tensor, lengths: Any, rows: Any, logits: Tensor, siblings: Any) -> Any:
        x, _ = super()._draw(ids, lengths, rows, logits, siblings)
        return x, logits.softmax(-1)


def raw_q(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "DrawingSession", RawQ)


def p_instead_of_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "residual", lambda p, q: p)


def one_draw_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    uniform = Randomness.uniform

    def planted(self: Any, rows: Any, positions: Any, purpose: int, attempt: int = 0) -> Any:
        if purpose == Purpose.CHOOSE:
            return uniform(self, rows, positions, Purpose.BLOCK, self.round)
        return uniform(self, rows, positions, purpose, attempt)

    monkeypatch.setattr(Randomness, "uniform", planted)


def bonus_from_q(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, q = sampled.Draws.chain, table(1)

    def planted(self: Any, trial: Any) -> Any:
        results, draft = chain(self, trial), trial.draft
        bonus = torch.multinomial((q(draft.tokens[:, -1]) / 1.7).softmax(-1), 1)[:, 0].tolist()
        for b, (result, length, token) in enumerate(zip(results, draft.lengths, bonus, strict=True)):
            if result.path and len(result.path) == length:
                result.tokens[-1] = trial.texts[b, length] = token
        return results

    monkeypatch.setattr(sampled.Draws, "chain", planted)


@pytest.mark.grid
@pytest.mark.parametrize("plant", [None, raw_q, p_instead_of_the_residual, one_draw_used_twice, bonus_from_q])
def test_the_test_catches_planted_errors(target: Any, monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    told, processors = SETTINGS["temperature"]
    if plant is not None:
        plant(monkeypatch)
    counts = sample(target, drafters.with_logits(table(1), 3), FEWER, **told)
    caught = p_value(counts, joint(target, processors)) < LEVEL
    assert caught == (plant is not None)
