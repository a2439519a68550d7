"""What all heads have of their target: sizes, the states that they read, and an output to begin with."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...drafters.heads.eagle_model import usual_states
from ...errors import SpeculationError
from ..teacher import output_rows

HeadT = TypeVar("HeadT", bound=PreTrainedModel)
NORMS = {"input_layernorm", "post_attention_layernorm"}
"""of a layer such as a Llama's"""


def text_config(target: PreTrainedModel) -> Any:
    """Of the target's layers that write text."""
    return target.config.get_text_config(decoder=True)


def layers_config(target: PreTrainedModel, mlp_size: int | None, family: type[PreTrainedConfig], count: int) -> Any:
    """Of so many layers of a family, as wide as the target's.

    Raises:
        SpeculationError: the target has too few layers, or is of another make.
    """
    theirs, embeddings = text_config(target), target.get_input_embeddings()
    if theirs.num_hidden_layers < 5:
        raise SpeculationError(
            f"{type(target).__name__} has {theirs.num_hidden_layers} layers, and a head reads the states of "
            "low, middle and high ones: 5 or more; use train streaming or train draft"
        )
    if embeddings.embedding_dim != theirs.hidden_size or target.get_output_embeddings() is None:
        raise SpeculationError(
            f"{type(target).__name__} has embeddings of width {embeddings.embedding_dim} and states of width "
            f"{theirs.hidden_size}, and a head takes one in the place of the other; use train draft"
        )
    theta = (getattr(theirs, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "bos_token_id")
    same = (*sizes, "intermediate_size", "max_position_embeddings", "rms_norm_eps", "eos_token_id", "pad_token_id")
    options = {name: value for name in same if (value := getattr(theirs, name, None)) is not None}
    if mlp_size is not None:
        options["intermediate_size"] = mlp_size
    config: Any = family(
        **options,
        num_hidden_layers=count,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    config.rope_theta = theta  # where older transformers, and so engines, look for it
    return config


def states_read(target: PreTrainedModel) -> list[int]:
    """Hidden states, 0 the embeddings, that published heads read by default."""
    return usual_states(text_config(target).num_hidden_layers)


def begun(make: Callable[[], HeadT], seed: int) -> HeadT:
    """A head whose random weights come from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


@torch.no_grad()
def begin_states(fc: nn.Linear, norm: nn.Module, layers: Sequence[nn.Module], target: PreTrainedModel) -> None:
    """The highest of the states that a head reads, and the target's last layers where these are as a Llama's. What
    they do with their input, the head does with the state.

    Args:
        fc: fuses the states.
        norm: of the fused one, before the layers read it.
    """
    fc.weight.zero_()[:, -fc.out_features :].copy_(torch.eye(fc.out_features))
    last = list(getattr(target.get_decoder(), "layers", []))[-len(layers) :]
    if last and all({name for name, _ in one.named_children() if "norm" in name} == NORMS for one in last):
        norm.get_parameter("weight").copy_(scale_of(last[-1].input_layernorm))
        for mine, theirs in zip(layers, last, strict=True):
            take_over(mine, theirs)


def take_over(mine: nn.Module, theirs: Any) -> None:
    """Copy what another layer has of the same names and sizes. Maps may be wider, of states behind embeddings; what
    reads embeddings stays as it is."""
    found = dict(theirs.named_parameters())
    found["post_attention_layernorm.weight"] = scale_of(theirs.post_attention_layernorm)
    del found["input_layernorm.weight"]
    for name, weight in mine.named_parameters():
        if name in found:
            part = weight[..., -found[name].shape[-1] :]
            if part.shape == found[name].shape:
                part.copy_(found[name])


@torch.no_grad()
def begin_output(head: Any, target: PreTrainedModel, tokens: Tensor) -> None:
    """The rows of the target's output head, and its last norm, scaled to one in the mean: a head that is wrong shall
    not be sure."""
    if head.lm_head is not None:
        head.lm_head.weight.copy_(output_rows(target, tokens))
    norm, own = getattr(target.get_decoder(), "norm", None), head.norm.weight
    if norm is not None and (scale := scale_of(norm)).shape == own.shape:
        own.copy_(scale / scale.abs().mean())


@torch.no_grad()
def scale_of(norm: Any) -> Tensor:
    """[H] by which a norm multiplies each channel; some keep it as the difference to one."""
    ones = torch.ones_like(norm.weight)
    ones[::2] = -1
    return (norm(ones) - norm(-ones)) * ones / 2
