"""`export --to speculators`: our reader, a reference that reads the files alone, and the package itself agree on it."""

import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import eagle_heads
import models
import pytest
import torch
from eagle_heads import CONFIGS, KNOWN, VOCAB, Reference, eagle, folder_of
from safetensors.torch import load_file
from transformers import DynamicCache, PreTrainedConfig

from hf_specdec import Drafter, EagleDrafter, SpeculationError
from hf_specdec.serve.export import export_drafter

CALL: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
EAGLE3 = [kind for kind in CONFIGS if kind != "P-EAGLE"]
TEXT = models.prompts([9])["input_ids"][0].tolist()
KEYS = {
    "speculators_model_type",
    "speculators_version",
    "speculators_config",
    "architectures",
    "transformer_layer_config",
    "draft_vocab_size",
    "norm_before_residual",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
}
"""of speculators 0.9.0's `Eagle3SpeculatorConfig`"""
TRAINING = {"embed_requires_grad"}
"""a field of it that only its own training reads"""
TRANSFORMERS = {"dtype", "tie_word_embeddings"}


def exported(kind: str, folder: Path, named: bool = True) -> Path:
    """A drafter of ours, saved for its target, in the format of speculators."""
    target, drafter = eagle(kind)
    drafter.save_pretrained(folder / "drafter", target=target)
    if named:
        content = json.loads((folder / "drafter" / "config.json").read_text())
        content["target"]["name"] = "org/target"
        (folder / "drafter" / "config.json").write_text(json.dumps(content))
    command = shlex.split(export_drafter(str(folder / "drafter"), "speculators", folder / "out"))
    assert command[:4] == ["vllm", "serve", "org/target" if named else "your/target", "--speculative-config"]
    settings = {"method": "eagle3", "model": str(folder / "out"), "num_speculative_tokens": 3}
    assert json.loads(command[4]) == settings and len(command) == 5
    return folder / "out"


@torch.no_grad()
def logits(head: Any, target: Any) -> torch.Tensor:
    """[T, K] at each place of a text."""
    ids = torch.tensor([TEXT])
    e = head.embed_tokens or target.get_input_embeddings()
    width = len(TEXT) - 1
    mask = torch.full((1, 1, width, width), torch.finfo(torch.float32).min).triu(1)
    g = head.fused(states(head, target, ids[:, :-1]))
    _, normed = head(g, e(ids[:, 1:]), torch.arange(width)[None], mask, DynamicCache())
    return head.lm_head(normed)[0]


@torch.no_grad()
def states(head: Any, target: Any, ids: torch.Tensor) -> torch.Tensor:
    """[1, T, 3 H], what the head reads of its target."""
    hidden = target(ids, output_hidden_states=True).hidden_states
    return torch.cat([hidden[i] for i in head.states_read(eagle_heads.LAYERS)], dim=-1)


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("kind", EAGLE3)
def test_it_loads_back_with_the_same_logits(kind: str, tmp_path: Path) -> None:
    """By the files alone, and by our loader."""
    target, drafter = eagle(kind)
    folder = exported(kind, tmp_path)
    said = Reference(folder_of(kind)).chain(target, TEXT, 3)
    assert torch.equal(torch.stack(Reference(folder).chain(target, TEXT, 3)), torch.stack(said))
    loaded = Drafter.from_pretrained(folder, num_draft_tokens=3)
    assert all(torch.equal(loaded.draft_model.state_dict()[n], t) for n, t in drafter.draft_model.state_dict().items())
    assert torch.equal(*(logits(found.draft_model, target) for found in (loaded, drafter)))
    ours = target.generate(**models.prompts([9]), **CALL, assistant_model=loaded)
    assert torch.equal(ours, target.generate(**models.prompts([9]), **CALL))


@pytest.mark.parametrize("kind", EAGLE3)
def test_its_names(kind: str, tmp_path: Path) -> None:
    found = config(folder := exported(kind, tmp_path))
    assert set(found) == KEYS | TRANSFORMERS
    assert found["speculators_model_type"] == "eagle3" and found["draft_vocab_size"] in (KNOWN, VOCAB)
    assert found["speculators_config"] == {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "org/target", "architectures": []},
    }
    layer = found["transformer_layer_config"]
    assert layer["model_type"] in ("llama", "qwen3") and KEYS.isdisjoint(layer) and "eagle_config" not in layer
    names = set(load_file(folder / "model.safetensors"))
    assert {"layers.0.hidden_norm.weight", "fc.weight", "norm.weight", "lm_head.weight"} <= names
    assert not [name for name in names if name.startswith("midlayer.")]
    assert ({"d2t", "t2d"} <= names) == (found["draft_vocab_size"] < VOCAB)


def test_one_in_that_format_already_is_copied(tmp_path: Path) -> None:
    source = folder_of("speculators")
    assert str(source) in export_drafter(str(source), "speculators")
    export_drafter(str(source), "speculators", tmp_path / "out")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    with pytest.raises(SpeculationError, match="not in the format of speculators; name a new folder"):
        export_drafter(str(folder_of("SafeAILab")), "speculators")
    with pytest.raises(SpeculationError, match="holds a P-EAGLE head, which is not exported"):
        export_drafter(str(folder_of("P-EAGLE")), "speculators")


# ------------------------------------------------------------------ the package, where it is installed

needs_speculators = pytest.mark.skipif(
    find_spec("speculators") is None, reason="speculators is not installed; it pins transformers"
)


@needs_speculators
@pytest.mark.parametrize("kind", EAGLE3)
def test_the_package_drafts_the_same_tokens(kind: str, tmp_path: Path) -> None:
    """Its own config class takes every key, its own model every weight, and says the same at each place of a text."""
    from speculators import SpeculatorModelConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    target, folder = eagle_heads.target(), exported(kind, tmp_path, named=False)
    found = SpeculatorModelConfig.from_pretrained(folder)
    assert type(found) is Eagle3SpeculatorConfig
    fields = set(Eagle3SpeculatorConfig.model_fields) - set(PreTrainedConfig().to_dict())
    assert fields == KEYS - {"architectures"} | TRAINING
    found.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(found)
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not unexpected and set(missing) <= set(Eagle3DraftModel._keys_to_ignore_on_load_missing)
    if "embed_tokens.weight" in missing:
        model.embed_tokens.weight = target.get_input_embeddings().weight
    ids, head = torch.tensor([TEXT]), EagleDrafter.load_model(folder)
    with torch.no_grad():
        read = states(head, target, ids[:, :-1])
        (said,) = model(read, ids[:, 1:], torch.zeros_like(ids[:, 1:]), ttt_steps=1)
    assert torch.equal(said[0], logits(head, target).argmax(-1))


@needs_speculators
def test_the_format_has_no_type_for_our_other_drafters() -> None:
    """The refusals of `--to speculators` are true of the package's own config classes."""
    from speculators import SpeculatorModelConfig

    known = set(SpeculatorModelConfig.registry or {})
    assert "eagle3" in known and known.isdisjoint({"independent", "draft_model", "ngram", "prompt_lookup", "suffix"})
    for kind in ("independent", "draft_model"):
        with pytest.raises(ValueError):
            SpeculatorModelConfig.from_dict({"speculators_model_type": kind})
