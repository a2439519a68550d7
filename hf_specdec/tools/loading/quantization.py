"""Weights in fewer bits, quantized while they are loaded."""

from importlib.util import find_spec
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from ...errors import SpeculationError
from ...hub.draft import QUANTIZATIONS, quanto_config

BITSANDBYTES: dict[str, dict[str, Any]] = {
    "bnb-int8": {"load_in_8bit": True},
    "bnb-nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}


def quantization_config(kind: str, dtype: torch.dtype) -> Any:
    """What `from_pretrained` takes for it.

    Args:
        dtype: to compute in.

    Raises:
        SpeculationError: an unknown kind, or the library that it needs is not installed.
    """
    if kind in QUANTIZATIONS:
        return quanto_config(kind)
    if kind not in BITSANDBYTES:
        raise SpeculationError(
            f"quantization must be {', '.join(QUANTIZATIONS)} (optimum-quanto) or {', '.join(BITSANDBYTES)} "
            f"(bitsandbytes), got {kind!r}"
        )
    if find_spec("bitsandbytes") is None:
        raise SpeculationError(f"quantization={kind!r} needs bitsandbytes; pip install bitsandbytes")
    compute = {"bnb_4bit_compute_dtype": dtype} if kind == "bnb-nf4" else {}
    return BitsAndBytesConfig(**BITSANDBYTES[kind], **compute)
