"""Speculative Streaming: streams that nobody would read are not computed, and a draft does without those."""

from types import SimpleNamespace
from typing import Any

import compare
import models
import pytest
import torch
import toy_drafters as drafters
from stream_models import BATCHES, GAMMA, streams_of, target_of
from torch import Tensor

from hf_specdec.budget import Cost
from hf_specdec.drafters.streaming import StreamingSession
from hf_specdec.drafters.streaming.runner import StreamRunner
from hf_specdec.protocol import Sequences


@pytest.fixture(scope="module")
def target() -> Any:
    return target_of("Llama")


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("new", [2, 3, 4, 24])
def test_a_forward_that_fills_the_texts_has_no_streams(
    target: Any, batch: str, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others have γ for each of their tokens. No clock decides whether they draft."""
    monkeypatch.setattr("hf_specdec.budget.account.GIVEN", 1 << 30)
    seen: list[tuple[int, int]] = []
    widths: list[int] = []
    honest = StreamRunner.forward

    def forward(self: StreamRunner, tokens: Tensor, *how: Any) -> Any:
        left = new - 1 - (min(self.lengths) + 1 - 9)  # behind each row's last token, which is not in the cache
        widths.clear()
        answer = honest(self, tokens, *how)
        assert widths[0] == tokens.shape[1] * (1 + GAMMA if left > 1 else 1)
        seen.append((left, widths[0]))
        return answer

    sides = compare.Sides(target, BATCHES[batch], max_new_tokens=new)
    drafter = streams_of(target, num_nodes=4, copies=False)
    assert torch.equal(sides.ours(drafter), sides.plain)  # the probe is over
    monkeypatch.setattr(StreamRunner, "forward", forward)
    hook = target.model.layers[-1].register_forward_pre_hook(
        lambda _, args, kwargs: widths.append((args[0] if args else kwargs["hidden_states"]).shape[1]), with_kwargs=True
    )
    try:
        assert torch.equal(sides.ours(drafter), sides.plain)
    finally:
        hook.remove()
    assert (seen and seen[-1][0] <= 1) or new == 24


def session_of(target: Any, cost: Cost, **known: Any) -> StreamingSession:
    prompt = torch.ones(1, 3, dtype=torch.long)
    context = drafters.context(target=target, prompt_ids=prompt, prompt_mask=prompt, **known)
    context.cost = cost
    session = streams_of(target).start(context)
    session._runner = SimpleNamespace(rides=False, states=None, kept=None)  # type: ignore[assignment]
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
    rides = []
    for _ in range(4):
        draft = session.propose(text_of([3, 5, 8]), [9])
        rides.append(session._runner.rides)  # type: ignore[union-attr]
        assert not any(draft.lengths)
    assert rides == [True, False, False, False]
    session.context.cost = wide_forwards(0.01)  # type: ignore[assignment]
    assert session.propose(text_of([3, 5, 8]), [9]).lengths == [0] and session._runner.rides  # type: ignore[union-attr]
    session.ends, session.rows = torch.zeros(1, GAMMA, 32), [0]
    assert session.propose(text_of([3, 5, 8]), [9]).lengths == [GAMMA] and session._runner.rides  # type: ignore[union-attr]


@pytest.mark.parametrize("streams", [False, True])
def test_copies_are_drafted_where_there_are_no_streams(target: Any, streams: bool) -> None:
    session = session_of(target, wide_forwards(0.01), trees=True)
    if streams:
        session.ends, session.rows = torch.zeros(1, GAMMA, 32), [0]
    text = models.prompts([6])["input_ids"][0].tolist()
    draft = session.propose(text_of([*text, *text]), [9])
    assert draft.lengths[0] and text[0] in draft.tokens[0].tolist()
    assert any(node is not None for node in session.last.nodes[0]) == streams
    assert session._runner is not None and session._runner.rides
