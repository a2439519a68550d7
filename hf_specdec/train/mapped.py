"""The target's states for every token of every text: read once, kept on disk, mapped into memory from there."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..errors import SpeculationError
from .folder import digest, write_whole
from .writing import Text, batched


def mapped_states(
    texts: Sequence[Text],
    file: Path,
    size: int,
    dtype: torch.dtype,
    made_of: Any,
    read: Callable[[Sequence[Sequence[int]]], Tensor],
) -> tuple[Tensor, list[int]]:
    """States [N, size] of all tokens but the last of each text, one text after the other, and where each text's begin
    and end; from the file where it holds them.

    Args:
        made_of: whatever tells states apart that are read of the same texts, as JSON values.
        read: ids of several texts → their states [B, T, size], padded on the right.

    Raises:
        SpeculationError: there is no room for them.
    """
    told = {"made_of": digest([[text.ids for text in texts], made_of, str(dtype)])}
    ends = [0, *torch.tensor([len(text.ids) - 1 for text in texts]).cumsum(0).tolist()]
    note, shape = file.with_suffix(".json"), (ends[-1], size)
    if not (note.exists() and file.exists() and json.loads(note.read_text()) == told):
        note.unlink(missing_ok=True)
        partial = file.with_suffix(".partial")
        try:
            _write(_mapped(_room(partial, shape, dtype), shape, dtype), texts, ends, read)
            os.replace(partial, file)
        except OSError as error:
            room = shape[0] * shape[1] * dtype.itemsize / 1e9
            raise SpeculationError(
                f"cannot write the states of the texts, {room:.1f} GB, to {file}: {error.strerror}; make room, "
                "or train on fewer texts"
            ) from error
        finally:
            partial.unlink(missing_ok=True)
        write_whole(note, json.dumps(told))
    return _mapped(file, shape, dtype), ends


def _mapped(file: Path, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(file), shared=True, size=shape[0] * shape[1], dtype=dtype).view(shape)


def _room(file: Path, shape: tuple[int, int], dtype: torch.dtype) -> Path:
    """All of the room it takes, so that a full disk is known now."""
    with file.open("wb") as out:
        size = shape[0] * shape[1] * dtype.itemsize
        out.truncate(size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(out.fileno(), 0, size)
    return file


def _write(
    states: Tensor, texts: Sequence[Text], ends: Sequence[int], read: Callable[[Sequence[Sequence[int]]], Tensor]
) -> None:
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].ids))
    with tqdm(total=len(states), desc="states of the texts", unit="token", unit_scale=True) as bar:
        while order:
            some, order = batched(order, texts)
            for i, found in zip(some, read([texts[i].ids[:-1] for i in some]), strict=True):
                start, end = ends[i : i + 2]
                states[start:end] = found[: end - start]
                bar.update(end - start)
