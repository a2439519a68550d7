"""What a draft, a head or streams learn from: texts with the target's states, read once and kept on disk.

Of every token but the last of each text a state is kept, one text after the other, and mapped into memory from there.
"""

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from tqdm import tqdm

from ..errors import SpeculationError
from ..files import digest, write_whole
from .writing import Text

Read = Callable[[Tensor], Tensor]
"""ids [B, T] of texts padded on the right → their states [B, T, size]; no token looks at the padding behind it"""


class Lessons(Dataset[dict[str, Tensor]]):
    """An item holds `input_ids` [T], `states` [T - 1, size] of all tokens but the last, `at` [c], places that are
    followed by a token that the target wrote, and `temperature`."""

    def __init__(self, texts: Sequence[Text], states: Tensor, places: int | None = None) -> None:
        """
        Args:
            states: [N, size] of all texts.
            places: how many of them an item has at most, others in each epoch; None for all.
        """
        self.texts, self.states, self.places, self.epoch = texts, states, places, 0
        self.ends = [0, *torch.tensor([len(text.ids) - 1 for text in texts]).cumsum(0).tolist()]
        """where each text's states begin and end"""

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


def collate(lessons: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Texts padded on the right: `input_ids` [B, T], `lengths` [B], `states` [B, T - 1, size], `at` [B, c] and whether
    each of them `counts`, and whether a text was `sampled` [B]."""
    names = ("input_ids", "states", "at")
    ids, states, at = (pad_sequence([lesson[name] for lesson in lessons], batch_first=True) for name in names)
    counts = torch.arange(at.shape[1]) < torch.tensor([len(lesson["at"]) for lesson in lessons])[:, None]
    return {
        "input_ids": ids,
        "states": states,
        "lengths": torch.tensor([len(lesson["input_ids"]) for lesson in lessons]),
        "at": at.where(counts, at[:, :1]),  # a place that counts stands in for those that a text does not have
        "counts": counts,
        "sampled": torch.stack([lesson["temperature"] for lesson in lessons]) > 0,
    }


def read_lessons(
    texts: Sequence[Text], file: Path, read: Read, device: torch.device, made_of: Any, places: int | None = None
) -> Lessons:
    """The states of all texts, from the file where it holds them; it is mapped into memory, not read into it.

    Args:
        made_of: whatever tells states apart that are read of the same texts, as JSON values.

    Raises:
        SpeculationError: there is no room for them.
    """
    one = read(torch.tensor([texts[0].ids[:1]], device=device))
    shape, dtype = (sum(len(text.ids) - 1 for text in texts), one.shape[-1]), one.dtype
    told = {"made_of": digest([[text.ids for text in texts], made_of, str(dtype)])}
    note = file.with_suffix(".json")
    if not (note.exists() and file.exists() and json.loads(note.read_text()) == told):
        note.unlink(missing_ok=True)
        partial = file.with_suffix(".partial")
        try:
            _make_room(partial, shape[0] * shape[1] * dtype.itemsize)
            _write(Lessons(texts, _mapped(partial, shape, dtype)), read, device)
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
    return Lessons(texts, _mapped(file, shape, dtype), places)


def batches(lessons: Lessons, rows: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """All lessons in their order, `rows` at once."""
    for at in range(0, len(lessons), rows):
        batch = collate([lessons[i] for i in range(at, min(at + rows, len(lessons)))])
        yield {name: value.to(device) for name, value in batch.items()}


def _mapped(file: Path, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(file), shared=True, size=shape[0] * shape[1], dtype=dtype).view(shape)


def _make_room(file: Path, size: int) -> None:
    """All that it takes, so that a full disk is known now."""
    with file.open("wb") as out:
        out.truncate(size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(out.fileno(), 0, size)


@torch.no_grad()
def _write(lessons: Lessons, read: Read, device: torch.device) -> None:
    order = sorted(range(len(lessons)), key=lambda i: len(lessons.texts[i].ids))
    with tqdm(total=len(lessons.states), desc="states of the texts", unit="token", unit_scale=True) as bar:
        while order:
            some, order = batched(order, lessons.texts)
            ids = pad_sequence([torch.tensor(lessons.texts[i].ids[:-1]) for i in some], batch_first=True)
            for i, found in zip(some, read(ids.to(device)).cpu(), strict=True):
                start, end = lessons.ends[i : i + 2]
                lessons.states[start:end] = found[: end - start]
                bar.update(end - start)


def batched(order: list[int], texts: Sequence[Text], most: int = 2048) -> tuple[list[int], list[int]]:
    """The next texts, sorted by length, that make at most `most` tokens with their padding (one at least), and the
    others."""
    count = 1
    while count < len(order) and (count + 1) * len(texts[order[count]].ids) <= most:
        count += 1
    return order[:count], order[count:]
