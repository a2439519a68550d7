"""`Format`: heads as others publish them, `config.json` and `model.safetensors` → a model. No code of a repo is run."""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from ...errors import SpeculationError, shown
from ...hub.files import DTYPE_NAMES, LIGHT, TensorInfo, naming, read_json, read_tensors, tensor_infos
from ...hub.loading import CONFIG, WEIGHTS
from ...target.devices import DTYPES, device_name, dtype_name
from ...target.packing import pack_linear as pack
from .verifier import Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Format(ABC):
    """How a kind of heads is written down. What a kind refuses it raises without the file's name."""

    names: Mapping[str, str] = {}
    """weights in the file → the model's, where they differ"""
    optional: Sequence[str] = ()
    """weights of the model that the file need not hold"""
    unused: Sequence[str] = ()
    """weights that the file may hold, and that are read only where the model has them"""

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
        stored = _infos(folder)
        theirs = {mine: name for name, mine in self.names.items()} | {self.ours(name): name for name in stored}
        with naming(folder / CONFIG, f"does not describe {what}"):
            content = read_json(folder, CONFIG)
            config, verifier = self.config(content), Verifier.of(content, folder)
        model: Any = self._without_memory(config, folder, theirs)
        wanted = {name: one for name, one in model.state_dict().items() if name in theirs or name not in self.optional}
        expected = {theirs.get(name, name): one for name, one in wanted.items()}
        unused = [name for name in stored if name not in expected and self.ours(name) in self.unused]
        weights = _weights(folder, stored, expected, dtype, unused)
        weights = {name: weights[theirs[name]] for name in wanted}
        with naming(folder / WEIGHTS, f"does not hold {what}"):
            model.load_state_dict(self.completed(model, weights), assign=True)
        model.rotary_emb = type(model.rotary_emb)(model.config)  # computed, not stored
        model.config.name_or_path = str(folder)
        model.verifier = verifier
        model = model.to(_device(device_map, what)).eval().requires_grad_(False)
        if pack_linear:
            pack(model)
        return model  # type: ignore[no-any-return]

    def write(self, folder: Path, content: dict[str, Any], weights: Mapping[str, Tensor]) -> None:
        """A head as others publish it, in files that `load` reads.

        Args:
            content: of `config.json`.
            weights: by the model's names.

        Raises:
            OSError: the folder cannot be written.
        """
        theirs = {mine: name for name, mine in self.names.items()}
        write_files(folder, content, {theirs.get(name, name): tensor for name, tensor in weights.items()})

    def _without_memory(self, config: Any, folder: Path, names: Collection[str]) -> "PreTrainedModel":
        """The model with weights of these names, on the meta device."""
        if config.num_hidden_layers > len(names):
            raise SpeculationError(f"{folder / CONFIG} declares {config.num_hidden_layers} layers; the file has fewer")
        with naming(folder / CONFIG, "declares sizes that cannot be built"), torch.device("meta"):
            return self.model(config, names)


def write_files(folder: Path, content: dict[str, Any], weights: Mapping[str, Tensor]) -> None:
    """`config.json` and `model.safetensors`, with weights by their names in the file.

    Raises:
        OSError: the folder cannot be written.
    """
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(contiguous, folder / WEIGHTS, metadata={"format": "pt"})


def _infos(folder: Path) -> dict[str, TensorInfo]:
    """Of the weights in a folder, by name.

    Raises:
        SpeculationError: there are none, or only as a pickle.
    """
    if not (folder / WEIGHTS).exists():
        raise SpeculationError(
            f"{folder} has no {WEIGHTS}, and heads are read from that alone: pickles (pytorch_model.bin) run code. "
            "Convert it once, where you trust it: safetensors.torch.save_file(torch.load('pytorch_model.bin', "
            f"weights_only=True), '{WEIGHTS}')"
        )
    return tensor_infos(folder, WEIGHTS)


def check_known(d2t: Tensor, vocab: int) -> None:
    """Refuse a draft's own vocabulary [K], told as what is added to its ids, that does not lie within the target's.

    Raises:
        SpeculationError: it says what is wrong.
    """
    known, tokens = len(d2t), d2t + torch.arange(len(d2t))
    if known > vocab or not bool(((tokens >= 0) & (tokens < vocab)).all()) or len(tokens.unique()) < known:
        raise SpeculationError(f"d2t must lead to {known} different tokens from 0 to {vocab - 1}; train the head again")


def _weights(
    folder: Path, stored: dict[str, TensorInfo], expected: dict[str, Tensor], dtype: Any, unused: Collection[str]
) -> dict[str, Tensor]:
    """These weights, which the file holds in any number format.

    Args:
        dtype: of the result; "auto" for that of the file.
        unused: others that may be there.

    Raises:
        SpeculationError: a weight is missing, unknown or of another shape, or holds no numbers.
    """
    kinds = {written: kind for kind, written in DTYPE_NAMES.items()} | {LIGHT: torch.bfloat16}

    def as_stored(name: str, tensor: Tensor) -> Tensor:
        kind = kinds.get(stored[name][0]) if name in stored else None
        alike = kind is not None and kind.is_floating_point == tensor.is_floating_point()
        return tensor.to(kind) if alike else tensor

    found = read_tensors(folder, WEIGHTS, {name: as_stored(name, tensor) for name, tensor in expected.items()}, unused)
    kind = next(w.dtype for w in found.values() if w.is_floating_point()) if dtype == "auto" else dtype
    kind = DTYPES[dtype_name(kind, "cpu")] if isinstance(kind, str) else kind
    return {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in found.items()}


def _device(device_map: Any, what: str) -> torch.device:
    place = device_map.get("") if isinstance(device_map, dict) and len(device_map) == 1 else device_map
    if isinstance(place, dict):
        raise SpeculationError(f"device_map is {shown(device_map)}; {what} lies on one device: name that")
    return torch.device("cpu" if place is None else device_name("auto") if place == "auto" else place)
