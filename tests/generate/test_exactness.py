"""What may be left out of a draft (docs/how-it-works.md): of draws nothing that depends on the token drawn there, of
point masses anything. 3,000 rows; the planted violation is off by a factor that is caught far below 1e-6."""

import random
from typing import Any

import pytest
from continuations import SMALL, sampling_p_value
from models import llama

from hf_specdec.budget import DraftCost
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.chains import ChainSession
from hf_specdec.drafters.draft_model import ModelDraft
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.drafters.sources import Copies
from hf_specdec.drafters.steps import Step
from hf_specdec.protocol import DraftContext, Verdict
from hf_specdec.session import DraftSession


class Three:
    """Chains of three tokens at most."""

    weighs, planned = True, False

    def begin(self, *_: Any) -> int:
        return 3

    def lengths(self, i: int, step: Step, lengths: list[int]) -> list[int]:
        return lengths

    def observe(self, verdict: Verdict, kept: list[int]) -> None:
        """It learns nothing."""

    def notes(self) -> list[str]:
        return []


class ByEarlierDraws(Three):
    """Goes on by what has been drawn: the draw that is looked at stays."""

    def lengths(self, i: int, step: Step, lengths: list[int]) -> list[int]:
        return [min(n, i + 1) if token % 2 else n for n, (token,) in zip(lengths, step.tokens.tolist(), strict=True)]


class ByItsOwnDistribution(Three):
    """Goes on where the draft was sure of the token before it was drawn."""

    def lengths(self, i: int, step: Step, lengths: list[int]) -> list[int]:
        sure = step.q.amax(-1).tolist()
        return [n if chance > 0.3 else min(n, i + 1) for n, chance in zip(lengths, sure, strict=True)]


class LeavesOutWhatItHasDrawn(Three):
    """The violation: a draw is looked at, and then not tested."""

    def lengths(self, i: int, step: Step, lengths: list[int]) -> list[int]:
        return [min(n, i) if token % 2 else n for n, (token,) in zip(lengths, step.tokens.tolist(), strict=True)]


class Drawing(Drafter):
    def __init__(self, rule: type[Three]) -> None:
        super().__init__()
        self.rule, self.model = rule, llama(vocab=SMALL, seed=1)

    def start(self, context: DraftContext) -> DraftSession:
        return ChainSession(context, ModelDraft(context, self.model, DraftCost()), self.rule())


@pytest.mark.parametrize("rule", [ByEarlierDraws, ByItsOwnDistribution])
def test_whether_to_draw_another_may_depend_on_all_but_that_draw(rule: Any) -> None:
    assert sampling_p_value(Drawing(rule), {}) > 1e-3


def test_a_draw_that_is_left_out_for_what_it_is_is_caught() -> None:
    assert sampling_p_value(Drawing(LeavesOutWhatItHasDrawn), {}) < 1e-6


@pytest.mark.parametrize("by_token", [False, True], ids=["at random", "by the token"])
@pytest.mark.usefixtures("width_costs_nothing")
def test_point_masses_may_be_left_out_for_any_reason(by_token: bool, monkeypatch: Any) -> None:
    dice, join = random.Random(0), Copies.join

    def joined(self: Any, trees: Any, sequences: Any, room: list[int]) -> None:
        join(self, trees, sequences, room)
        for tree in trees:
            tree.chances = [token % 2 if by_token else dice.random() for token in tree.tokens]

    monkeypatch.setattr(Copies, "join", joined)
    assert sampling_p_value(PromptLookupDrafter(num_branches=2), {}) > 1e-3
