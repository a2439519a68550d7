"""EAGLE-3 heads: published files, what the chain is made of, and what cannot be loaded. Their texts, batches and
distributions are in `test_heads.py`."""

import json
from pathlib import Path
from typing import Any

import eagle_heads
import models
import pytest
import torch
from eagle_heads import (
    CONFIGS,
    HIDDEN,
    KNOWN,
    SAFEAILAB,
    SPECULATORS,
    VOCAB,
    Reference,
    eagle,
    folder_of,
    weights,
    write,
)
from head_pairs import drafting_goes_on
from heads_alone import logits_drafted_from
from published import is_refused_as_a_pickle
from safetensors.torch import load_file, save_file

from hf_specdec import Drafter, EagleDrafter, HybridDrafter, SpeculationError, SpeculationWarning
from hf_specdec.drafters.heads.eagle_model import LAYER_IDS
from hf_specdec.tools.loading.drafters import own_model

__all__ = ["drafting_goes_on"]
CALL: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_of_a_whole_text_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step's, in the target's vocabulary."""
    target, drafter = eagle(kind)
    reference, rounds = Reference(folder_of(kind)), logits_drafted_from(monkeypatch)
    target.generate(**models.prompts([9]), **CALL, assistant_model=drafter)
    assert len(rounds) > 4 and len(rounds[0][1]) == drafter.config.num_draft_tokens
    for text, logits in rounds:
        expected = torch.stack(reference.chain(target, text, len(logits)))
        torch.testing.assert_close(torch.stack(logits), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_saved_head_is_a_published_one(kind: str, tmp_path: Path) -> None:
    """A drafter's folder holds it in SGLang's format, whatever it was loaded from, and it drafts the same."""
    target, drafter = eagle(kind)
    drafter.save_pretrained(tmp_path, target=target)
    inner = tmp_path / "draft_model"
    content = json.loads((inner / "config.json").read_text())
    assert content["architectures"] == ["LlamaForCausalLMEagle3"] and content["draft_vocab_size"] in (KNOWN, VOCAB)
    names = set(load_file(inner / "model.safetensors"))
    assert {"fc.weight", "midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= names
    drafted = []
    for loaded in (drafter, Drafter.from_pretrained(tmp_path), EagleDrafter.from_pretrained(inner)):
        assert torch.equal(
            target.generate(**models.prompts([9]), **CALL, assistant_model=loaded),
            target.generate(**models.prompts([9]), **CALL),
        )
        state = loaded.draft_model.state_dict()
        drafted.append({name: tensor for name, tensor in state.items()})
        assert loaded.draft_model.states_read(eagle_heads.LAYERS) == Reference(folder_of(kind)).states
    assert all(torch.equal(drafted[0][name], other[name]) for other in drafted[1:] for name in drafted[0])


def test_each_engine_finds_the_states_that_a_head_reads(tmp_path: Path) -> None:
    """Saved with vLLM's numbers, hidden states, and with SGLang's, the layers below these."""
    _, drafter = eagle_heads.eagle("speculators")
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "draft_model" / "config.json").read_text())
    states = config[LAYER_IDS]
    assert states == drafter.draft_model.states_read(eagle_heads.LAYERS)
    assert config["eagle_config"][LAYER_IDS] == [state - 1 for state in states]


def test_nobody_runs_a_head_by_itself() -> None:
    _, drafter = eagle_heads.eagle("speculators")
    assert own_model(drafter) is None and own_model(HybridDrafter(drafter)) is None


def test_a_flag_names_a_published_head() -> None:
    target, _ = eagle("speculators")
    speculation = {"drafter": str(folder_of("speculators")), "num_draft_tokens": 2}
    ours = target.generate(**models.prompts([9]), **CALL, speculation_type="eagle3", speculation=speculation)
    assert torch.equal(ours, target.generate(**models.prompts([9]), **CALL))


def test_number_formats_and_prefixes(tmp_path: Path) -> None:
    """Weights in half precision stay so, unless asked; names may begin with "model."."""
    half = {f"model.{name}": tensor.half() if tensor.is_floating_point() else tensor.int() if name == "d2t" else tensor
            for name, tensor in weights(SAFEAILAB).items()}  # fmt: skip
    write(tmp_path, SAFEAILAB, half)
    assert EagleDrafter.from_pretrained(tmp_path).draft_model.dtype == torch.float16
    loaded = EagleDrafter.from_pretrained(tmp_path, dtype="float32", num_draft_tokens=3)
    assert loaded.draft_model.dtype == torch.float32 and loaded.config.num_draft_tokens == 3
    assert torch.equal(loaded.draft_model.tokens, eagle("SafeAILab")[1].draft_model.tokens)


def _without(name: str) -> dict[str, Any]:
    return {key: tensor for key, tensor in weights(SAFEAILAB).items() if key != name}


TWICE = torch.zeros(KNOWN, dtype=torch.long) - torch.arange(KNOWN)
BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "no mask": (CONFIGS["P-EAGLE"] | {"mask_token_id": None}, None, "mask_token_id is None"),
    "a layer of another kind": (SAFEAILAB | {"model_type": "gpt2"}, None, "only llama and qwen3 are supported"),
    "two layers read": (
        SPECULATORS | {"eagle_aux_hidden_state_layer_ids": [1, 2]},
        None,
        "a list of 3 of the target's layers",
    ),
    "no layer": (SPECULATORS | {"transformer_layer_config": 5}, None, "it must be an object"),
    "a config refused": (SAFEAILAB | {"hidden_size": "wide"}, None, "does not describe an EAGLE-3 head"),
    "quantized": (SAFEAILAB | {"quantization_config": {}}, None, "quantization_config is .*, which is not supported"),
    "too many layers": (SAFEAILAB | {"num_hidden_layers": 10_000}, None, "declares 10000 layers"),
    "a weight missing": (SAFEAILAB, _without("fc.weight"), "lacks the weights fc.weight"),
    "a weight too many": (SAFEAILAB, weights(SAFEAILAB) | {"eyes.weight": torch.ones(2)}, "does not know: eyes.weight"),
    "another shape": (SAFEAILAB | {"intermediate_size": 52}, None, r"must be F32\[32, 52\]"),
    "tokens twice": (SAFEAILAB, weights(SAFEAILAB) | {"d2t": TWICE}, "40 different tokens from 0 to 96"),
    "no number": (SAFEAILAB, weights(SAFEAILAB) | {"norm.weight": torch.full((HIDDEN,), torch.nan)}, "holds NaN"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_cannot_be_loaded(what: str, tmp_path: Path) -> None:
    config, tensors, message = BROKEN[what]
    with pytest.raises(SpeculationError, match=message):
        Drafter.from_pretrained(write(tmp_path, config, tensors or weights(SAFEAILAB)))


def test_pickles_are_refused(tmp_path: Path) -> None:
    write(tmp_path, SAFEAILAB)
    is_refused_as_a_pickle(tmp_path)


def test_a_target_that_it_was_not_trained_for(tmp_path: Path) -> None:
    _, drafter = eagle("SafeAILab")
    ids = models.prompts([5])
    with pytest.raises(SpeculationError, match=r"reads hidden states \[2, 1, -1\], and LlamaForCausalLM has 2 layers"):
        models.llama().generate(**ids, assistant_model=drafter, max_new_tokens=3)
    with pytest.raises(SpeculationError, match=r"states of width 32, and .* of width 64"):
        models.llama(num_hidden_layers=7, hidden_size=64).generate(**ids, assistant_model=drafter, max_new_tokens=3)
    last = write(tmp_path, SPECULATORS | {LAYER_IDS: [1, 3, 7]})
    with pytest.raises(SpeculationError, match="reads hidden state 7, which is at hand behind the target's norm only"):
        eagle_heads.target().generate(**ids, assistant_model=Drafter.from_pretrained(last), max_new_tokens=3)
    with pytest.raises(SpeculationError, match="knows token"):
        models.llama(vocab=60, num_hidden_layers=7).generate(**models.prompts([5], vocab=60), assistant_model=drafter)
    with pytest.raises(SpeculationError, match="is not an EAGLE-3 head"):
        EagleDrafter(models.llama())


def test_what_a_head_says_of_its_target_is_looked_at(tmp_path: Path) -> None:
    """Its last norm tells models apart, and its name only says that it may be another one."""
    norm, ids = eagle_heads.target().model.norm.weight.detach(), models.prompts([5])
    for kept, name, far in ((norm, "org/other", False), (norm.flip(0) * 2, "org/target", True)):
        said = SPECULATORS | {"speculators_config": {"verifier": {"name_or_path": name}}}
        tensors = weights(SPECULATORS) | {"verifier_norm.weight": kept}
        head = Drafter.from_pretrained(write(tmp_path / name, said, tensors))
        target = models.llama(num_hidden_layers=7)
        target.config._name_or_path = "somewhere/target"
        way = pytest.raises if far else pytest.warns
        what = "trained for a model with another last norm" if far else "trained for org/other, and the target is some"
        with way(SpeculationError if far else SpeculationWarning, match=what):
            target.generate(**ids, **CALL, assistant_model=head)


def test_a_target_of_another_width(tmp_path: Path) -> None:
    """The head's own embeddings and `target_hidden_size` are for that."""
    config = CONFIGS["SGLang, its own embeddings"] | {"target_hidden_size": 64}
    tensors = weights(config) | {"fc.weight": torch.randn(HIDDEN, 3 * 64) / 16}
    target = models.llama(num_hidden_layers=7, hidden_size=64)
    drafter = Drafter.from_pretrained(write(tmp_path, config, tensors))
    ours = target.generate(**models.prompts([9, 4]), **CALL, assistant_model=drafter)
    assert torch.equal(ours, target.generate(**models.prompts([9, 4]), **CALL))
    save_file(_without("embed_tokens.weight") | {"fc.weight": tensors["fc.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(SpeculationError, match="has width 32 and no embeddings"):
        target.generate(**models.prompts([9]), **CALL, assistant_model=Drafter.from_pretrained(tmp_path))
