"""What a head learns from: texts, with the target's states that it reads, and those that the target's head reads."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from ...target.devices import input_device
from ..mapped import mapped_states
from ..writing import Text, right_padded


class Lessons(Dataset[dict[str, Tensor]]):
    """An item holds `input_ids` [T], of all tokens but the last `states` [T - 1, 3 H] and `last` [T - 1, H], `start`,
    where the target's own text begins, and `temperature`."""

    def __init__(self, texts: Sequence[Text], states: Tensor, ends: Sequence[int], size: int) -> None:
        """
        Args:
            states: [N, 4 H] of all texts.
            ends: where each text's states begin and end.
            size: H.
        """
        self.texts, self.states, self.ends, self.size, self.epoch = texts, states, ends, size, 0

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text, held = self.texts[index], self.states[self.ends[index] : self.ends[index + 1]]
        return {
            "input_ids": torch.tensor(text.ids),
            "states": held[:, : -self.size],
            "last": held[:, -self.size :],
            "start": torch.tensor(text.start),
            "temperature": torch.tensor(text.temperature),
        }


def read_lessons(target: PreTrainedModel, read: Sequence[int], texts: Sequence[Text], file: Path) -> Lessons:
    """Of all texts, from the file where it holds them.

    Args:
        read: the hidden states that the head reads; 0 are the embeddings.

    Raises:
        SpeculationError: there is no room for them.
    """
    size, kept = target.config.get_text_config(decoder=True).hidden_size, [*read, -1]

    @torch.no_grad()
    def states_of(rows: Sequence[Sequence[int]]) -> Tensor:
        ids = right_padded(rows, input_device(target))
        found = target.base_model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([found[i] for i in kept], dim=-1).cpu()

    states, ends = mapped_states(texts, file, len(kept) * size, target.dtype, kept, states_of)
    return Lessons(texts, states, ends, size)


def collate(lessons: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Texts padded on the right."""
    ids, states, last = (
        pad_sequence([lesson[name] for lesson in lessons], batch_first=True) for name in ("input_ids", "states", "last")
    )
    return {
        "input_ids": ids,
        "states": states,
        "last": last,
        "starts": torch.stack([lesson["start"] for lesson in lessons]),
        "lengths": torch.tensor([len(lesson["input_ids"]) for lesson in lessons]),
        "sampled": torch.stack([lesson["temperature"] for lesson in lessons]) > 0,
    }
