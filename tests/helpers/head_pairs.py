"""Targets and heads over their states, of every format and with random weights."""

import copy
import functools
from typing import Any

import dflash_models
import eagle_heads
import gemma4_models
import models
import pytest
import torch
import transformers as tf
from sampled_triples import VOCAB
from transformers.modeling_layers import MtpModel

from hf_specdec import DFlashDrafter, Drafter, EagleDrafter, MtpDrafter
from hf_specdec.budget import Controller, nodes_that_pay
from hf_specdec.drafters.heads import HeadDrafter
from hf_specdec.engine import guard

WINDOW = 6
BLOCK = 4
MASK = 95
WIDE = 24
"""nodes that are verified at least, where there are so many"""
TARGETS: dict[str, Any] = {
    "GLM-4-MoE": lambda layers: tf.Glm4MoeConfig(
        **models.SIZES,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        num_mtp_layers=layers,
    ),
    "DeepSeek-V3": lambda layers: _deepseek(layers),
}


def _deepseek(layers: int) -> Any:
    config = models.ARCHITECTURES["DeepSeek-V3"]()
    config.num_mtp_layers = layers
    return config


def _loud(model: Any, seed: int) -> Any:
    """Weights large enough that every token matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and not name.startswith(("embed_tokens", "shared_head")):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 2.0 / weight.shape[-1] ** 0.5)
    return model.eval()


@functools.cache
def mtp(name: str, layers: int) -> tuple[Any, MtpModel]:
    target = models.from_config(TARGETS[name](layers))
    target.set_experts_implementation("batched_mm")  # the only one that can be captured in float32
    return target, _loud(MtpModel(target, layers), seed=4)


@functools.cache
def dflash(kind: str) -> tuple[Any, Any]:
    target = models.llama()
    config = tf.MuseGlimmerAssistantConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"] if kind == "mixed" else [kind] * 2,
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=[0, 1],
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return target, _loud(tf.MuseGlimmerAssistantModel(config), seed=5)


def pairs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in TARGETS:
        for layers in (1, 3):
            found[f"{name}, {layers}"] = functools.partial(_mtp_pair, name, layers)
    for kind in ("full_attention", "sliding_attention", "mixed"):
        found[f"DFlash, {kind}"] = functools.partial(_dflash_pair, kind)
    for kind in dflash_models.CONFIGS:
        found[f"z-lab's DFlash, {kind}"] = functools.partial(dflash_models.published, kind)
    for kind in eagle_heads.CONFIGS:
        found[f"EAGLE-3, {kind}"] = functools.partial(eagle_heads.eagle, kind)
    for kind in gemma4_models.OF_TARGETS:
        found[f"Gemma 4, {kind}"] = functools.partial(gemma4_models.gemma4, kind)
    return found


def _mtp_pair(name: str, layers: int) -> tuple[Any, Drafter]:
    target, model = mtp(name, layers)
    return target, MtpDrafter(model)


def _dflash_pair(kind: str) -> tuple[Any, Drafter]:
    target, model = dflash(kind)
    return target, DFlashDrafter(model)


PAIRS = pairs()
LENGTHS = [[9], [7, 7, 7], [3, 11, 6]]


def never_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random heads are hardly ever right; where they do not pay nothing would be drafted, or verified."""
    plan = Controller.plan

    def planned(self: Controller, drafted: Any, most: int, enough: int = 1) -> int:
        as_ever = plan(self, drafted, most, enough)
        return min(self.fixed or most, most) if self.who == HeadDrafter.who else as_ever

    monkeypatch.setattr(Controller, "plan", planned)
    monkeypatch.setattr(guard, "nodes_that_pay", lambda *known: max(WIDE, nodes_that_pay(*known)))


@pytest.fixture(autouse=True)
def drafting_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    never_declined(monkeypatch)


@pytest.fixture(scope="module")
def small() -> Any:
    size = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 8}
    size |= {"num_attention_heads": 1, "num_key_value_heads": 1, "bos_token_id": None, "pad_token_id": None}
    config = TARGETS["GLM-4-MoE"](2)
    for name, value in size.items():
        setattr(config, name, value)
    model = models.from_config(config)
    model.get_output_embeddings().weight.data *= 0.5  # every token has its chance
    return model


def small_head(target: Any, kind: str) -> Any:
    if kind == "EAGLE-3":  # which does not know one of the tokens
        return EagleDrafter(_loud(eagle_heads.tiny(VOCAB, known=VOCAB - 1), seed=4), num_draft_tokens=2)
    if kind == "z-lab's DFlash":
        return dflash_models.tiny(VOCAB)
    return _small_dflash(target) if kind == "DFlash" else MtpDrafter(_loud(MtpModel(target, 2), seed=4))


def _small_dflash(target: Any) -> DFlashDrafter:
    config = copy.deepcopy(dflash("mixed")[1].config)
    config.hidden_size, config.intermediate_size, config.mask_token_id = 8, 8, VOCAB - 1
    return DFlashDrafter(_loud(tf.MuseGlimmerAssistantModel(config), seed=5))


def save_with_layers(target: Any, model: MtpModel, folder: Any) -> None:
    """A checkpoint as models with such layers have it: they stand behind the others."""
    from safetensors.torch import load_file, save_file

    target.save_pretrained(folder)
    file, first = folder / "model.safetensors", target.config.num_hidden_layers
    names = load_file(file)
    for name, weight in model.layers.state_dict().items():
        number, rest = name.split(".", 1)
        for ours, theirs in (("mtp_block.", ""), ("post_norm.", "shared_head.norm.")):
            if rest.startswith(ours):
                rest = theirs + rest.removeprefix(ours)
        names[f"model.layers.{first + int(number)}.{rest}"] = weight.contiguous()
    save_file(names, file, metadata={"format": "pt"})
