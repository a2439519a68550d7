"""Beam search beside a drafter: transformers' own, with one warning."""

import warnings
from typing import Any

import models
import pytest
import torch

from hf_specdec import DraftModelDrafter, PearlDrafter, PromptLookupDrafter, SpeculationError

MODEL, DRAFT = models.llama(seed=1), models.llama(seed=2)
DRAFTERS = {
    "draft model": lambda: DraftModelDrafter(DRAFT),
    "copies": PromptLookupDrafter,
    "PEARL": lambda: PearlDrafter(DRAFT, worker="thread"),
}


def search(model: Any = MODEL, drafter: Any = None, **options: Any) -> Any:
    asked = {"return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0}
    torch.manual_seed(0)
    return model.generate(
        **models.prompts([9, 5]), assistant_model=drafter, max_new_tokens=12, num_beams=3, **asked | options
    )


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True}, {"num_return_sequences": 2}, {"speculation": {"lenience": 0.5}}], ids=str
)
def test_sequences_and_scores_are_transformers(kind: str, options: dict[str, Any]) -> None:
    plain = search(**{name: value for name, value in options.items() if name != "speculation"})
    drafter = DRAFTERS[kind]()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours = search(drafter=drafter, **options)
    (warning,) = said
    assert "falling back to plain decoding: num_beams=3" in str(warning.message)
    assert torch.equal(ours.sequences, plain.sequences) and torch.equal(ours.sequences_scores, plain.sequences_scores)
    assert drafter.last_stats.mode == "plain" and drafter.last_stats.drafted_tokens == 0


@pytest.mark.parametrize("rule", [{"sampling": "coupled"}, {"forwards": "bitwise"}], ids=str)
def test_rules_that_plain_decoding_does_not_know_are_refused(rule: dict[str, str]) -> None:
    with pytest.raises(SpeculationError, match=r"needs speculation, .*num_beams=3"):
        search(drafter=PromptLookupDrafter(), do_sample=True, speculation=rule)
