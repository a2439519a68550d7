"""What tuned streams add to their target, as a LoRA that PEFT loads."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import Tensor

from ...errors import SpeculationError
from .streams import Streams
from .upper import Upper

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "base_model.model."
"""PEFT's name for the model that it wraps"""


def write_lora(streams: Streams, target: "PreTrainedModel", folder: str | Path) -> None:
    """W + U D of every adapted linear layer, as PEFT's `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        SpeculationError: a folder that cannot be written.
    """
    names = {module: name for name, module in target.named_modules()}
    weights: dict[str, Tensor] = {}
    adapted: list[str] = []
    rank = 0
    for layer, beside in zip(Upper(target, len(streams.adapters)).layers, streams.adapters, strict=True):
        for name, adapter in beside.items():  # type: ignore[union-attr, operator]
            adapted.append(f"{names[layer]}.{name.replace('/', '.')}")
            for letter, part in (("A", adapter.down), ("B", adapter.up)):
                weights[f"{PREFIX}{adapted[-1]}.lora_{letter}.weight"] = part.weight.detach().cpu().contiguous()
            rank = adapter.down.out_features
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": target.name_or_path,
        "r": rank,
        "lora_alpha": rank,  # PEFT scales by alpha / r
        "lora_dropout": 0.0,
        "target_modules": adapted,
        "inference_mode": True,
    }
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(weights, Path(folder) / "adapter_model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise SpeculationError(f"cannot write to folder {str(folder)!r}: {error}; name another one") from error
