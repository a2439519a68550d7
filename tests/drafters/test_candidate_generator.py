"""A session is a transformers `CandidateGenerator`: constructed into transformers' own assisted loop it drives it."""

from typing import Any

import models
import pytest
import torch
import toy_drafters as drafters
from transformers import GenerationMixin
from transformers.generation import CandidateGenerator

from hf_specdec import DraftModelDrafter
from hf_specdec.protocol import DraftContext
from hf_specdec.stats import SpeculationStats
from hf_specdec.verify.picking import DraftPicker
from hf_specdec.verify.processing import Processing
from hf_specdec.verify.randomness import Randomness


def context(prompts: dict[str, torch.Tensor], new: int, do_sample: bool = False) -> DraftContext:
    """What our own loop would tell a session."""
    device = torch.device("cpu")
    return DraftContext(
        prompt_ids=prompts["input_ids"],
        prompt_mask=prompts["attention_mask"],
        max_length=prompts["input_ids"].shape[1] + new,
        vocab_size=models.VOCAB,
        eos_token_ids=frozenset(),
        do_sample=do_sample,
        lockstep=True,
        trees=False,
        pick=DraftPicker(Processing([]), models.VOCAB, do_sample, Randomness(0), device),
        device=device,
        stats=SpeculationStats(),
    )


@pytest.mark.parametrize("kind", ["noisy copy", "draft model"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_transformers_own_loop(monkeypatch: pytest.MonkeyPatch, kind: str, do_sample: bool) -> None:
    model, draft, prompts = models.llama(), models.llama(num_hidden_layers=1), models.prompts([7])
    settings: dict[str, Any] = {"max_new_tokens": 30, "do_sample": do_sample, "top_k": 0}
    plain = model.generate(**prompts, **settings)
    drafter: Any = DraftModelDrafter(draft, num_draft_tokens=4)
    if kind == "noisy copy":
        drafter = drafters.noisy(drafters.Future(plain), 4, models.VOCAB)
    if kind == "noisy copy" and do_sample:
        pytest.skip("transformers' loop wants q of sampled drafts")
    with torch.no_grad():
        session = drafter.start(context(prompts, 30, do_sample))
    assert isinstance(session, CandidateGenerator)
    monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", lambda self, **_: session)
    text = model.generate(**prompts, **settings, assistant_model=draft)
    assert text.shape == plain.shape
    if not do_sample:
        assert torch.equal(text, plain)
