"""Never slower: drafts that gain nothing are paused, and tried again once a hundredth of the rounds has paid for it. By
a clock that stands still but for the target's forwards."""

import random
from typing import Any

import models
import pytest
import torch
import toy_drafters as drafters
from clocks import Clock
from compare import PROMPTS, Sides, sequences_of

from hf_specdec import DraftModelDrafter, HybridDrafter, PearlDrafter, PromptLookupDrafter
from hf_specdec.budget import Cost, Learned
from hf_specdec.budget.account import GIVEN, SAVED, SHARE
from hf_specdec.drafters.trees import MANY
from hf_specdec.engine.drafting import Drafting
from hf_specdec.engine.paying import TRIAL, Paying, Record
from hf_specdec.protocol import Draft
from hf_specdec.target.ragged import RaggedRunner

GAMMA, VOCAB = 5, 97


def both(kind: str, lengths: list[int], slope: float, monkeypatch: Any, calls: int = 1, new: int = 128) -> Any:
    """Seconds of plain decoding, and of each call with a drafter."""
    model = models.llama(max_position_embeddings=256)
    sides = Sides(model, lengths, max_new_tokens=new)
    future = drafters.Future(sequences_of(sides.plain))
    make = {
        "oracle": lambda: drafters.oracle(future, GAMMA),
        "adversary": lambda: drafters.adversary(future, GAMMA, model.config.vocab_size),
        "noisy": lambda: drafters.noisy(future, GAMMA, model.config.vocab_size, noise=0.3),
    }
    drafter: Any = make[kind]()
    sides.ours()  # the probe
    monkeypatch.setattr("hf_specdec.engine.generation._costs", Learned(Cost))
    clock = Clock(monkeypatch)
    with clock.moved_by(model, lambda width: 1 + slope * (width > 1) + 0.01 * width):
        models.probed(model)
        clock.now = 0.0
        sides.run()
        plain, taken = clock.now, []
        for _ in range(calls):
            clock.now = 0.0
            assert torch.equal(sides.ours(drafter), sides.plain)
            taken.append(clock.now)
    return plain, taken, drafter.last_stats


@pytest.mark.grid
@pytest.mark.parametrize("lengths", [[7], PROMPTS], ids=["one row", "four rows"])
@pytest.mark.parametrize("slope", [0.1, 0.25, 1.0])
@pytest.mark.eager  # its clock is moved by the model's own forward
def test_a_drafter_that_is_never_right_costs_little(lengths: list[int], slope: float, monkeypatch: Any) -> None:
    plain, (first, second, third), stats = both("adversary", lengths, slope, monkeypatch, calls=3)
    assert first < plain * (1.02 + 0.03 * slope) and max(second, third) < plain * (1.009 + 0.011 * slope)
    (note,) = stats.notes
    assert "did not pay" in note and "plain decoding was as fast" in note


@pytest.mark.parametrize("lengths", [[7], PROMPTS], ids=["one row", "four rows"])
@pytest.mark.parametrize("kind", ["oracle", "noisy"])
@pytest.mark.eager  # its clock is moved by the model's own forward
def test_a_drafter_that_gains_is_never_paused(kind: str, lengths: list[int], monkeypatch: Any) -> None:
    plain, taken, stats = both(kind, lengths, 0.15, monkeypatch, calls=2)
    assert max(taken) < 0.7 * plain and stats.notes == []


@pytest.mark.parametrize("seed", range(4))
def test_a_drafter_that_gains_a_fifth_is_hardly_paused(seed: int, monkeypatch: Any) -> None:
    """Of a draft of one token each second one is right, and its forward takes a quarter longer: 8 rounds show
    little."""
    model, dice = models.llama(max_position_embeddings=256), random.Random(seed)
    sides = Sides(model, [7], max_new_tokens=200)
    future = drafters.Future(sequences_of(sides.plain))

    def propose(context: Any, sequences: Any, room: list[int]) -> Draft:
        wrong = dice.random() < 0.5
        return Draft.from_lists([[(x + wrong) % VOCAB for x in row] for row in future(sequences, room, 1)])

    drafter, clock, taken = drafters.Toy(propose), Clock(monkeypatch), []
    with clock.moved_by(model, lambda width: 1 + 0.25 * (width > 1)):
        models.probed(model)
        for _ in range(4):
            clock.now = 0.0
            assert torch.equal(sides.ours(drafter), sides.plain)
            taken.append(clock.now)
    assert sum(taken) < 4 * 200 / 1.2 / 0.984


def test_what_gains_nothing_at_first_is_found_out_later(monkeypatch: Any) -> None:
    """Wrong for a third of the text, then right: it comes back."""
    model = models.llama(max_position_embeddings=256)
    sides = Sides(model, [7], max_new_tokens=200)
    future = drafters.Future(sequences_of(sides.plain))

    def propose(context: Any, sequences: Any, room: list[int]) -> Draft:
        wrong = sequences.lengths[0] < 70
        return Draft.from_lists([[(x + wrong) % VOCAB for x in row] for row in future(sequences, room, GAMMA)])

    drafter, clock = drafters.Toy(propose), Clock(monkeypatch)
    with clock.moved_by(model, lambda width: 1 + 0.2 * (width > 1)):
        assert torch.equal(sides.ours(drafter), sides.plain)
    assert clock.now < 130 and drafter.last_stats is not None and drafter.last_stats.notes


@pytest.mark.eager  # its clock is moved by the model's own forward
def test_what_the_user_has_set_is_drafted_whatever_it_costs(monkeypatch: Any) -> None:
    model, draft = models.llama(max_position_embeddings=256), models.llama(seed=3, max_position_embeddings=256)
    sides, drafter = Sides(model, [7], max_new_tokens=60), DraftModelDrafter(draft, num_draft_tokens=4)
    clock = Clock(monkeypatch)
    with clock.moved_by(model, lambda width: float(width)), clock.moved_by(draft, lambda width: 1.0):
        assert torch.equal(sides.ours(drafter), sides.plain)
    stats = drafter.last_stats
    assert stats is not None and stats.notes == []
    assert stats.drafted_per_position[3] >= stats.row_steps - 4 > 8


@pytest.mark.parametrize("slope", [0.05, 0.5])
@pytest.mark.parametrize("lengths", [[9], [9, 9, 9, 9]], ids=["one row", "four rows"])
def test_copies_that_do_not_pay_are_left_out(lengths: list[int], slope: float, monkeypatch: Any) -> None:
    """A text of 8 words is full of short matches that say little."""
    model = models.llama(vocab=8, seed=4, max_position_embeddings=512)
    monkeypatch.setattr("compare.models.prompts", lambda lengths, prompts=models.prompts: prompts(lengths, 8))
    sides, drafter = Sides(model, lengths, max_new_tokens=200), PromptLookupDrafter()
    sides.ours()  # the probe
    monkeypatch.setattr("hf_specdec.engine.generation._costs", Learned(Cost))
    clock = Clock(monkeypatch)
    with clock.moved_by(model, lambda width: 1 + slope * (width - 1)):
        sides.run()
        plain, taken = clock.now, []
        for _ in range(2):
            clock.now = 0.0
            assert torch.equal(sides.ours(drafter), sides.plain)
            taken.append(clock.now)
    assert taken[1] < 1.02 * plain


@pytest.mark.grid
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("window", ["auto", 3])
def test_a_schedule_of_its_own_is_paused_where_plain_rounds_give_more(
    window: Any, sampled: bool, monkeypatch: Any
) -> None:
    """A draft in the background, hardly ever right, that keeps the target waiting. A window of the user's stays."""
    model, draft = models.llama(max_position_embeddings=512), models.llama(seed=3, max_position_embeddings=512)
    sides = Sides(model, [7], max_new_tokens=300, **({"do_sample": True} if sampled else {}))
    drafter, clock, taken = PearlDrafter(draft, window=window, worker="thread"), Clock(monkeypatch), []
    with clock.moved_by(model, lambda width: 1.0), clock.moved_by(draft, lambda width: 0.5):
        for _ in range(3):
            clock.now = 0.0
            text = sides.ours(drafter)
            assert sampled or torch.equal(text, sides.plain)
            taken.append(clock.now)
    stats = drafter.last_stats
    assert stats is not None and stats.target_calls > 100
    assert ([note for note in stats.notes if "did not pay" in note] != []) == (window == "auto")
    assert (taken[-1] < 1.05 * 300) == (window == "auto")


class Unhashable(drafters.Toy):
    """Two of them are equal, as those of a dataclass."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)

    __hash__ = None  # type: ignore[assignment]


def test_a_drafter_that_cannot_be_told_from_others_is_served() -> None:
    sides = Sides(models.llama(), [7])
    future = drafters.Future(sequences_of(sides.plain))
    drafter = Unhashable(lambda context, sequences, room: Draft.from_lists(future(sequences, room, GAMMA)))
    assert torch.equal(sides.ours(drafter), sides.plain) and drafter.last_stats.accepted_tokens


@pytest.mark.parametrize("drawn_costs", [0.0, 5.0])
@pytest.mark.eager  # its clock is moved by the model's own forward
def test_draws_are_not_left_out_by_the_clock(drawn_costs: float, monkeypatch: Any) -> None:
    """With a seed they would give another text."""
    model, texts = models.llama(max_position_embeddings=256), []
    sides = Sides(model, [7], max_new_tokens=100, do_sample=True, top_k=0)
    drafter = drafters.with_logits(lambda last: torch.zeros(len(last), VOCAB), gamma=3)
    sides.ours(drafter)
    clock = Clock(monkeypatch)
    for cost in (0.0, drawn_costs):
        with clock.moved_by(model, lambda width, cost=cost: 1 + cost * (width > 1)):
            torch.manual_seed(0)
            texts.append(sides.ours(drafter))
    assert torch.equal(*texts) and not drafter.last_stats.notes


@pytest.mark.parametrize("survival", [[[]], [[0.9] * 3], [[0.9] * 4] * 2, [[2.0] * 4], [[float("nan")] * 4], "abc", 7])
def test_chances_that_do_not_fit_are_refused(survival: Any) -> None:
    def propose(context: Any, sequences: Any, room: list[int]) -> Draft:
        draft = Draft.from_lists([[1, 2, 3, 4]])
        draft.survival = survival
        return draft

    sides, drafter = Sides(models.llama(), [7]), drafters.Toy(propose)
    with pytest.warns(UserWarning, match="dropped"):
        assert torch.equal(sides.ours(drafter), sides.plain)


@pytest.mark.eager
def test_a_round_in_which_nothing_pays_is_a_plain_one(monkeypatch: Any) -> None:
    """A tree of which no node is left is no tree; one of which a chain is left, a chain."""
    given = []
    forward = RaggedRunner.forward

    def spied(self: Any, tokens: Any, parents: Any = None, counts: Any = None) -> Any:
        given.append((tokens.shape[1], parents))
        return forward(self, tokens, parents, counts)

    monkeypatch.setattr(RaggedRunner, "forward", spied)

    def propose(context: Any, sequences: Any, room: list[int]) -> Draft:
        draft = Draft.from_trees([([1, 2, 3], [-1, 0, -1])])
        draft.survival = [[1e-6] * 3]
        return draft

    sides = Sides(models.llama(), [7], max_new_tokens=40)
    sides.ours()
    given.clear()
    assert torch.equal(sides.ours(drafters.Toy(propose, trees=True)), sides.plain)
    assert sum(width == 1 for width, _ in given) > 20
    assert all(parents is None for width, parents in given if width < 4)


class Slow:
    """Rounds, and a clock that they move: those with drafts by `takes`, plain ones by 1. Each row gets a token either
    way."""

    def __init__(self, takes: float) -> None:
        self.takes, self.now = takes, 0.0
        self.drafted: list[bool] = []
        self.records: dict[int, Record] = {}

    def call(self) -> Paying:
        """One that knows of earlier ones."""
        record = self.records.setdefault
        return Paying(lambda rows: record(rows, Record()), False, own_order=True, clock=lambda: self.now)

    def play(self, call: Paying, rows: int, rounds: int, gained: int = 0) -> None:
        """Rounds with drafts give so many tokens more."""
        for _ in range(rounds):
            self.drafted.append(not call.rests(rows))
            call.observe(rows + gained * self.drafted[-1], fed=self.drafted[-1])
            self.now += self.takes if self.drafted[-1] else 1.0


def test_a_disturbed_round_in_which_nothing_was_drafted_pauses_nothing() -> None:
    """A drafter that finds nothing, on a machine that is slow once."""
    now, record = 0.0, Record()
    call = Paying(lambda rows: record, False, clock=lambda: now)
    for i in range(200):
        call.rests(1)
        call.observe(1, fed=False)
        now += 10.0 if i == 30 else 1.0
    assert not call.paused


def test_what_a_batch_has_lost_is_made_up_for_when_rows_leave_it() -> None:
    """Drafts that triple a round: over all numbers of rows and both calls they lose what the account allows."""
    slow = Slow(3.0)
    for _ in range(2):  # two calls
        call = slow.call()
        for rows in (8, 7, 6, 5, 4, 3, 2):
            slow.play(call, rows, 20)
    assert 0 < 2 * sum(slow.drafted) <= GIVEN + 2 * TRIAL + SHARE * len(slow.drafted)
    slow.takes = 1.0
    slow.play(slow.call(), 1, 9)  # one row has no share in that
    assert slow.drafted[-1]


@pytest.mark.parametrize("before", [0, 40])
def test_what_was_gained_before_may_be_lost_and_no_more(before: int) -> None:
    """Rounds of two tokens that take 1.3 plain ones, and later 2.3."""
    slow = Slow(1.3)
    call = slow.call()
    slow.play(call, 1, before, gained=1)
    assert sum(slow.drafted) >= before - 2
    slow.takes, rounds = 2.3, len(slow.drafted)
    slow.play(call, 1, 200, gained=1)
    paused = slow.drafted.index(False, rounds + 2) - rounds
    assert 0.3 * paused <= (SAVED if before else GIVEN) + 0.3 * (TRIAL + 2)
    assert 0.3 * sum(slow.drafted[rounds:]) <= SAVED + 0.3 * (2 * TRIAL + 1) + SHARE * 200


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("takes", [1.1, 1.5, 3.0, 50.0])
def test_drafts_that_gain_nothing_lose_what_the_account_allows(takes: float, rows: int) -> None:
    """In the long run a hundredth of the time, however much slower rounds with drafts are, and they are still tried."""
    slow = Slow(takes)
    call = slow.call()
    slow.play(call, rows, 300)
    tried = sum(slow.drafted)
    slow.play(call, rows, 3000)
    charged = min(takes - 1, SAVED)
    assert charged * (sum(slow.drafted) - tried) <= SHARE * 3000 + (TRIAL + 1) * charged
    assert sum(slow.drafted) > tried


@pytest.mark.parametrize("rows", [1, 7, 8, 16])
@pytest.mark.eager  # its clock is moved by the model's own forward
def test_in_large_batches_it_is_asked_whether_drafting_pays_at_all(rows: int) -> None:
    """Of a drafter that weighs its drafts by itself, too; but not where rows come and go, or a window was set."""
    prompt = torch.full((rows, 5), 3)
    made = dict(prompt_ids=prompt, prompt_mask=torch.ones_like(prompt), vocab_size=64, trees=True)
    assert PromptLookupDrafter().start(drafters.context(**made)).weighs is (rows < MANY)
    assert DraftModelDrafter(models.llama()).start(drafters.context(**made)).weighs is (rows < MANY)
    assert PromptLookupDrafter().start(drafters.context(**made, most_rows=rows)).weighs
    for made_by in (DraftModelDrafter, HybridDrafter):
        assert made_by(models.llama(), num_draft_tokens=3).start(drafters.context(**made)).weighs


def test_draws_of_which_none_counts_are_draws(monkeypatch: Any) -> None:
    """By the clock they are not left out: a seed would give another text."""
    told, propose, drafted = [], drafters.DrawingSession.propose, Drafting.draft

    def none_of_it(self: Any, *given: Any) -> Draft:
        draft = propose(self, *given)
        draft.lengths, draft.sources = [0] * len(draft.lengths), ["mine"] * len(draft.lengths)
        return draft

    def watched(self: Drafting, *given: Any) -> Draft:
        draft = drafted(self, *given)
        told.append(self.paying is not None and self.paying.draws)
        return draft

    monkeypatch.setattr(drafters.DrawingSession, "propose", none_of_it)
    monkeypatch.setattr(Drafting, "draft", watched)
    drafter = drafters.with_logits(lambda last: torch.zeros(len(last), models.VOCAB), 3)
    options = {"max_new_tokens": 12, "do_sample": True, "eos_token_id": None, "pad_token_id": 0}
    models.llama().generate(**models.prompts([5]), **options, assistant_model=drafter)
    assert told and all(told)
    assert drafter.last_stats.sources["none"] > 0
