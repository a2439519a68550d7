"""What the classes of others make of small heads (`reference_heads.py`), and these heads as they are published."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import models
import torch
from processes import folder_of_the_session
from published import written
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from hf_specdec import Drafter
from hf_specdec.drafters.heads.head import News
from hf_specdec.drafters.heads.states import States

FOLDER = Path(__file__).parent.parent / "drafters" / "reference"
KINDS = sorted(path.stem for path in FOLDER.glob("*.safetensors"))


class Told(NamedTuple):
    """As `reference_heads.py` describes it."""

    embeddings: Tensor
    states: Tensor
    tokens: Tensor
    anchors: Tensor
    logits: Tensor
    confidence: Tensor | None


@functools.cache
def reference(kind: str) -> tuple[Path, Told]:
    """A published head's folder, and what is told of it."""
    path = FOLDER / f"{kind}.safetensors"
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["config"])
    stored = load_file(path)
    told = Told(*(stored.pop(f"told.{name}", None) for name in Told._fields))  # type: ignore[arg-type]
    return written(folder_of_the_session(), config, stored), told


def told_here(kind: str, anchor: int) -> tuple[Tensor, list[Tensor | None]]:
    """[L, V] logits of the block at a place, each given the tokens before it; and how likely each is accepted."""
    folder, told = reference(kind)
    vocab, width = told.embeddings.shape
    target = models.llama(vocab=vocab, hidden_size=width)
    for module in (target.get_input_embeddings(), target.get_output_embeddings()):
        module.weight.data = told.embeddings.clone()
    drafter: Any = Drafter.from_pretrained(folder, dtype="float32")
    context: Any = SimpleNamespace(target=target, vocab_size=vocab)
    head = drafter.head(context)
    # The states up to the anchor, whose token comes last.
    news = News(
        told.states[None, :anchor], told.tokens[None, 1 : anchor + 1], torch.tensor([anchor]), torch.tensor([[0]])
    )
    found: list[Tensor] = []
    said: list[Tensor | None] = []

    def draw(logits: Tensor, chance: Tensor | None = None) -> Tensor:
        found.append(logits[0])
        said.append(chance)
        return told.tokens[None, anchor + len(found)]

    head.draft(news, States(context, head).empty(1), head.most, draw)
    return torch.stack(found), said
