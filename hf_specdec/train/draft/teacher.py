"""What the target would have said at every place of its texts: its likeliest tokens, read once and kept on disk."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel

from ...target.devices import input_device
from ..folder import digest
from ..writing import Text, batched, right_padded

LIKELIEST = 32
"""tokens kept per place; a target seldom has more in mind"""


class Lessons(Dataset[dict[str, Tensor]]):
    """Texts with the target's distribution behind each of their tokens.

    An item holds `input_ids` [T], `start`, and for the places from `start - 1` on, each of which is followed by a token
    that the target wrote: `rows` [N, 32] of the draft's head, `chances` [N, 32], `greedy` [N], the row of the target's
    own first choice or -1 where the draft does not know it, and `temperature`.
    """

    def __init__(self, texts: Sequence[Text], answers: dict[str, Tensor]) -> None:
        self.texts, self.answers = texts, answers
        ends = torch.tensor([len(text.ids) - text.start for text in texts]).cumsum(0)
        self.ends = [0, *ends.tolist()]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text, places = self.texts[index], slice(self.ends[index], self.ends[index + 1])
        return {
            "input_ids": torch.tensor(text.ids[:-1]),
            "start": torch.tensor(text.start - 1),
            "temperature": torch.tensor(text.temperature),
        } | {name: answer[places] for name, answer in self.answers.items()}


def read_lessons(target: PreTrainedModel, texts: Sequence[Text], tokens: Tensor, file: Path) -> Lessons:
    """The target's distributions over `tokens` for all texts, from the file where it holds them."""
    made_of = contents(texts, tokens)
    if (answers := _stored(file, made_of)) is not None:
        return Lessons(texts, answers)
    written = sum(len(text.ids) - text.start for text in texts)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].ids))
    found: dict[int, dict[str, Tensor]] = {}
    row_of = torch.full((target.config.vocab_size,), -1)
    row_of[tokens] = torch.arange(len(tokens))
    with tqdm(total=written, desc="what the target would say", unit="token", unit_scale=True) as bar, torch.no_grad():
        while order:
            batch, order = batched(order, texts)
            for i, logits in zip(batch, _logits(target, [texts[i] for i in batch]), strict=True):
                found[i] = _answers(logits, tokens, row_of)
                bar.update(len(logits))
    answers = {name: torch.cat([found[i][name] for i in range(len(texts))]) for name in found[0]}
    partial = file.with_suffix(".partial")
    save_file(answers, partial, metadata={"made_of": made_of})
    os.replace(partial, file)
    return Lessons(texts, answers)


def contents(texts: Sequence[Text], tokens: Tensor) -> str:
    """Tells lessons apart that one target gives."""
    return digest([[[text.ids, text.start, text.temperature] for text in texts], tokens.tolist()])


def _stored(file: Path, made_of: str) -> dict[str, Tensor] | None:
    """What a file holds, if it is of these texts and tokens."""
    try:
        with safe_open(file, framework="pt") as content:
            if (content.metadata() or {}).get("made_of") != made_of:
                return None
            return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  (not a dict)
    except (OSError, SafetensorError):
        return None


def _logits(target: PreTrainedModel, texts: Sequence[Text]) -> Iterator[Tensor]:
    """Per text the logits [N, V] that decided each token which the target wrote."""
    ids = right_padded([text.ids for text in texts], input_device(target))
    hidden = target.base_model(input_ids=ids, use_cache=False).last_hidden_state
    head = target.get_output_embeddings()
    for row, text in zip(hidden, texts, strict=True):
        yield head(row[text.start - 1 : len(text.ids) - 1])


def _answers(logits: Tensor, tokens: Tensor, row_of: Tensor) -> dict[str, Tensor]:
    chances = logits.float().softmax(-1)
    likeliest = chances[:, tokens.to(chances.device)].topk(min(LIKELIEST, len(tokens)))
    return {
        "rows": likeliest.indices.to(torch.int16).cpu(),
        "chances": likeliest.values.to(torch.float16).cpu(),
        "greedy": row_of[logits.argmax(-1).cpu()].to(torch.int16),
    }
