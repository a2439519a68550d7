"""Drafts that begin before the host knows behind what: they are what would have been drafted then."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from traced import traced

from hf_specdec import BatchDecoder, DraftModelDrafter
from hf_specdec.drafters.draft_model.model_draft import ModelDraft

GAMMA, NEW = 4, 60


def disturbed(model: Any) -> Any:
    """The same model with noise on its weights."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * weight.std().nan_to_num(0.1) * torch.randn_like(weight)
    return model


DRAFTS: dict[str, Callable[[], Any]] = {
    "oracle": models.llama,
    "other": lambda: models.llama(seed=1),
    "often right": lambda: disturbed(models.llama()),
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each round of a draft model whether it has taken an early draft."""
    rounds: list[bool] = []
    begin = ModelDraft.begin

    def noted(self: ModelDraft, *args: Any) -> None:
        begin(self, *args)
        rounds.append(self._round is not None and self._round.early)

    monkeypatch.setattr(ModelDraft, "begin", noted)
    return rounds


def decode(
    draft: Any, lengths: list[int], sample: bool, early: bool, target: Any = None, **options: Any
) -> tuple[torch.Tensor, list[int]]:
    """The text, and how many tokens were accepted at each place."""
    drafter = DraftModelDrafter(draft, num_draft_tokens=GAMMA)
    torch.manual_seed(5)
    with pytest.MonkeyPatch.context() as patch:
        if not early:
            patch.setattr(ModelDraft, "drafts_early", False)
        text = (target or models.llama()).generate(
            **models.prompts(lengths), max_new_tokens=NEW, do_sample=sample, pad_token_id=0,
            assistant_model=drafter, speculation={"forwards": "captured"}, **options,
        )  # fmt: skip
        text = getattr(text, "sequences", text)
    stats = drafter.last_stats
    return text, [stats.accepted_per_position[place] for place in range(GAMMA)]


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", [[9], [9, 4, 7]], ids=["one row", "three rows"])
@pytest.mark.parametrize("kind", DRAFTS)
def test_an_early_draft_is_what_would_have_been_drafted_later(
    kind: str, lengths: list[int], sample: bool, taken: list[bool]
) -> None:
    """Draws too: an early one goes by the number of the round that it is for."""
    draft = DRAFTS[kind]()
    late = decode(draft, lengths, sample, early=False)
    assert not any(taken)
    taken.clear()
    early = decode(draft, lengths, sample, early=True)
    assert torch.equal(early[0], late[0]) and early[1] == late[1]
    # Not in the first round, at the text's end, and where a row has left.
    assert sum(taken) >= len(taken) - 3 - GAMMA - len(lengths)


@pytest.mark.grid
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", DRAFTS)
def test_in_lockstep_a_draft_behind_more_than_all_rows_took_is_dropped(
    kind: str, sample: bool, taken: list[bool]
) -> None:
    """One row's disagreement ends the round of all, which the device did not know."""
    draft, scores = DRAFTS[kind](), {"output_scores": True, "return_dict_in_generate": True}
    late = decode(draft, [9, 4, 7], sample, early=False, **scores)
    taken.clear()
    early = decode(draft, [9, 4, 7], sample, early=True, **scores)
    assert torch.equal(early[0], late[0]) and early[1] == late[1]
    assert any(taken) or kind == "other"


def test_where_rows_are_held_back_a_draft_behind_more_is_dropped() -> None:
    draft, target = DRAFTS["often right"](), models.build("GPT-Neo", "eager")
    late = decode(draft, [9, 4, 7], False, early=False, target=target)
    early = decode(draft, [9, 4, 7], False, early=True, target=target)
    assert torch.equal(early[0], late[0]) and early[1] == late[1]


def test_it_is_right_when_it_is_replayed() -> None:
    draft = DRAFTS["often right"]()
    late = decode(draft, [9, 4, 7], False, early=False)
    with traced() as steps:
        early = decode(draft, [9, 4, 7], False, early=True)
        assert steps.played
    assert torch.equal(early[0], late[0]) and early[1] == late[1]


def test_rows_that_come_and_go_do_not_take_each_others_drafts(taken: list[bool]) -> None:
    target, drafter = models.llama(), DraftModelDrafter(DRAFTS["often right"](), num_draft_tokens=GAMMA)
    prompts = [models.prompts([length], seed=length)["input_ids"] for length in (9, 4, 12, 6, 3)]
    news = (50, 20, 34, 27, 41)
    plain = [
        target.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :].tolist()
        for ids, new in zip(prompts, news, strict=True)
    ]
    with BatchDecoder(target, drafter, max_rows=2, forwards="captured") as decoder:
        answers = [
            decoder.submit(ids, max_new_tokens=new, do_sample=False) for ids, new in zip(prompts, news, strict=True)
        ]
        assert [answer.result() for answer in answers] == plain
    assert any(taken) and not all(taken)
