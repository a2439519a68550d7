"""`inputs_embeds` as the prompt: drafters that do without its ids draft from what is generated, the others decode
plainly and say so. The text is plain decoding's."""

from typing import Any

import models
import pytest
import torch
import toy_drafters as drafters
import transformers as tf
from torch import Tensor
from transformers import DynamicCache, StaticCache

from hf_specdec import (
    BatchDecoder,
    DraftModelDrafter,
    HybridDrafter,
    PearlDrafter,
    PromptLookupDrafter,
    SpeculationError,
    SpeculationWarning,
    SuffixDrafter,
)
from hf_specdec.target.inputs import CACHE

NAMES = ["Llama", "Qwen2 sliding", "GPT-2", "OPT", "Phi-3", "Falcon ALiBi", "DeepSeek-V3", "LFM2", "Qwen3-Next"]
WAYS: dict[str, dict[str, Any]] = {
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "length": {"max_length": 30, "max_new_tokens": None},
    "end": {"eos_token_id": list(range(0, models.VOCAB, 7))},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


def call(model: Any, lengths: list[int], ids: bool = False, **options: Any) -> dict[str, Any]:
    """A greedy call whose prompt is embeddings; its ids may come along."""
    prompts = models.prompts(lengths)
    embeds = model.get_input_embeddings()(prompts["input_ids"]).detach()
    prompt = prompts if ids else {"attention_mask": prompts["attention_mask"]}
    return {**prompt, "inputs_embeds": embeds, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0} | options


def text(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.sequences


def drafted(drafter: Any) -> bool:
    """Whether it was asked to the end."""
    return drafter.last_stats.mode != "plain" and not [note for note in drafter.last_stats.notes if "dropped" in note]


def toys(plain: Tensor) -> list[Any]:
    future = drafters.Future(plain)
    return [drafters.noisy(future, 5, models.VOCAB), drafters.bushy(future, 5, models.VOCAB)]


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("ids", [False, True], ids=["embeddings", "ids beside them"])
@pytest.mark.parametrize("lengths", [[7], [9, 5]], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_any_model(name: str, lengths: list[int], ids: bool) -> None:
    model = models.build(name)
    said = call(model, lengths, ids)
    plain = model.generate(**said)
    for drafter in (*toys(plain), PromptLookupDrafter(), SuffixDrafter()):
        assert torch.equal(model.generate(**said, assistant_model=drafter), plain)
        assert drafted(drafter)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ids", [False, True], ids=["embeddings", "ids beside them"])
def test_any_option(ids: bool, way: str) -> None:
    model = models.build("Llama")
    said = call(model, [9, 5], ids) | WAYS[way]
    plain = model.generate(**said)
    drafter = toys(text(plain))[0]
    ours = model.generate(**said, assistant_model=drafter)
    assert torch.equal(text(ours), text(plain)) and drafter.last_stats.accepted_tokens > 0
    if way == "scores":
        for a, b in zip(ours.logits, plain.logits, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_ids_of_another_number_than_the_embeddings() -> None:
    model = models.build("Llama")
    for ids in ([3], list(range(3, 20))):
        said = call(model, [7]) | {"input_ids": torch.tensor([ids])}
        plain = model.generate(**said)
        for drafter in (toys(plain)[0], PromptLookupDrafter(), DraftModelDrafter(models.small(models.VOCAB))):
            assert torch.equal(model.generate(**said, assistant_model=drafter), plain)


@pytest.mark.parametrize("ids", [False, True], ids=["embeddings", "ids beside them"])
def test_rotary_embeddings_that_change_behind_the_prompt(ids: bool) -> None:
    """Embeddings without ids count, too, where it is asked how long the text becomes."""
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    sizes = models.SIZES | {"max_position_embeddings": 128}
    config = tf.Phi3Config(
        **sizes, rope_parameters=scaling | {"original_max_position_embeddings": 32}, original_max_position_embeddings=32
    )
    model = models.from_config(config)
    said = call(model, [24], ids, max_new_tokens=30)
    plain = model.generate(**said)
    drafter = toys(plain)[0]
    with pytest.warns(SpeculationWarning, match="rotary embeddings change"):
        assert torch.equal(model.generate(**said, assistant_model=drafter), plain)


def test_a_static_cache_that_holds_the_ids_and_not_the_embeddings() -> None:
    model = models.build("Llama")
    said = call(model, [24]) | {"max_new_tokens": 10}
    cache = StaticCache(config=model.config, max_cache_len=33)
    drafter = PromptLookupDrafter()
    ours = model.generate(**said, **{CACHE: cache}, disable_compile=True, assistant_model=drafter)
    assert torch.equal(ours, model.generate(**said)) and drafted(drafter)


def test_a_continued_cache() -> None:
    model = models.build("Llama")
    said, outputs = call(model, [12]), []
    for drafter in (None, PromptLookupDrafter()):
        cache = DynamicCache(config=model.config)
        first = {"inputs_embeds": said["inputs_embeds"][:, :5], "attention_mask": said["attention_mask"][:, :5]}
        with torch.no_grad():
            model(**first, **{CACHE: cache})
        outputs.append(model.generate(**said, **{CACHE: cache}, assistant_model=drafter))
    assert torch.equal(*outputs)


def test_coupled_draws_are_those_of_any_drafter() -> None:
    model = models.build("Llama")
    said = call(model, [9, 5], do_sample=True, num_return_sequences=2, speculation={"sampling": "coupled"})
    texts = []
    for drafter in ({"speculation_type": "none"}, {"assistant_model": PromptLookupDrafter()}):
        torch.manual_seed(5)
        texts.append(model.generate(**said, **drafter))
    assert torch.equal(*texts)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_hybrid_copies_and_its_draft_model_is_not_asked(sampled: bool) -> None:
    model, draft = models.build("Llama"), models.small(models.VOCAB)
    drafter = HybridDrafter(draft)
    said, asked = call(model, [9, 5], do_sample=sampled), list[Any]()
    with models.hooked(draft, asked.append, before=True):
        ours = model.generate(**said, assistant_model=drafter)
    assert not asked and drafted(drafter)
    assert sampled or torch.equal(ours, model.generate(**said))


@pytest.mark.parametrize("kind", [DraftModelDrafter, PearlDrafter])
def test_a_draft_model_reads_ids_and_says_so(kind: Any) -> None:
    model, drafter = models.build("Llama"), kind(models.small(models.VOCAB))
    said = call(model, [9, 5])
    with pytest.warns(SpeculationWarning, match="plain decoding: .* needs token ids, and the prompt is inputs_embeds"):
        ours = model.generate(**said, assistant_model=drafter)
    assert torch.equal(ours, model.generate(**said)) and drafter.last_stats.mode == "plain"
    assert torch.equal(model.generate(**call(model, [9, 5], ids=True), assistant_model=drafter)[:, 9:], ours)
    assert drafted(drafter)


def test_beams_decode_plainly() -> None:
    model, drafter = models.build("Llama"), DraftModelDrafter(models.small(models.VOCAB))
    said = call(model, [9, 5], num_beams=3)
    with pytest.warns(SpeculationWarning, match="plain decoding: num_beams=3"):
        assert torch.equal(model.generate(**said, assistant_model=drafter), model.generate(**said))
    assert drafter.last_stats.mode == "plain" and drafter.last_stats.emitted_tokens == 40
    with pytest.raises(SpeculationError, match="sampling='coupled'"):
        model.generate(**said | {"do_sample": True}, speculation={"sampling": "coupled"}, assistant_model=drafter)


def test_an_encoder_reads_embeddings() -> None:
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    config = tf.T5Config(**sizes, vocab_size=models.VOCAB, decoder_start_token_id=0, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    model: Any = tf.T5ForConditionalGeneration(config).eval()
    said = call(model, [9, 5])
    plain = model.generate(**said)
    for drafter in (toys(plain)[0], PromptLookupDrafter()):
        assert torch.equal(model.generate(**said, assistant_model=drafter), plain)
    with pytest.warns(SpeculationWarning, match="reads input_ids, which was not passed to generate"):
        drafter = DraftModelDrafter(model)
        assert torch.equal(model.generate(**said, assistant_model=drafter), plain)
    hybrid = HybridDrafter(model)
    assert torch.equal(model.generate(**said, assistant_model=hybrid), plain) and drafted(hybrid)


def test_where_texts_come_and_go_they_come_as_ids() -> None:
    model = models.build("Llama")
    with BatchDecoder(model, PromptLookupDrafter()) as decoder, pytest.raises(SpeculationError, match="inputs_embeds"):
        decoder.submit([3, 4], **call(model, [7]))
