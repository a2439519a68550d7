"""Cost-padding: make a small model as slow as a large one without changing what it says.

Each MLP gets extra hidden units with random inputs and zero outputs. They cost time and memory, and add exactly zero.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...errors import SpeculationError

MLP_LAYERS = (
    (("gate_proj", "up_proj"), "down_proj"),  # Llama, Qwen, Mistral, Gemma
    (("fc1",), "fc2"),  # OPT, Phi
    (("wi_0", "wi_1"), "wo"),  # T5 1.1
    (("wi",), "wo"),  # T5
    (("c_fc",), "c_proj"),  # GPT-2
    (("dense_h_to_4h",), "dense_4h_to_h"),  # GPT-NeoX, Bloom
)
"""Names of the layers into and out of an MLP's hidden units, by family."""


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
