"""Calls as people make them: criteria, stop strings, streamers, `device_map`, static caches, PEARL's workers."""

import contextlib
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import toy_drafters as drafters
from close_drafts import close_to
from compare import PROMPTS, Sides
from every_drafter import drafting_goes_on
from place import DEVICE
from transformers import AutoModelForCausalLM, LogitsProcessor, StoppingCriteria, TextStreamer

from hf_specdec import BatchDecoder, DraftModelDrafter, PearlDrafter, PromptLookupDrafter

PAIR = Path(__file__).parent.parent / "pair"
BATCHES = pytest.mark.parametrize("lengths", [[7], PROMPTS], ids=["one row", "four rows"])


@pytest.fixture(scope="module")
def model() -> Any:
    return models.llama(seed=1).to(DEVICE)


class Enough(StoppingCriteria):
    """Ends a row at a token of the lower half of the vocabulary, from the tenth new one on."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -1] < models.VOCAB // 2) & (input_ids.shape[1] > max(PROMPTS) + 10)


class Shifted(LogitsProcessor):
    """A user's processor, which looks at the text."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + (torch.arange(scores.shape[-1], device=scores.device) == input_ids[:, -1:]) * 2.0


SETTINGS: dict[str, dict[str, Any]] = {
    "criteria": {"stopping_criteria": lambda: [Enough()]},
    "processor": {"logits_processor": lambda: [Shifted()]},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "banned": {"bad_words_ids": [[5], [6, 7]], "suppress_tokens": [11]},
    "end tokens": {"eos_token_id": [3, 17, 40], "pad_token_id": 0},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
}


@BATCHES
@pytest.mark.parametrize("name", SETTINGS)
def test_a_call_is_plains(model: Any, name: str, lengths: list[int]) -> None:
    sides = Sides(model, lengths, **SETTINGS[name])
    with drafting_goes_on():
        ours = sides.ours()
    assert sides.stats.accepted_tokens
    if name != "scores":
        assert torch.equal(ours, sides.plain)
        return
    assert torch.equal(ours.sequences, sides.plain.sequences)
    for ours_at, plain_at in zip(ours.logits, sides.plain.logits, strict=True):
        torch.testing.assert_close(ours_at, plain_at, atol=2e-3, rtol=1e-3)


@BATCHES
def test_stop_strings(model: Any, lengths: list[int]) -> None:
    sides = Sides(model, lengths, stop_strings=["ab", "cd", "ef"], tokenizer=lambda: models.tokenizer(), pad_token_id=0)
    assert torch.equal(sides.ours(), sides.plain)


def test_a_streamer_hears_the_text(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sides = Sides(model, [7], streamer=lambda: TextStreamer(models.tokenizer(), skip_prompt=True))
    plain = capsys.readouterr().out
    assert torch.equal(sides.ours(), sides.plain)
    assert capsys.readouterr().out == plain


def test_a_static_cache(model: Any) -> None:
    """It is served by captured rounds; plain decoding with one is timed elsewhere, as it compiles."""
    sides, captured = Sides(model, [7]), {"forwards": "captured"}
    ours = sides.run(assistant_model=sides.drafter, cache_implementation="static", speculation=captured)
    assert torch.equal(ours, sides.plain)


def test_a_device_map() -> None:
    place = 0 if DEVICE.type == "cuda" else str(DEVICE)
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32, device_map={"": place})
    draft = AutoModelForCausalLM.from_pretrained(PAIR / "draft", dtype=torch.float32, device_map={"": place})
    sides = Sides(model, pad_token_id=1)
    for drafter in (PromptLookupDrafter(), DraftModelDrafter(draft, num_draft_tokens=3)):
        assert torch.equal(sides.ours(drafter), sides.plain)


@pytest.mark.parametrize("where", sorted({str(DEVICE), "cpu"}))
@pytest.mark.parametrize("worker", ["none", "thread", "process"])
def test_a_draft_here_and_on_the_host(model: Any, worker: str, where: str) -> None:
    """With PEARL's worker in a thread, in a process, and with none."""
    draft = close_to(models.llama(seed=1), 0.03).to(where)
    drafter: Any = PearlDrafter(draft, window=3, worker=worker) if worker != "none" else DraftModelDrafter(draft)
    with contextlib.closing(drafter) if worker != "none" else contextlib.nullcontext(), drafting_goes_on():
        for lengths in ([7], PROMPTS):
            sides = Sides(model, lengths, max_new_tokens=40)
            for _ in range(2):
                assert torch.equal(sides.ours(drafter), sides.plain)
                assert drafter.last_stats.accepted_tokens
            sides.run(assistant_model=drafter, do_sample=True, top_k=0)


def test_requests_that_come_and_go(model: Any) -> None:
    rows = [Sides(model, [length]) for length in (9, 5, 1, 7)]
    with BatchDecoder(model, PromptLookupDrafter(num_branches=2), max_rows=3) as decoder:
        answers = [decoder.submit(side.prompts["input_ids"], max_new_tokens=24, do_sample=False) for side in rows]
        for side, answer in zip(rows, answers, strict=True):
            assert torch.equal(torch.tensor(answer.result(60)), side.plain[0, -24:].cpu())


def test_the_drafts_of_a_simple_drafter_may_lie_on_the_host(model: Any) -> None:
    sides = Sides(model, PROMPTS)
    assert torch.equal(sides.ours(drafters.oracle(drafters.Future(sides.plain), 4)), sides.plain)
    assert sides.run(assistant_model=sides.drafter).device == sides.plain.device
