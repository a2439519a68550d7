"""Heads as others publish them: `config.json` and `model.safetensors` → a model. No code of a repo is run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..errors import SpeculationError, one_line, shortened, shown
from ..target.devices import DTYPES, device_name, dtype_name
from ..target.packing import pack_linear as pack
from .files import DTYPE_NAMES, LIGHT, read_tensors, tensor_infos
from .loading import CONFIG, WEIGHTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    ModelT = TypeVar("ModelT", bound=PreTrainedModel)


def stored_names(folder: Path, what: str, quantization: str | None) -> list[str]:
    """Of the weights in a folder, as they are in the file.

    Args:
        what: is in it, for a message.

    Raises:
        SpeculationError: there are none, or only as a pickle; or a quantization is asked for.
    """
    if quantization is not None:
        raise SpeculationError(f"quantization={quantization!r} is for draft models; {what} is small: leave it")
    if not (folder / WEIGHTS).exists():
        raise SpeculationError(
            f"{folder} has no {WEIGHTS}, and heads are read from that alone: pickles (pytorch_model.bin) run code. "
            "Convert it once, where you trust it: safetensors.torch.save_file(torch.load('pytorch_model.bin', "
            f"weights_only=True), '{WEIGHTS}')"
        )
    return list(tensor_infos(folder, WEIGHTS))


def without_memory(folder: Path, make: Callable[[], "ModelT"], layers: int, stored: Sequence[str]) -> "ModelT":
    """The model that `make` makes, on the meta device.

    Raises:
        SpeculationError: its config declares more layers than the file has weights, or what cannot be built.
    """
    if layers > len(stored):
        raise SpeculationError(f"{folder / CONFIG} declares {layers} layers; the file has fewer")
    try:
        with torch.device("meta"):
            return make()
    except Exception as error:  # sizes that do not fit each other fail in many ways
        raise SpeculationError(
            f"{folder / CONFIG} declares sizes that cannot be built: {shortened(one_line(error))}; correct them"
        ) from error


def read_weights(
    folder: Path, model: "PreTrainedModel", theirs: dict[str, str], dtype: Any, optional: Sequence[str] = ()
) -> dict[str, Tensor]:
    """The model's weights, which the file holds in any number format, under its names.

    Args:
        theirs: our names → those of the file.
        dtype: of the result; "auto" for that of the file.
        optional: names that the file need not have.

    Raises:
        SpeculationError: a weight is missing, unknown or of another shape, or holds no numbers.
    """
    stored = tensor_infos(folder, WEIGHTS)
    wanted = {name: tensor for name, tensor in model.state_dict().items() if name in theirs or name not in optional}
    expected = {
        theirs.get(name, name): _as_stored(tensor, stored, theirs.get(name, name)) for name, tensor in wanted.items()
    }
    found = read_tensors(folder, WEIGHTS, expected)
    weights = {name: found[theirs[name]] for name in wanted}
    kind = next(w.dtype for w in weights.values() if w.is_floating_point()) if dtype == "auto" else dtype
    kind = DTYPES[dtype_name(kind, "cpu")] if isinstance(kind, str) else kind
    return {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def with_weights(
    folder: Path, model: "ModelT", weights: dict[str, Tensor], device_map: Any, pack_linear: bool, what: str
) -> "ModelT":
    """A model of the meta device with its weights, on its device, ready to draft.

    Raises:
        SpeculationError: `device_map` spreads it over several devices.
    """
    model.load_state_dict(weights, assign=True)
    model.rotary_emb = type(model.rotary_emb)(model.config)  # computed, not stored
    model.config.name_or_path = str(folder)
    model = model.to(_device(device_map, what)).eval().requires_grad_(False)
    if pack_linear:
        pack(model)
    return model


def _as_stored(tensor: Tensor, stored: dict[str, tuple[str, tuple[int, ...]]], name: str) -> Tensor:
    """What the file is to hold, in the number format that it has there."""
    kinds = {written: dtype for dtype, written in DTYPE_NAMES.items()} | {LIGHT: torch.bfloat16}
    kind = kinds.get(stored[name][0]) if name in stored else None
    alike = kind is not None and kind.is_floating_point == tensor.is_floating_point()
    return tensor.to(kind) if alike else tensor


def _device(device_map: Any, what: str) -> torch.device:
    place = device_map.get("") if isinstance(device_map, dict) and len(device_map) == 1 else device_map
    if isinstance(place, dict):
        raise SpeculationError(f"device_map is {shown(device_map)}; {what} lies on one device: name that")
    return torch.device("cpu" if place is None else device_name("auto") if place == "auto" else place)
