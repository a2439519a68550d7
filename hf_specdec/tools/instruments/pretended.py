"""Pretended costs: a small pair of models is given the costs of a large one, without changing what it says.

- Cost-padding widens each MLP by hidden units with random inputs and zero outputs. They cost time and memory, and add
  exactly zero.
- Pacing makes each forward occupy a pretended device for a set time, without using the CPU. Two paced models can run
  side by side in two threads, as they would on two devices; forwards of the same model queue up.
- Synthetic acceptance makes a draft right with a set probability, whatever it has learned. The draft model runs as
  ever, so it costs what it costs; then its logits are biased toward a known continuation of the prompt, or, by a seeded
  coin per position, away from it. Greedy decoding at batch 1 accepts that share of tokens.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...clock import Deadline
from ...errors import SpeculationError, warn
from .forwards import cached_tokens, input_shape, wrapped_forward

MLP_LAYERS = (
    (("gate_proj", "up_proj"), "down_proj"),  # Llama, Qwen, Mistral, Gemma
    (("fc1",), "fc2"),  # OPT, Phi
    (("wi_0", "wi_1"), "wo"),  # T5 1.1
    (("wi",), "wo"),  # T5
    (("c_fc",), "c_proj"),  # GPT-2
    (("dense_h_to_4h",), "dense_4h_to_h"),  # GPT-NeoX, Bloom
)
"""Names of the layers into and out of an MLP's hidden units, by family."""

BIAS = 1000.0
"""of the logits under synthetic acceptance"""


@torch.no_grad()
def pad_mlps(model: PreTrainedModel, width: int, seed: int = 0) -> int:
    """Widen every MLP to `width` hidden units, in place; the outputs stay what they were.

    The model's config keeps the old width: a padded model is for measuring, not for saving.

    Returns:
        How many MLPs were widened.

    Raises:
        SpeculationError: the width is below the model's, or no MLP of a known family was found.
    """
    generators = {p.device: torch.Generator(p.device).manual_seed(seed) for p in model.parameters()}
    padded = 0
    for module in list(model.modules()):
        for into, out in MLP_LAYERS:
            if all(isinstance(getattr(module, name, None), nn.Linear | Conv1D) for name in (*into, out)):
                for name in into:
                    _widen(getattr(module, name), width, generators, outputs=True)
                _widen(getattr(module, out), width, generators, outputs=False)
                padded += 1
                break
    if not padded:
        families = "; ".join("+".join(into) + " → " + out for into, out in MLP_LAYERS)
        raise SpeculationError(f"cannot pad {type(model).__name__}: no MLP with layers named {families}")
    return padded


def _widen(
    layer: nn.Linear | Conv1D, width: int, generators: dict[torch.device, torch.Generator], outputs: bool
) -> None:
    """Append units to a layer's outputs (random) or inputs (zero), made where the layer lies and in its dtype."""
    conv = isinstance(layer, Conv1D)  # stores [inputs, outputs], nn.Linear [outputs, inputs]
    weight: Tensor = layer.weight.T if conv else layer.weight
    extra = width - weight.shape[0 if outputs else 1]
    if extra < 0:
        raise SpeculationError(f"cannot pad an MLP of {width - extra} units to {width}; give a larger width")
    shape = (extra, weight.shape[1]) if outputs else (weight.shape[0], extra)
    units = weight.new_zeros(shape)
    if outputs:
        units.normal_(0, weight.float().std().item(), generator=generators[weight.device])
    wide = torch.cat([weight, units], dim=0 if outputs else 1)
    layer.weight = nn.Parameter((wide.T if conv else wide).contiguous(), requires_grad=False)
    if outputs and layer.bias is not None:
        layer.bias = nn.Parameter(torch.cat([layer.bias, layer.bias.new_zeros(extra)]), requires_grad=False)
    if isinstance(layer, Conv1D):
        layer.nf = layer.weight.shape[1]
    else:
        layer.out_features, layer.in_features = layer.weight.shape


@contextmanager
def paced(model: PreTrainedModel, milliseconds: float) -> Iterator[None]:
    """Each forward of `model` inside the block takes `milliseconds`, or longer where its own work does (one warning).

    Raises:
        SpeculationError: the time is not above 0.
    """
    if not milliseconds > 0:
        raise SpeculationError(f"pace_target and pace_draft must be above 0 milliseconds, got {milliseconds}")
    device, overrun = threading.Lock(), threading.Event()

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with device:
            pace = Deadline(milliseconds / 1000)
            output = forward(*args, **kwargs)
            if pace.over and not overrun.is_set():
                overrun.set()
                warn(
                    f"a forward of {type(model).__name__} takes longer than its pace of {milliseconds} ms, so the "
                    "measured times are too long; raise the pace"
                )
            pace.sleep()
            return output

    with wrapped_forward(model, around):
        yield


@contextmanager
def synthetic_acceptance(
    draft: PreTrainedModel, sequence: Sequence[int], acceptance: float, seed: int = 0
) -> Iterator[None]:
    """Inside the block, each greedy choice of the draft along `sequence` is right with probability `acceptance`.

    Args:
        sequence: the prompt and the target's own greedy continuation. Past its end, and in forwards of several rows,
            the draft is left as it is.
        acceptance: share of tokens to get right, in [0, 1].
        seed: of the coins; the same position always falls the same way, however often it is drafted.
    """
    if not 0 <= acceptance <= 1:
        raise SpeculationError(f"synthetic_acceptance must be from 0 to 1, got {acceptance}")
    coins = torch.rand(len(sequence), generator=torch.Generator().manual_seed(seed)) < acceptance

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = cached_tokens(kwargs)  # read before the forward, which makes the cache longer
        rows, width = input_shape(args, kwargs)
        output = forward(*args, **kwargs)
        if rows > 1:
            return output
        logits = output.logits
        first = start + width - logits.shape[1]  # logits_to_keep drops the earlier ones
        for i in range(logits.shape[1]):
            if (position := first + i + 1) < len(sequence):
                right = sequence[position]
                # The token before the right one in the vocabulary is as wrong as any.
                logits[0, i, right if coins[position] else right - 1] += BIAS
        return output

    with wrapped_forward(draft, around):
        yield


def pretended_costs(settings: Mapping[str, Any]) -> list[str]:
    """A phrase for each pretended cost in use; none where the models cost what they cost.

    Args:
        settings: `pad_target_mlp`, `pad_draft_mlp` (units), `pace_target`, `pace_draft` (milliseconds); others are
            ignored.
    """
    roles = ("target", "draft")
    padded = {role: settings.get(f"pad_{role}_mlp") for role in roles}
    paced = {role: settings.get(f"pace_{role}") for role in roles}
    return [f"the {role}'s MLPs cost-padded to {units:,}" for role, units in padded.items() if units] + [
        f"the {role} paced at {milliseconds:g} ms" for role, milliseconds in paced.items() if milliseconds
    ]
