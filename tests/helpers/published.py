"""Models in folders as others publish them, for tests."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

from hf_specdec import Drafter, SpeculationError


def written(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """The folder, which holds both."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def is_refused_as_a_pickle(folder: Path) -> None:
    """What the folder holds, if it were one."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(SpeculationError, match="is a pickle, which runs code"):
        Drafter.from_pretrained(folder)
    (folder / "pytorch_model.bin").unlink()  # as from the Hub, where nothing else is downloaded
    with pytest.raises(SpeculationError, match="Convert it once"):
        Drafter.from_pretrained(folder)
