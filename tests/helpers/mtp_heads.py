"""Targets with layers for multi-token prediction, and random weights in these."""

import functools
from typing import Any

import models
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from sampled_triples import VOCAB
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from hf_specdec import MtpDrafter

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


@functools.cache
def mtp(name: str, layers: int) -> tuple[Any, MtpModel]:
    target = models.from_config(TARGETS[name](layers))
    target.set_experts_implementation("batched_mm")  # the only one that can be captured in float32
    return target, models.loud(MtpModel(target, layers), seed=4)


def _pair(name: str, layers: int) -> tuple[Any, MtpDrafter]:
    target, model = mtp(name, layers)
    return target, MtpDrafter(model)


PAIRS = {f"{name}, {n}": functools.partial(_pair, name, n) for name in TARGETS for n in (1, 3)}


def small_target() -> Any:
    """Of few tokens, which all have their chance."""
    size = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 8}
    size |= {"num_attention_heads": 1, "num_key_value_heads": 1, "bos_token_id": None, "pad_token_id": None}
    config = TARGETS["GLM-4-MoE"](2)
    for name, value in size.items():
        setattr(config, name, value)
    model = models.from_config(config)
    model.get_output_embeddings().weight.data *= 0.5
    return model


SMALL = {"MTP": lambda target: MtpDrafter(models.loud(MtpModel(target, 2), seed=4))}


def drafter() -> MtpDrafter:
    return MtpDrafter()


@torch.no_grad()
def alone(target: Any, drafter: Any, text: Tensor) -> list[int]:
    states = target(text[:, :-1], output_hidden_states=True).hidden_states[-1]
    tokens, *_ = drafter.model(
        input_ids=text[:, 1:],
        last_hidden_states=states,
        attention_mask=torch.ones_like(text),
        position_ids=torch.arange(1, text.shape[1])[None],
        mtp_cache=MtpCache(config=drafter.model.config),
    )
    return tokens[0].tolist()


def save_with_layers(target: Any, model: MtpModel, folder: Any) -> None:
    """A checkpoint as models with such layers have it: they stand behind the others."""
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
