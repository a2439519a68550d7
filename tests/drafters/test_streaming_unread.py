"""Speculative Streaming: streams that nobody would read are not computed, and a draft does without those."""

from types import SimpleNamespace
from typing import Any

import compare
import models
import pytest
import torch
import toy_drafters as drafters
from stream_models import BATCHES, GAMMA, join, never_paused, streams_of, target_of
from torch import Tensor

from hf_specdec.budget import DRAFTED, Cost, Evidence
from hf_specdec.budget.cost import KEPT
from hf_specdec.drafters.streaming import StreamSteps
from hf_specdec.drafters.streaming.late import own_layers
from hf_specdec.drafters.streaming.runner import StreamRunner
from hf_specdec.protocol import Sequences


@pytest.fixture(scope="module")
def target() -> Any:
    return target_of("Llama")


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("new", [2, 3, 4, 24])
@pytest.mark.parametrize("way", [{"copies": False}, {}])
def test_how_many_streams_a_forward_has(
    target: Any, batch: str, new: int, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """γ for each token; none where the texts are full behind it. No clock decides whether drafts are made."""
    join(monkeypatch)
    never_paused(monkeypatch)
    seen: list[tuple[int, int]] = []
    widths: list[int] = []
    honest = StreamRunner.forward

    def forward(self: StreamRunner, tokens: Tensor, *how: Any) -> Any:
        left = new - 1 - (min(self.lengths) + 1 - 9)  # behind each row's last token, which is not in the cache
        widths.clear()
        answer = honest(self, tokens, *how)
        n = tokens.shape[1]
        assert widths[0] == n + (GAMMA * n if left > 1 else 0)
        seen.append((left, widths[0]))
        return answer

    sides = compare.Sides(target, BATCHES[batch], max_new_tokens=new)
    drafter = streams_of(target, num_nodes=8, **way)
    monkeypatch.setattr(StreamRunner, "forward", forward)
    hook = target.model.layers[-1].register_forward_pre_hook(
        models.spy(lambda _, args, kwargs: widths.append((args[0] if args else kwargs["hidden_states"]).shape[1])),
        with_kwargs=True,
    )
    assert torch.equal(sides.ours(drafter), sides.plain)  # the probe is over
    widths.clear()
    try:
        assert torch.equal(sides.ours(drafter), sides.plain)
    finally:
        hook.remove()
    assert not any("dropped" in note for note in drafter.last_stats.notes), drafter.last_stats.notes
    assert (seen and seen[-1][0] <= 1) or new == 24


def session_of(target: Any, cost: Cost, **known: Any) -> Any:
    prompt = torch.ones(1, 3, dtype=torch.long)
    context = drafters.context(target=target, prompt_ids=prompt, prompt_mask=prompt, **known)
    context.cost = cost
    session: Any = streams_of(target).start(context)
    session.steps._runner = SimpleNamespace(rides=False, states=None, kept=None, streams_at=lambda ends: ends)
    return session


def wide_forwards(seconds: float) -> Cost:
    """Of a target that takes 10 ms for one token, and so many seconds for more."""
    cost = Cost()
    for _ in range(9):
        for width, each in ((13, seconds), (7, seconds), (1, 0.01)):
            cost.observe_forward(1, width, each)
    return cost


def text_of(tokens: list[int]) -> Sequences:
    return Sequences(torch.tensor([tokens]), [len(tokens)], [0], [tokens])


def test_behind_a_second_rest_no_draft_is_expected(target: Any) -> None:
    """Chosen unseen, nodes of chains rest where none pays; a draft that does come waits a round for its streams."""
    session = session_of(target, wide_forwards(2.0))
    for _ in range(2):
        session.control.cost.observe(GAMMA, 1e-5, 1e-5)
    rides = []
    for _ in range(4):
        draft = session.propose(text_of([3, 5, 8]), [9])
        rides.append(session.steps._runner.rides)
        assert not any(draft.lengths)
    assert rides == [True, False, False, False]
    session.context.cost = wide_forwards(0.01)
    for _ in range(KEPT + 1):  # for so long it is believed that none pays
        assert session.propose(text_of([3, 5, 8]), [9]).lengths == [0]
    assert session.steps._runner.rides
    session.steps.ends, session.steps.rows = torch.zeros(1, GAMMA, 32), [0]
    assert session.propose(text_of([3, 5, 8]), [9]).lengths == [GAMMA] and session.steps._runner.rides


@pytest.mark.parametrize("streams", [False, True])
def test_copies_are_drafted_where_there_are_no_streams(target: Any, streams: bool) -> None:
    session = session_of(target, wide_forwards(0.01), trees=True)
    if streams:
        session.steps.ends, session.steps.rows = torch.zeros(1, GAMMA, 32), [0]
    text = models.prompts([6])["input_ids"][0].tolist()
    draft = session.propose(text_of([*text, *text]), [9])
    assert draft.lengths[0] and text[0] in draft.tokens[0].tolist()
    assert bool(session.grown[0].own) == streams
    assert session.steps._runner.rides


@pytest.mark.parametrize(
    ("repeats", "alpha", "asked"),
    [(False, 0.5, True), (False, 0.05, False), (True, 0.5, False)],
    ids=["no copies", "no copies, seldom right", "copies"],
)
def test_their_own_pass_is_made_where_it_promises_to_pay(target: Any, repeats: bool, alpha: float, asked: bool) -> None:
    """It takes half a forward: too much for streams that are seldom right, and where a copy stands ready."""
    session = session_of(target, wide_forwards(0.0101), trees=True)
    passes: list[Tensor] = []
    session.steps._runner.streams_at = lambda ends: passes.append(ends) or ends
    for _ in range(2):
        session.control.cost.observe(GAMMA, 0.005, 0.005)
    session.control.account.left = 0.0  # for tries
    for i in range(400):
        session.acceptance.observe(Evidence.of(DRAFTED), (i * alpha) % 1 + alpha >= 1)
    session.steps.ends, session.steps.rows = torch.zeros(1, GAMMA, 32), [0]
    text = list(range(3, 15))
    draft = session.propose(text_of(text * 2 if repeats else text), [9])
    assert bool(passes) == asked and bool(draft.lengths[0]) == (asked or repeats)


@pytest.mark.parametrize("batch", BATCHES)
def test_late_streams_are_those_that_would_have_joined(
    target: Any, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last accepted node of each row, whatever tree was verified; and no forward of the target is wider."""
    monkeypatch.setattr("hf_specdec.budget.account.GIVEN", 1 << 30)
    seen: dict[tuple[int, int], Tensor] = {}  # by row, and how far it is from its end
    honest = StreamSteps.begin

    def begin(self: StreamSteps, sequences: Sequences, *args: Any) -> None:
        honest(self, sequences, *args)
        assert self.ends is not None
        left = [self.context.max_length - length for length in sequences.lengths]
        seen.update(zip(zip(sequences.rows, left, strict=True), self.ends.clone(), strict=True))

    monkeypatch.setattr(StreamSteps, "begin", begin)
    sides = compare.Sides(target, BATCHES[batch])
    late = streams_of(target, num_nodes=8)
    assert torch.equal(sides.ours(late), sides.plain)
    alone = dict(seen)
    seen.clear()
    join(monkeypatch)
    assert torch.equal(sides.ours(streams_of(target, num_nodes=8)), sides.plain)
    both = alone.keys() & seen.keys()
    assert len(both) > 5 * len(BATCHES[batch])
    for place in both:
        torch.testing.assert_close(alone[place], seen[place], atol=1e-4, rtol=1e-3)


@pytest.mark.eager  # streams join captured forwards
def test_late_streams_have_layers_of_their_own_which_follow_the_targets(target: Any) -> None:
    """A copy with the adapters added, made once; another one once the target's weights have changed."""
    model = target_of("Llama")
    drafter = streams_of(model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}

    def own() -> Any:
        return drafter.start(drafters.context(target=model)).steps.own

    first = own()
    assert own() is first and first[1].layers[0] is not model.model.layers[1] and not len(first[0].adapters)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(2)
    again = own()
    assert again is not first and own() is again
    with torch.no_grad():
        model.model.layers[2].input_layernorm.weight.mul_(2)
    assert own() is not again


def test_where_weights_cannot_be_added_to_adapters_stay_beside(target: Any) -> None:
    model = target_of("Llama")
    steps: Any = streams_of(model).start(drafters.context(target=model)).steps
    model.model.layers[1]._hf_hook = object()  # as accelerate leaves on what it moves
    assert own_layers(steps.streams, steps.upper) == (steps.streams, steps.upper)
    del model.model.layers[1]._hf_hook
    linear = model.model.layers[1].mlp.up_proj
    del linear._parameters["weight"]  # as in a layer that holds it in another form
    linear.in_features, linear.out_features = 32, 48
    assert own_layers(steps.streams, steps.upper) == (steps.streams, steps.upper)
