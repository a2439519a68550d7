"""Every drafter on the device: greedy text is plain decoding's, and coupled sampling has one text for one seed."""

from typing import Any

import models
import pytest
import torch
from every_drafter import PAIRS, drafting_goes_on
from place import DEVICE

BATCHES = pytest.mark.parametrize("lengths", [[9], [9, 5, 1, 7]], ids=["one row", "four rows"])
NEW = 32


def text(target: Any, drafter: Any, lengths: list[int], **options: Any) -> torch.Tensor:
    vocab = target.config.get_text_config(decoder=True).vocab_size
    prompts = {name: ids.to(DEVICE) for name, ids in models.prompts(lengths, vocab).items()}
    options = {"max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None} | options
    torch.manual_seed(0)
    with drafting_goes_on():
        return target.generate(**prompts, **options, assistant_model=drafter)


@BATCHES
@pytest.mark.parametrize("kind", PAIRS)
def test_greedy_text_is_plains(kind: str, lengths: list[int]) -> None:
    target, drafter = PAIRS[kind]()
    plain = text(target, None, lengths, do_sample=False)
    for _ in range(2):
        assert torch.equal(text(target, drafter, lengths, do_sample=False), plain)
    assert drafter.last_stats.drafted_tokens, "nothing was drafted"


@BATCHES
@pytest.mark.parametrize("kind", PAIRS)
def test_one_seed_is_one_text(kind: str, lengths: list[int]) -> None:
    """Of coupled sampling, with the drafter and without."""
    target, drafter = PAIRS[kind]()
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "speculation": {"sampling": "coupled"}}
    assert torch.equal(text(target, drafter, lengths, **options), text(target, None, lengths, **options))


@BATCHES
@pytest.mark.parametrize("kind", PAIRS)
def test_independent_sampling_runs(kind: str, lengths: list[int]) -> None:
    """Its distribution is tested where the vocabulary is small; here no drafter is dropped."""
    target, drafter = PAIRS[kind]()
    sampled = text(target, drafter, lengths, do_sample=True, top_k=8, temperature=1.3)
    assert sampled.shape == (len(lengths), max(lengths) + NEW)
    assert drafter.last_stats.drafted_tokens, "nothing was drafted"
