"""What this library raises and warns with."""

import os
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

ELSEWHERE = {
    "optimum.onnxruntime": ("ONNX Runtime", "optimum-onnx", "transformers<4.58"),
    "optimum.intel": ("OpenVINO", "optimum-intel", "transformers<5.6"),
}
"""models of other runtimes by their module: the runtime, its package, and the pin of its latest version (optimum-onnx
0.1.0, optimum-intel 2.2.0)"""
LONGEST_VALUE = 500
"""characters of what a message repeats of a bad value"""


class SpeculationError(ValueError):
    """Bad input: the message names the argument, what was got, what is allowed, and the fix."""


class SpeculationWarning(UserWarning):
    """Speculation was narrowed or given up for a call; the text is what plain decoding gives all the same."""


def shown(value: Any) -> str:
    """`repr` for a message: of bounded length, whatever somebody has passed or stored."""
    try:
        return shortened(repr(value))
    except Exception:  # nested too deep, an integer of thousands of digits, or a `__repr__` of somebody's own
        return f"a {type(value).__name__} that cannot be shown"


def shortened(text: str) -> str:
    """The text, or its beginning."""
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} ..."


def one_line(error: BaseException) -> str:
    """What somebody else's error says, in one line."""
    return " ".join(str(error).split())


def meant(name: Any, known: Iterable[str]) -> str:
    """The name that is nearly this one, for a message; empty where none is."""
    plainly = {one.lower().replace("-", "_"): one for one in known}
    near = get_close_matches(str(name).lower().replace("-", "_"), list(plainly), 1)
    return f" (did you mean {plainly[near[0]]!r}?)" if near else ""


def expect_model(name: str, value: Any) -> None:
    """Refuse what is no transformers model, or one of another runtime than torch."""
    for module, (runtime, package, pin) in ELSEWHERE.items():
        if any(kind.__module__.startswith(module) for kind in type(value).__mro__):
            raise SpeculationError(
                f"{name} must be a torch model, got {type(value).__name__}, which runs in {runtime}: {package} needs "
                f"{pin}, and hf_specdec transformers>=5.17. Load the model itself by AutoModelForCausalLM, or smaller "
                "by Drafter.from_pretrained(..., quantization='int8')"
            )
    if not hasattr(value, "forward") or not hasattr(value, "config"):
        fix = "; pass its draft_model" if hasattr(value, "draft_model") else ""
        if isinstance(value, (str, os.PathLike)):
            fix = "; load it by AutoModelForCausalLM.from_pretrained, or by Drafter.from_pretrained if it is a drafter"
        raise SpeculationError(f"{name} must be a transformers model, got {shown(value)}{fix}")


def warn(message: str) -> None:
    """Tell the user once per call that speculation was narrowed or given up."""
    warnings.warn(message, SpeculationWarning, stacklevel=2)
