"""What enters the layers with streams, for every token of every text: read once, kept on disk, where the main stream
stays the same for the whole training."""

import json
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel

from ...drafters.streaming import Upper
from ...errors import SpeculationError
from ...target.devices import input_device
from ..folder import digest, write_whole
from ..writing import Text, batched, right_padded


class States(Dataset[dict[str, Tensor]]):
    """Texts with their states.

    An item holds `input_ids` [T], `states` [T - 1, H], M of the layer before the first with streams, of all tokens but
    the last, `at` [c], places that are followed by a token that the target wrote, and `temperature`.
    """

    def __init__(self, texts: Sequence[Text], states: Tensor, places: int | None = None) -> None:
        """
        Args:
            places: how many of them an item has at most, others in each epoch; None for all.
        """
        self.texts, self.states, self.places, self.epoch = texts, states, places, 0
        self.ends = [0, *torch.tensor([len(text.ids) - 1 for text in texts]).cumsum(0).tolist()]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = self.texts[index]
        at = list(range(text.start - 1, len(text.ids) - 1))
        if self.places is not None and len(at) > self.places:
            at = sorted(random.Random(f"{self.epoch} {index}").sample(at, self.places))
        return {
            "input_ids": torch.tensor(text.ids),
            "states": self.states[self.ends[index] : self.ends[index + 1]],
            "at": torch.tensor(at),
            "temperature": torch.tensor(text.temperature),
        }


class _Reached(Exception):
    """The layers above need not be computed."""


def read_states(
    target: PreTrainedModel, upper: Upper, texts: Sequence[Text], file: Path, places: int | None = None
) -> States:
    """The states of all texts, from the file where it holds them; it is mapped into memory, not read into it.

    Raises:
        SpeculationError: there is no room for them.
    """
    made_of = {"made_of": digest([[text.ids for text in texts], upper.first, str(target.dtype)])}
    note, size = file.with_suffix(".json"), target.config.get_text_config(decoder=True).hidden_size
    shape = (sum(len(text.ids) - 1 for text in texts), size)
    if not (note.exists() and file.exists() and json.loads(note.read_text()) == made_of):
        note.unlink(missing_ok=True)
        partial = file.with_suffix(".partial")
        try:
            _write(target, upper, texts, partial, shape)
            os.replace(partial, file)
        except OSError as error:
            room = shape[0] * shape[1] * target.dtype.itemsize / 1e9
            raise SpeculationError(
                f"cannot write the states of the texts, {room:.1f} GB, to {file}: {error.strerror}; make room, "
                "or train on fewer texts"
            ) from error
        finally:
            partial.unlink(missing_ok=True)
        write_whole(note, json.dumps(made_of))
    return States(texts, _mapped(file, shape, target.dtype), places)


def _mapped(file: Path, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(file), shared=True, size=shape[0] * shape[1], dtype=dtype).view(shape)


def _write(target: PreTrainedModel, upper: Upper, texts: Sequence[Text], file: Path, shape: tuple[int, int]) -> None:
    with file.open("wb") as out:  # all of the room it takes, so that a full disk is known now
        size = shape[0] * shape[1] * target.dtype.itemsize
        out.truncate(size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(out.fileno(), 0, size)
    states = _mapped(file, shape, target.dtype)
    ends = torch.tensor([len(text.ids) - 1 for text in texts]).cumsum(0).tolist()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].ids))
    with tqdm(total=shape[0], desc="states of the texts", unit="token", unit_scale=True) as bar:
        while order:
            some, order = batched(order, texts)
            for i, found in zip(some, entering(target, upper, [texts[i].ids[:-1] for i in some]), strict=True):
                n = len(texts[i].ids) - 1
                states[ends[i] - n : ends[i]] = found[:n]
                bar.update(n)


@torch.no_grad()
def entering(target: PreTrainedModel, upper: Upper, rows: Sequence[Sequence[int]]) -> Tensor:
    """M [B, T, H] of the layer before the first with streams, of texts padded on the right, where nobody looks."""
    found: list[Tensor] = []

    def look(states: Tensor) -> None:
        found.append(states)
        raise _Reached

    ids = right_padded(rows, input_device(target))
    with upper.entering(look), suppress(_Reached):
        target.base_model(input_ids=ids, use_cache=False)
    return found[0].cpu()
