"""DFlash models as others publish them: what a block is made of, and what cannot be loaded. Their texts, batches and
distributions are in `test_heads.py`."""

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers as tf
from dflash_models import (
    BLOCK,
    CONFIGS,
    DEEPSPEC,
    FULL,
    HIDDEN,
    MASK,
    SLIDING,
    SPECULATORS,
    Reference,
    folder_of,
    published,
    weights,
    write,
)
from head_pairs import drafting_goes_on
from heads_alone import logits_drafted_from
from published import is_refused_as_a_pickle

from hf_specdec import BatchDecoder, DFlashDrafter, Drafter, HybridDrafter, SpeculationError
from hf_specdec.drafters.drawn import Drawn
from hf_specdec.drafters.heads.dflash import DFlashHead

__all__ = ["drafting_goes_on"]
CALL: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_of_a_whole_text_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place's of a block."""
    target, drafter = published(kind)
    reference, rounds = Reference(folder_of(kind)), logits_drafted_from(monkeypatch)
    target.generate(**models.prompts([9]), **CALL, assistant_model=drafter)
    assert len(rounds) > 4 and max(len(logits) for _, logits in rounds) == BLOCK - reference.first
    for text, logits in rounds:
        expected = reference.block(target, text)[: len(logits)]
        torch.testing.assert_close(torch.stack(logits), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("hybrid", [False, True], ids=["alone", "with copies"])
@pytest.mark.parametrize("lengths", [[9], [3, 11, 6, 8]], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_text_is_the_targets(kind: str, lengths: list[int], hybrid: bool) -> None:
    target, head = published(kind)
    drafter = HybridDrafter(head.draft_model) if hybrid else head
    inputs = models.prompts(lengths)
    plain = target.generate(**inputs, **CALL)
    assert torch.equal(target.generate(**inputs, **CALL, assistant_model=drafter), plain)
    stats = drafter.last_stats
    assert stats is not None and stats.draft_calls > 0
    assert not hybrid or any("block_diffusion" in name for name in stats.sources)
    with BatchDecoder(target, drafter, max_rows=2) as decoder:
        rows = [
            ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ]
        answers = [decoder.submit(row, max_new_tokens=12, do_sample=False) for row in rows]
        for answer, text in zip(answers, plain, strict=True):
            assert answer.result(60) == text[-12:].tolist()
    assert not any("dropped" in note for note in decoder.stats.notes), decoder.stats.notes


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_saved_model_is_transformers_own(kind: str, tmp_path: Path) -> None:
    """A drafter's folder holds it in transformers' form, and it drafts the same."""
    target, drafter = published(kind)
    drafter.save_pretrained(tmp_path, target=target)
    inner, inputs = tmp_path / "draft_model", models.prompts([9])
    assert json.loads((inner / "config.json").read_text())["model_type"] == "muse_glimmer_assistant"
    assert isinstance(tf.AutoModel.from_pretrained(inner), tf.MuseGlimmerAssistantModel)
    accepted = []
    for loaded in (drafter, Drafter.from_pretrained(tmp_path)):
        assert torch.equal(target.generate(**inputs, **CALL, assistant_model=loaded), target.generate(**inputs, **CALL))
        heads, config = loaded.draft_model.state_dict(), loaded.draft_model.config
        accepted.append((heads, config.causal_layers, config.input_embedding_scale, config.sliding_window))
    assert accepted[0][1:] == accepted[1][1:]
    assert all(torch.equal(tensor, accepted[1][0][name]) for name, tensor in accepted[0][0].items())


def test_a_flag_names_a_published_model() -> None:
    target, _ = published("full")
    speculation = {"drafter": str(folder_of("full"))}
    inputs = models.prompts([9])
    ours = target.generate(**inputs, **CALL, speculation_type="block_diffusion", speculation=speculation)
    assert torch.equal(ours, target.generate(**inputs, **CALL))


def test_number_formats_and_prefixes(tmp_path: Path) -> None:
    """Weights in half precision stay so, unless asked; names may begin with "model."."""
    write(tmp_path, FULL, {f"model.{name}": tensor.bfloat16() for name, tensor in weights(FULL).items()})
    assert DFlashDrafter.from_pretrained(tmp_path).draft_model.dtype == torch.bfloat16
    assert DFlashDrafter.from_pretrained(tmp_path, dtype="float32").draft_model.dtype == torch.float32


def test_a_table_that_scales_is_read_as_it_is() -> None:
    """Published models read the rows of the target's table, whatever the target makes of them."""
    target, drafter = models.from_config(models.ARCHITECTURES["Gemma3"]()), published("full")[1]
    head, table = object.__new__(DFlashHead), target.get_input_embeddings()
    head.embeddings, head.scale = table, drafter.draft_model.config.input_embedding_scale
    ids = torch.tensor([[3, MASK]])
    assert torch.equal(head._embedded(ids), table.weight[ids])
    assert not torch.equal(head._embedded(ids), table(ids))


def _nested(**changes: Any) -> dict[str, Any]:
    inner = FULL["dflash_config"] | changes
    return FULL | {"dflash_config": {name: value for name, value in inner.items() if value is not None}}


def _without(name: str) -> dict[str, Any]:
    return {key: tensor for key, tensor in weights(FULL).items() if key != name}


BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "layers of another kind": (FULL | {"model_type": "gpt2"}, None, "only qwen3 and llama are supported"),
    "no object": (FULL | {"dflash_config": 5}, None, "it must be an object"),
    "no mask": (_nested(mask_token_id=None), None, "mask_token_id in dflash_config is None"),
    "no layers": (_nested(target_layer_ids=None), None, "target_layer_ids in dflash_config is None"),
    "no layer numbers": (_nested(target_layer_ids=["one"]), None, "it must be a list of the target's layers"),
    "a block of one": (FULL | {"block_size": 1}, None, "block_size is 1"),
    "biases": (FULL | {"attention_bias": True}, None, "attention_bias is True, which is not supported"),
    "other windows": (_nested(use_swa=True), None, "use_swa is True, which is not supported"),
    "no window": (FULL | {"layer_types": ["sliding_attention"] * 2}, None, "sliding_window is None"),
    "a config refused": (FULL | {"hidden_size": "wide"}, None, "does not describe a DFlash model"),
    "no number of its own": (_nested(output_multiplier="much"), None, "does not describe a DFlash model"),
    "too many layers": (SLIDING | {"num_hidden_layers": 99, "layer_types": None}, None, "declares 99 layers"),
    "no states": (SPECULATORS | {"aux_hidden_state_layer_ids": None}, None, "aux_hidden_state_layer_ids is None"),
    "another width": (SPECULATORS | {"target_hidden_size": 64}, None, "target_hidden_size is 64; known: None, 32"),
    "no vocabulary": (SPECULATORS | {"draft_vocab_size": None}, None, "draft_vocab_size is None"),
    "biases of theirs": (SPECULATORS | {"attention_bias": True}, None, "attention_bias is True, which is not"),
    "a selector of less": (_nested(selector_vocab_size=90), None, "selector_vocab_size is 90, which is not supported"),
    "another backbone": (CONFIGS["XPress"] | {"xpress_backbone": "dflash2"}, None, "is 'dflash2'; known: dflash"),
    "an unknown Markov head": (DEEPSPEC | {"markov_head_type": "deep"}, None, "is 'deep'; known: vanilla, gated, rnn"),
    "another family": (
        DEEPSPEC | {"model_type": "gemma4_text"},
        None,
        "of type 'gemma4_text', and only qwen3",
    ),
    "a weight missing": (FULL, _without("hidden_norm.weight"), "lacks the weights hidden_norm.weight"),
    "a weight too many": (FULL, weights(FULL) | {"eyes.weight": torch.ones(2)}, "does not know: eyes.weight"),
    "another shape": (FULL | {"intermediate_size": 52}, None, r"must be F32\[32, 52\]"),
    "no numbers": (FULL, weights(FULL) | {"norm.weight": torch.full((HIDDEN,), torch.nan)}, "holds NaN"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_cannot_be_loaded(what: str, tmp_path: Path) -> None:
    config, tensors, message = BROKEN[what]
    with pytest.raises(SpeculationError, match=message):
        Drafter.from_pretrained(write(tmp_path, config, tensors or weights(FULL)))


def test_a_vocabulary_that_is_not_the_targets(tmp_path: Path) -> None:
    broken = weights(SPECULATORS) | {"d2t": torch.full((40,), models.VOCAB)}
    with pytest.raises(SpeculationError, match="d2t must lead to 40 different tokens from 0 to 96"):
        Drafter.from_pretrained(write(tmp_path, SPECULATORS, broken))
    other = models.llama(vocab=120, num_hidden_layers=4)
    with pytest.raises(SpeculationError, match="was trained with 97 tokens"):
        other.generate(**models.prompts([5]), assistant_model=published("speculators")[1], max_new_tokens=3)


def test_weights_of_the_target_are_left(tmp_path: Path) -> None:
    """A published file may repeat them."""
    told = weights(SPECULATORS) | {"embed_tokens.weight": torch.ones(2), "verifier_norm.weight": torch.ones(2)}
    DFlashDrafter.from_pretrained(write(tmp_path, SPECULATORS, told))


def test_pickles_and_quantizations_are_refused(tmp_path: Path) -> None:
    write(tmp_path, FULL)
    with pytest.raises(SpeculationError, match="is for draft models; a DFlash model is small"):
        Drafter.from_pretrained(tmp_path, quantization="int8")
    is_refused_as_a_pickle(tmp_path)


def test_others_are_not_taken_for_it(tmp_path: Path) -> None:
    """What others may publish one day."""
    with pytest.raises(SpeculationError, match='has no "drafter_type"'):
        Drafter.from_pretrained(write(tmp_path, FULL | {"architectures": ["DFlash3DraftModel"]}))
    with pytest.raises(
        SpeculationError,
        match="is 'newer', which is not supported; known: dflash, dflash2, dspark, eagle3, peagle, xpress",
    ):
        Drafter.from_pretrained(write(tmp_path, SPECULATORS | {"speculators_model_type": "newer"}))


def test_what_else_speaks_for_a_token_stands_for_its_chance() -> None:
    """Of the likeliest one, for the budget; what a token was drawn from at random stays as it is."""
    logits, said = torch.randn(2, 7), torch.tensor([0.25, 0.75])
    likeliest = Drawn(lambda logits, i: tuple(reversed(logits.softmax(-1).topk(3))))
    assert torch.equal(likeliest.draw(logits, said), logits.argmax(-1))
    chances = logits.softmax(-1).topk(3).values
    assert torch.equal(likeliest.all()[1][:, 0], torch.stack([said, chances[:, 1], chances[:, 2]], 1))
    drawn = Drawn(lambda logits, i: (logits.argmax(-1), logits.softmax(-1)))
    drawn.draw(logits, said)
    assert torch.equal(drawn.all()[1][:, 0], logits.softmax(-1))


def test_a_target_that_it_was_not_trained_for(tmp_path: Path) -> None:
    drafter, ids = published("full")[1], models.prompts([5])
    with pytest.raises(SpeculationError, match=r"reads hidden states \[1, 2, 4\], and LlamaForCausalLM has 2 layers"):
        models.llama().generate(**ids, assistant_model=drafter, max_new_tokens=3)
    small = models.llama(vocab=60, num_hidden_layers=4)
    with pytest.raises(SpeculationError, match=r"knows token 95, and LlamaForCausalLM has .* 60 tokens"):
        small.generate(**models.prompts([5], vocab=60), assistant_model=drafter, max_new_tokens=3)
