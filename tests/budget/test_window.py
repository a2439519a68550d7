"""How far a draft model drafts: the best window by measured figures, and no further than an EOS."""

import random
from typing import Any

import models
import pytest
import torch
from compare import PROMPTS, Sides, uneven_eos
from models import VOCAB, llama
from toy_drafters import context

from hf_specdec import DraftModelDrafter, theory
from hf_specdec.budget import LOOK_STEPS, Acceptance, Advance, Cost, DraftCost, fastest
from hf_specdec.budget.stepwise import DRAWN
from hf_specdec.budget.window import FIRST, LARGEST, WINDOWS, Window
from hf_specdec.drafters.disco import DiscoDrafter, StopClassifier
from hf_specdec.drafters.draft_model import BudgetedSession
from hf_specdec.drafters.draft_model import session as sessions
from hf_specdec.drafters.draft_model.stepped import Own
from hf_specdec.protocol import Sequences, Verdict


class Told:
    """A window of one row that has seen this acceptance and these times."""

    def __init__(self, alpha: float, verify: Any, draft: float, widths: tuple[int, ...] = (1, 4, 9)) -> None:
        dice, drafted = random.Random(0), 10
        self.window, self.cost, self.draft_cost = Window(memory=0.998), Cost(), DraftCost()
        for _ in range(400):
            accepted = next((k for k in range(drafted) if dice.random() >= alpha), drafted)
            self.window.observe([drafted], [accepted])
            self.draft_cost.observe(draft)
            for width in widths:
                self.cost.observe_forward(1, width, verify(width))

    def choose(self) -> int:
        return self.window.choose(self.cost, self.draft_cost, rows=1)[0]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("c", [0.02, 0.2, 0.5, 1.5])
def test_with_a_constant_verification_time_it_is_theorem_3_8s(alpha: float, c: float) -> None:
    told = Told(alpha, lambda width: 1.0, c)
    assert told.window.alpha == pytest.approx(alpha, abs=0.08)
    assert told.window.first == pytest.approx(alpha, abs=0.08)
    assert told.window.behind == pytest.approx(alpha, abs=0.08)
    best = theory.best_window(told.window.behind, lambda width: 1.0, c, LARGEST, first=told.window.first)
    chosen = [told.choose() for _ in range(31)]
    assert max(chosen) == best or (best == 0 and set(chosen) <= {0, LOOK_STEPS})


@pytest.mark.parametrize("first, behind, c", [(0.4, 0.9, 0.2), (0.8, 0.3, 0.2), (0.3, 0.8, 0.1)])
def test_tokens_behind_an_accepted_one_have_a_chance_of_their_own(first: float, behind: float, c: float) -> None:
    """A window by that of the first alone would be another one."""
    told, dice = Told(0.5, lambda width: 1.0, c), random.Random(1)
    for _ in range(4000):
        accepted = next((k for k in range(10) if dice.random() >= (behind if k else first)), 10)
        told.window.observe([10], [accepted])
    assert (told.window.first, told.window.behind) == pytest.approx((first, behind), abs=0.05)
    best = theory.best_window(behind, lambda width: 1.0, c, LARGEST, first=first)
    assert abs(told.choose() - best) <= 1
    assert abs(best - theory.optimal_gamma(first, c, LARGEST)) > 1


def test_drafts_of_one_token_do_not_keep_it_from_longer_ones() -> None:
    """What was behind accepted tokens long ago is forgotten, where nothing behind them is drafted any more, too."""
    told = Told(0.5, lambda width: 1.0, 0.3)
    told.window = Window()
    for _ in range(200):
        told.window.observe([8], [1])
    assert told.window.behind < 0.1
    for _ in range(40_000):
        told.window.observe([1], [1])
    assert (told.window.first, told.window.behind) == pytest.approx((1.0, 1.0))
    assert told.choose() > 1


@pytest.mark.parametrize("slope", [0.0, 0.1, 0.5, 2.0])
def test_a_verification_that_grows_with_its_width_makes_for_shorter_windows(slope: float) -> None:
    windows = [Told(0.8, lambda width, s=s: 1.0 + s * width, 0.05).choose() for s in (slope, slope + 0.5)]
    assert windows[0] >= windows[1]


def test_a_batch_that_waits_for_its_slowest_row_drafts_less() -> None:
    """What a row gains is lost in part where another is luckless, and nearly all of it where rows advance in step."""
    told = Told(0.3, lambda width: 1.0 + 0.05 * width, 0.1)
    speeds = [
        told.window.speed(told.cost.round(1), told.draft_cost, rows=4, advance=advance)
        for advance in (Advance(), Advance(length=32), Advance(lockstep=True))
    ]
    best = [fastest([speed(gamma) for gamma in WINDOWS]) for speed in speeds]
    assert best[0] > 0 and best == sorted(best, reverse=True) and best[2] == 0


def test_it_looks_again_after_giving_up() -> None:
    told = Told(0.0, lambda width: 1.0, 1.0)
    assert 0 < sum(told.choose() for _ in range(100)) < 10


def test_before_anything_was_measured_it_starts_at_its_prior() -> None:
    assert Window().choose(Cost(), DraftCost(), rows=1) == (FIRST, 0.0)


@pytest.mark.parametrize("lengths", [[7], PROMPTS])
def test_auto_gives_plains_text(lengths: list[int]) -> None:
    model, draft = models.llama(), models.llama(num_hidden_layers=1)
    sides = Sides(model, lengths, max_new_tokens=60)
    drafter = DraftModelDrafter(draft)
    assert drafter.config.num_draft_tokens == "auto"
    assert all(torch.equal(sides.ours(drafter), sides.plain) for _ in range(2))


@pytest.mark.parametrize("lengths", [[3], PROMPTS])
@pytest.mark.parametrize("kind", ["draft_model", "disco"])
def test_a_draft_ends_at_an_eos(kind: str, lengths: list[int]) -> None:
    model, width = models.llama(), 16
    sides = Sides(model, lengths, eos_token_id=uneven_eos(model, lengths, at=(6,) * len(lengths)))
    drafter = DraftModelDrafter(model, num_draft_tokens=width)
    if kind == "disco":
        drafter = DiscoDrafter(model, StopClassifier(4, 8), rule="draft", tau=1e-9, max_draft_tokens=width)
    assert torch.equal(sides.ours(drafter), sides.plain)
    assert drafter.last_stats is not None and drafter.last_stats.draft_calls <= 1 + 6


@pytest.mark.parametrize("do_sample", [False, True])
def test_on_an_accelerator_windows_are_chosen_before_they_are_drafted(do_sample: bool, monkeypatch: Any) -> None:
    """Each look at a token would be waited for."""
    monkeypatch.setattr("hf_specdec.drafters.draft_model.drafter.waits", lambda _: True)
    target, drafter = llama(), DraftModelDrafter(llama(seed=1))
    ids, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 30, "do_sample": do_sample, "pad_token_id": 0}
    told = []
    monkeypatch.setattr(Window, "choose", lambda self, *_: told.append(self) or (3, 0.0))
    text = target.generate(ids, **options, assistant_model=drafter)
    assert told and drafter.last_stats.notes == [] and max(drafter.last_stats.verify_widths) == 4
    if not do_sample:
        assert torch.equal(text, target.generate(ids, **options))


def test_what_is_behind_another_rows_mistake_was_not_wrong() -> None:
    """In lockstep a round ends for all rows where one is wrong: of the others' tokens behind nothing is known."""
    verdict = Verdict([0, 1], [4, 4], [2, 1], [[5, 6], [5, 9]], [False, False], 5, 1.0)
    assert sessions.tested(verdict) == [2, 2]
    window = Window()
    window.observe(sessions.tested(verdict), verdict.accepted)
    assert window.accepted == pytest.approx(3 * window.memory + 3)
    assert window.tested == pytest.approx(4 * window.memory + 4)


def test_finished_rows_do_not_keep_others_from_drafting() -> None:
    """Those of a lockstep batch stay in it, and draft nothing."""
    model, prompt = llama(seed=1), torch.tensor([[5, 6, 7]] * 3)
    known = context(
        prompt_ids=prompt,
        prompt_mask=torch.ones_like(prompt),
        vocab_size=VOCAB,
        do_sample=True,
        lockstep=True,
        pick=lambda ids, columns, rows, logits: (logits.argmax(-1), logits.softmax(-1)),
    )
    for width in (1, 1, 2, 2, 5, 5):
        known.cost.observe_forward(3, width, 1.0)
    cost = DraftCost()
    cost.step = 0.01
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.observe(DRAWN, True)
        for step in range(13):
            acceptance.observe(DRAWN._replace(band=step), True)
    session = BudgetedSession(known, model, 6, Own(), cost, acceptance)
    ids = torch.nn.functional.pad(torch.cat([prompt, torch.full((3, 1), 8)], 1), (0, 16))
    with torch.no_grad():
        draft = session.propose(Sequences(ids, [4] * 3, [0, 1, 2], ids[:, :4].tolist()), [9, 0, 9])
    assert draft.lengths[0] == draft.lengths[2] == 6
    assert [len(seen) for seen in session.seen] == draft.lengths  # the last one is learned from, too
