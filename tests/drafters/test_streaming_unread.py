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
from hf_specdec.drafters.streaming.runner import STREAMED, StreamRunner
from hf_specdec.drafters.streaming.tree import likeliest_last
from hf_specdec.protocol import Sequences


@pytest.fixture(scope="module")
def target() -> Any:
    return target_of("Llama")


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("new", [2, 3, 4, 24])
@pytest.mark.parametrize("way", [{"copies": False}, {}, {"tree": "product", "num_candidates": 2}])
def test_how_many_streams_a_forward_has(
    target: Any, batch: str, new: int, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """γ for each of at most four tokens, in a full product for each; none where the texts are full behind it. No clock
    decides whether drafts are made."""
    most = 1 << 20 if "tree" in way else STREAMED
    monkeypatch.setattr("hf_specdec.budget.account.GIVEN", 1 << 30)
    seen: list[tuple[int, int]] = []
    widths: list[int] = []
    honest = StreamRunner.forward

    def forward(self: StreamRunner, tokens: Tensor, *how: Any) -> Any:
        left = new - 1 - (min(self.lengths) + 1 - 9)  # behind each row's last token, which is not in the cache
        widths.clear()
        answer = honest(self, tokens, *how)
        n = tokens.shape[1]
        assert widths[0] == n + (GAMMA * min(n, most) if left > 1 else 0)
        seen.append((left, widths[0]))
        return answer

    sides = compare.Sides(target, BATCHES[batch], max_new_tokens=new)
    drafter = streams_of(target, num_nodes=8, **way)
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


def test_the_likeliest_last_are_the_likeliest_last() -> None:
    """Against every way in which a tree's tokens may be accepted, drawn from what each node's children are given."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        parents, given = [-1], [1.0]
        children = [0]
        while len(parents) < 9:
            parent = int(torch.randint(len(parents), (), generator=generator))
            parents.append(parent)
            children.append(0)
            children[parent] += 1
        for parent in parents[1:]:
            given.append(float(torch.rand((), generator=generator)) / children[parent])
        chances = list(given)
        for i in range(1, 9):
            chances[i] *= chances[parents[i]]
        below = [sum(given[j] for j in range(1, 9) if parents[j] == i) for i in range(9)]
        last = [chances[i] * (1 - below[i]) for i in range(9)]
        assert sum(last) == pytest.approx(1)
        best = sorted(sorted(range(9), key=lambda i: -last[i])[:3])
        assert likeliest_last(chances, parents, range(9), 3) == best
        assert likeliest_last(chances[:4], parents, range(9), 9) == list(range(9))


def test_a_row_whose_last_token_has_no_streams_drafts_copies_alone(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the others theirs: with one node that has streams, and one that they join nearly never."""
    monkeypatch.setattr("hf_specdec.budget.account.GIVEN", 1 << 30)
    monkeypatch.setattr("hf_specdec.drafters.streaming.runner.STREAMED", 1)
    missed = []
    honest = StreamingSession._look

    def look(self: StreamingSession, verdict: Any) -> None:
        honest(self, verdict)
        missed.append(set(verdict.rows) - set(self.rows if self.ends is not None else []))

    monkeypatch.setattr(StreamingSession, "_look", look)
    for batch in BATCHES.values():
        sides = compare.Sides(target, batch)
        for copies in (False, True):
            assert torch.equal(sides.ours(streams_of(target, num_nodes=8, copies=copies)), sides.plain)
    assert any(missed) and not all(missed)
