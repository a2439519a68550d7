"""Devices and number formats by the names that are typed."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import SpeculationError

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
"""oneDNN's names of instruction sets that do not multiply it"""
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def device_name(name: str) -> str:
    """A device's name, checked; `auto` is a CUDA or ROCm GPU if there is one, else the CPU.

    Raises:
        SpeculationError: no such device here.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    counts = {"cpu": 1} | ({accelerator.type: torch.accelerator.device_count()} if accelerator else {})
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # which no model can run on either
    if (device.index or 0) >= counts.get(device.type, 0):
        known = ", ".join(f"{kind}:0 to {kind}:{count - 1}" if count > 1 else kind for kind, count in counts.items())
        raise SpeculationError(f"device must be auto, or a device that torch sees here ({known}), got {name!r}")
    return "cpu" if device.type == "cpu" else str(device)


def input_device(model: Any) -> torch.device:
    """Where the inputs of a model, or of a part of one, go: where its first weights lie, or, where these are offloaded,
    where accelerate brings them while they are needed."""
    device = model.device if hasattr(model, "device") else next(model.parameters()).device
    if device.type != "meta":
        return device
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):  # one, or several in a row
            found = getattr(one, "execution_device", None)
            if isinstance(found, (int, str, torch.device)):
                return torch.device(found)
    return device


def dtype_name(name: str, device: str) -> str:
    """A dtype's whole name, checked; `auto` is bfloat16 where the device multiplies it, else float32.

    Args:
        device: as `device_name` gives it.

    Raises:
        SpeculationError: no such dtype, or none of weights.
    """
    if name == "auto":
        if device.startswith("cuda"):
            return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
        return cpu_dtype(cpu_capabilities()) if device == "cpu" else "float32"
    if SHORT.get(name, name) not in DTYPES:
        raise SpeculationError(f"dtype must be one of auto, {', '.join([*DTYPES, *SHORT])}, got {name!r}")
    return SHORT.get(name, name)


def cpu_dtype(capabilities: Mapping[str, Any]) -> str:
    """bfloat16 where the CPU computes in it, else float32: where bfloat16 is emulated, a forward costs in proportion to
    its width, and a draft cannot pay.

    Args:
        capabilities: as `cpu_capabilities` says.
    """
    return "bfloat16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "float32"


def cpu_capabilities() -> Mapping[str, Any]:
    """What torch says of the CPU's instructions; nothing where it is too old to say it. Of bfloat16, oneDNN computes
    with those alone that it has not been told to leave (`ONEDNN_MAX_CPU_ISA`)."""
    found = dict(getattr(torch.cpu, "get_capabilities", dict)())
    if os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper() in WITHOUT_BFLOAT16:
        found |= {name: False for name in ("avx512_bf16", "amx_bf16") if name in found}
    return found
