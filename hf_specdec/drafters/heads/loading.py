"""`Format`: heads as others publish them, `config.json` and `model.safetensors` → a model. No code of a repo is run."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...errors import SpeculationError, shown
from ...hub.files import DTYPE_NAMES, LIGHT, naming, read_json, read_tensors, tensor_infos
from ...hub.loading import CONFIG, WEIGHTS
from ...target.devices import DTYPES, device_name, dtype_name
from ...target.packing import pack_linear as pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Format(ABC):
    """How a kind of heads is written down. What a kind refuses it raises without the file's name."""

    names: Mapping[str, str] = {}
    """weights in the file → the model's, where they differ"""
    optional: Sequence[str] = ()
    """weights of the model that the file need not hold"""

    @abstractmethod
    def config(self, content: dict[str, Any]) -> PreTrainedConfig:
        """The model's config, of the one in the file."""

    @abstractmethod
    def model(self, config: Any, names: Collection[str]) -> "PreTrainedModel":
        """A model with weights of these names, on the device that is current."""

    def ours(self, name: str) -> str:
        """The model's name of a weight in the file."""
        name = name.removeprefix("model.")
        return self.names.get(name, name)

    def completed(self, model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights, with those that the file need not hold."""
        return weights

    def load(
        self,
        folder: Path,
        what: str,
        *,
        dtype: Any = "auto",
        device_map: Any = None,
        pack_linear: bool = False,
        trust_remote_code: bool = False,
    ) -> "PreTrainedModel":
        """The head in a folder, ready to draft; options as of `load_draft`.

        Args:
            what: is in it, for messages.

        Raises:
            SpeculationError: no such head, weights that are not those of its config, pickles, or several devices.
                Nothing is allocated before that is known.
        """
        stored = _stored(folder)
        theirs = {self.ours(name): name for name in stored}
        with naming(folder / CONFIG, f"does not describe {what}"):
            config: Any = self.config(read_json(folder, CONFIG))
        if config.num_hidden_layers > len(stored):
            raise SpeculationError(f"{folder / CONFIG} declares {config.num_hidden_layers} layers; the file has fewer")
        with naming(folder / CONFIG, "declares sizes that cannot be built"), torch.device("meta"):
            model: Any = self.model(config, theirs)
        theirs = {ours: name for name, ours in self.names.items()} | theirs
        weights = _weights(folder, model, theirs, dtype, self.optional)
        with naming(folder / WEIGHTS, f"does not hold {what}"):
            model.load_state_dict(self.completed(model, weights), assign=True)
        model.rotary_emb = type(model.rotary_emb)(model.config)  # computed, not stored
        model.config.name_or_path = str(folder)
        model = model.to(_device(device_map, what)).eval().requires_grad_(False)
        if pack_linear:
            pack(model)
        return model  # type: ignore[no-any-return]


def _stored(folder: Path) -> list[str]:
    """Names of the weights in a folder.

    Raises:
        SpeculationError: there are none, or only as a pickle.
    """
    if not (folder / WEIGHTS).exists():
        raise SpeculationError(
            f"{folder} has no {WEIGHTS}, and heads are read from that alone: pickles (pytorch_model.bin) run code. "
            "Convert it once, where you trust it: safetensors.torch.save_file(torch.load('pytorch_model.bin', "
            f"weights_only=True), '{WEIGHTS}')"
        )
    return list(tensor_infos(folder, WEIGHTS))


def _weights(
    folder: Path, model: "PreTrainedModel", theirs: dict[str, str], dtype: Any, optional: Sequence[str]
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
