"""Appendix D.1: let the target write, look at every position of its text, and keep what was seen on disk.

One shard per batch of prompts, written whole or not at all, with random numbers of its own: an extraction that was
interrupted and taken up again gives the same files as one that was not.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafters.disco.classifier import EXTRA
from ...drafters.disco.drafter import fingerprint
from ...errors import SpeculationError
from ...target.devices import input_device
from ...tools.instruments.ends import until_end
from ...tools.loading.chat import batch, prompt_ids
from ...tools.loading.outputs import writable_folder
from ...tools.loading.prompts import Prompt
from ...tools.loading.sampling import sampling_at
from ..folder import hold_to
from .records import Record, record_text

SHARD_ROWS = 16
"""prompts per shard, decoded as one batch"""
MANIFEST = "extraction.json"


@dataclass(frozen=True)
class Regime:
    """How the target writes."""

    do_sample: bool
    max_new_tokens: int
    k: int
    seed: int
    lookup: bool = True

    def options(self) -> dict[str, Any]:
        """For `generate`: sampling is from the model's own distribution."""
        return {"max_new_tokens": self.max_new_tokens, "num_beams": 1} | sampling_at(1.0 if self.do_sample else 0.0)


def extract(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    regime: Regime,
    folder: str | Path,
    label: str = "records",
) -> list[Record]:
    """Records of the target's continuation of each prompt; shards already in `folder` are taken as they are.

    Raises:
        SpeculationError: no prompt; a continuation of less than two tokens everywhere; or a folder that holds an
            extraction of other models, prompts or settings.
    """
    if not prompts:
        raise SpeculationError(f"no prompts to extract {label} from; give at least one")
    folder = writable_folder(folder)
    rows = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    hold_to(folder / MANIFEST, _manifest(target, draft, rows, regime))
    starts = range(0, len(rows), SHARD_ROWS)
    for number, start in enumerate(tqdm(starts, desc=f"extracting {label}", unit=" shards")):
        path = folder / f"{number:05d}.safetensors"
        if not path.exists():
            texts = _write(target, tokenizer.pad_token_id, rows[start : start + SHARD_ROWS], regime, number)
            records = [
                record_text(target, draft, ids, prompt, regime.k, regime.do_sample, regime.lookup)
                for ids, prompt in texts
            ]
            _save(records, path)
    records = list(load(folder))
    if not records:
        raise SpeculationError(
            f"the target ended every text of the {label} within two tokens, so there is nothing to learn from; "
            "give prompts that it continues"
        )
    return records


def load(folder: str | Path) -> Iterator[Record]:
    """The records of all shards, in order."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors = load_file(path)
        lengths = tensors.pop("lengths").tolist()
        tensors["accepted"] = tensors["accepted"].bool()
        pieces = {name: tensor.split(lengths) for name, tensor in tensors.items()}
        for i in range(len(lengths)):
            yield Record(**{name: piece[i] for name, piece in pieces.items()})


def _write(
    target: PreTrainedModel, pad: int | None, rows: Sequence[list[int]], regime: Regime, number: int
) -> Iterator[tuple[Tensor, int]]:
    """The target's texts [L] without padding, and how much of each is prompt. Those of one token are left out."""
    inputs = batch(rows, pad, input_device(target))
    torch.manual_seed(regime.seed * 100_003 + number)
    output = target.generate(**inputs, pad_token_id=pad, **regime.options())
    columns = inputs["input_ids"].shape[1]
    for row, prompt in zip(output, map(len, rows), strict=True):
        length = len(until_end(target, row[columns:].tolist()))
        if length > 1:
            yield row[columns - prompt : columns + length], prompt


def _save(records: list[Record], path: Path) -> None:
    """All or nothing: a reader never sees half a shard."""
    if not records:
        tensors = {"lengths": torch.zeros(0, dtype=torch.long)}
        tensors |= {f.name: torch.zeros(0) for f in fields(Record)}
    else:
        tensors = {f.name: torch.cat([getattr(record, f.name) for record in records]) for f in fields(Record)}
        tensors["lengths"] = torch.tensor([len(record) for record in records])
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, path)


def _manifest(
    target: PreTrainedModel, draft: PreTrainedModel, rows: Sequence[list[int]], regime: Regime
) -> dict[str, Any]:
    return vars(regime) | {
        "target": fingerprint(target),
        "draft": fingerprint(draft),
        "features": regime.k + EXTRA,
        "prompts": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
    }
