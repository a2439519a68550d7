"""What enters the layers with streams, for every token of every text: the main stream stays the same for the whole
training."""

import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from ...drafters.streaming import Upper
from ...target.devices import input_device
from ..mapped import mapped_states
from ..writing import Text, right_padded


class States(Dataset[dict[str, Tensor]]):
    """Texts with their states.

    An item holds `input_ids` [T], `states` [T - 1, H], M of the layer before the first with streams, of all tokens but
    the last, `at` [c], places that are followed by a token that the target wrote, and `temperature`.
    """

    def __init__(self, texts: Sequence[Text], states: Tensor, ends: Sequence[int], places: int | None = None) -> None:
        """
        Args:
            ends: where each text's states begin and end.
            places: how many of them an item has at most, others in each epoch; None for all.
        """
        self.texts, self.states, self.ends, self.places, self.epoch = texts, states, ends, places, 0

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
    size = target.config.get_text_config(decoder=True).hidden_size
    states, ends = mapped_states(
        texts, file, size, target.dtype, upper.first, lambda rows: entering(target, upper, rows)
    )
    return States(texts, states, ends, places)


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
