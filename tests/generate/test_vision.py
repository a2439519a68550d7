"""Targets that see: LLaVA, Qwen2-VL, Gemma 3 and SmolVLM kinds, whose prompts hold images, with drafts of text."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import toy_drafters as drafters
import transformers as tf

from hf_specdec import BatchDecoder, DraftModelDrafter, HybridDrafter, PromptLookupDrafter
from hf_specdec.engine import call
from hf_specdec.target.probe import Support, ability

VOCAB, IMAGE = 64, 5
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
SEEING: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
QWEN: dict[str, Any] = {
    "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
MAKES: dict[str, Callable[[], Any]] = {
    "LLaVA": lambda: tf.LlavaForConditionalGeneration(
        tf.LlavaConfig(
            vision_config=tf.CLIPVisionConfig(**SEEING, patch_size=8),
            text_config=tf.LlamaConfig(**TEXT),
            image_token_index=IMAGE,
            vision_feature_layer=-1,
        )
    ),
    "Qwen2-VL": lambda: tf.Qwen2VLForConditionalGeneration(
        tf.Qwen2VLConfig(
            text_config=TEXT | {"rope_parameters": MROPE},
            vision_config=QWEN,
            image_token_id=IMAGE,
            video_token_id=4,
            vision_start_token_id=3,
            vision_end_token_id=2,
        )
    ),
    "Gemma 3": lambda: tf.Gemma3ForConditionalGeneration(
        tf.Gemma3Config(
            text_config=TEXT | {"head_dim": 8, "sliding_window": 64},
            vision_config=SEEING | {"patch_size": 4},
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
            boi_token_index=3,
            eoi_token_index=4,
        )
    ),
    "SmolVLM": lambda: tf.SmolVLMForConditionalGeneration(
        tf.SmolVLMConfig(
            text_config=tf.LlamaConfig(**TEXT),
            vision_config=SEEING | {"patch_size": 4},
            image_token_id=IMAGE,
            scale_factor=2,
            pad_token_id=0,
        )
    ),
}


def build(name: str) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = MAKES[name]().eval()
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0.0, 3.0 / weight.shape[-1] ** 0.5)
        for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            table.normal_()
    return model


def inputs(name: str, rows: int) -> dict[str, Any]:
    """A prompt with an image in it, four tokens of it, for every row."""
    dice = torch.Generator().manual_seed(1)
    ids = torch.randint(6, VOCAB, (rows, 14), generator=dice)
    ids[:, 1], ids[:, 2:6], ids[:, 6] = 3, IMAGE, 2
    pixels: dict[str, Any] = {"pixel_values": torch.randn(rows, 3, 16, 16, generator=dice)}
    if name == "Qwen2-VL":
        pixels = {"pixel_values": torch.randn(16 * rows, 96, generator=dice)}
        pixels |= {"image_grid_thw": torch.tensor([[1, 4, 4]] * rows), "mm_token_type_ids": (ids == IMAGE).long()}
    elif name == "Gemma 3":
        pixels["token_type_ids"] = (ids == IMAGE).long()
    elif name == "SmolVLM":
        pixels["pixel_values"] = pixels["pixel_values"][:, None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | pixels


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MAKES)
def test_the_text_is_plain_decodings(name: str, rows: int) -> None:
    model, draft = build(name), models.llama(vocab=VOCAB)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**inputs(name, rows), **options)
    other = inputs(name, rows)
    other["pixel_values"] = -other["pixel_values"]
    with torch.no_grad():
        seen, seen_otherwise = model(**inputs(name, rows)).logits, model(**other).logits
    assert not torch.allclose(seen, seen_otherwise, atol=1e-3), "the image is not seen"
    for drafter in (
        drafters.noisy(drafters.Future(plain), 4, VOCAB),
        PromptLookupDrafter(),
        DraftModelDrafter(draft, num_draft_tokens=3),
        HybridDrafter(draft, num_draft_tokens=3),
    ):
        assert torch.equal(model.generate(**inputs(name, rows), **options, assistant_model=drafter), plain)
        assert drafter.last_stats.mode != "plain"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MAKES)
def test_what_is_right_saves_calls(name: str) -> None:
    model = build(name)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    oracle = drafters.oracle(drafters.Future(model.generate(**inputs(name, 1), **options)), 4)
    model.generate(**inputs(name, 1), **options, assistant_model=oracle)
    assert oracle.last_stats.target_calls <= 6


def said(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A text alone, as processors of such models give it, in rows of several lengths; and options of a call."""
    given = models.prompts([9, 4, 7], VOCAB)
    given["input_ids"] = given["input_ids"].clamp_min(6) * given["attention_mask"]
    if kind := {"Gemma 3": "token_type_ids", "Qwen2-VL": "mm_token_type_ids"}.get(name):
        given[kind] = torch.zeros_like(given["input_ids"])
    return given, {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("name", MAKES)
def test_text_alone_is_decoded_as_by_a_model_of_text(name: str) -> None:
    """That no token is an image, and that no image was encoded, says nothing. Qwen's positions have several axes."""
    model, (given, options) = build(name), said(name)
    plain = model.generate(**given, **options)
    drafter = drafters.noisy(drafters.Future(plain), 4, VOCAB)
    assert torch.equal(model.generate(**given, **options, assistant_model=drafter), plain)
    assert drafter.last_stats is not None
    assert drafter.last_stats.mode == ("lockstep" if name == "Qwen2-VL" else "ragged")
    if name == "Qwen2-VL":
        return
    with BatchDecoder(model, PromptLookupDrafter(), max_rows=2) as decoder:
        answers = []
        for b, mask in enumerate(given["attention_mask"].bool()):
            types = {kind: given[kind][b, mask][None] for kind in given if kind.endswith("token_type_ids")}
            answers.append(decoder.submit(given["input_ids"][b, mask].tolist(), **options, **types))
        for answer, text in zip(answers, plain, strict=True):
            assert answer.result(60) == text[-20:].tolist()


@pytest.mark.parametrize("lengths", [[9], [9, 5, 1, 7]], ids=str)
@pytest.mark.parametrize("types", [0, 1])
def test_types_that_a_model_of_text_embeds_are_read_in_every_forward(types: int, lengths: list[int]) -> None:
    """Zeros, too: they add a vector."""
    model, inputs = models.build("GPT-2"), models.prompts(lengths)
    inputs["token_type_ids"] = torch.full_like(inputs["input_ids"], types)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**inputs, **options)
    drafter = drafters.noisy(drafters.Future(plain), 4, models.VOCAB)
    assert torch.equal(model.generate(**inputs, **options, assistant_model=drafter), plain)
    assert not torch.equal(model.generate(**inputs | {"token_type_ids": None}, **options), plain)


def test_rows_with_positions_of_several_axes_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with attention that takes no masks, where rows get ahead of each other over a runner of equal ones."""
    model, (given, options) = build("Qwen2-VL"), said("Qwen2-VL")
    monkeypatch.setattr(call, "ability", lambda of: ability(of)._replace(support=Support.LOCKSTEP, why="is so here"))
    options["eos_token_id"] = int(model.generate(**given, **options)[0, -12])
    plain = model.generate(**given, **options)
    drafter = drafters.noisy(drafters.Future(plain), 4, VOCAB)
    assert torch.equal(model.generate(**given, **options, assistant_model=drafter), plain)
    assert drafter.last_stats is not None and drafter.last_stats.mode == "staggered"
