"""What is timed: a target and its draft model, as costly as a large pair, and the prompts that they answer."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from place import DEVICE
from samples import SAMPLES, Sample
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.tools.loading.chat import prompt_ids
from hf_specdec.tools.loading.models import TargetSettings, load_model, load_tokenizer
from hf_specdec.tools.loading.prompts import load_prompts

TESTS = Path(__file__).parent.parent
PAIR = TESTS / "pair"
CUT = TESTS.parent / "hub_configs" / "draft_model" / "draft_model"
"""the draft model of a GGUF file"""
DRY = DEVICE.type != "cuda"
SETS = ("summaries", "chat", "code", "maths")
"""of a real model's prompts"""
TURNS = 12
"""prompts that are decoded if there is time"""


@dataclass(frozen=True)
class Size:
    """A target as costly as one of so many parameters and layers; None leaves what it is."""

    parameters: float | None = None
    layers: int | None = None


LARGE = Size(layers=1) if DRY else Size(8e9, 32)
DRAFT = Size(layers=1) if DRY else Size(5e8, 8)
"""of the draft model where drafting beside the target is timed: what takes hardly any time gains nothing there"""


@dataclass(frozen=True)
class Subject:
    """What decodes, and what it is asked."""

    size: str
    target: Any
    draft: Any
    tokenizer: Any
    asked: Sequence[Sample]
    """the longest first, as a longer static cache would be compiled anew"""

    def prompts(self, rows: int, first: int) -> dict[str, Tensor]:
        texts = [self.asked[(first + row) % len(self.asked)].text for row in range(rows)]
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True)
        return {name: inputs[name].to(DEVICE) for name in ("input_ids", "attention_mask")}

    def context(self, tokens: int) -> dict[str, Tensor]:
        """All that it is asked, again and again: a row of so many tokens."""
        ids = torch.cat([self.prompts(1, turn)["input_ids"] for turn in range(len(self.asked))], 1)
        ids = ids.repeat(1, -(-tokens // ids.shape[1]))[:, :tokens]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def load(gguf: str | None) -> Subject:
    """A target that costs what 8 B parameters cost, and its draft model: SmolLM2 and its cut draft, or the pair."""
    size, target, draft, tokenizer, asked = _real(gguf) if gguf else _pair()
    make_costly(target, LARGE)
    target.generation_config.pad_token_id = draft.generation_config.pad_token_id = tokenizer.pad_token_id
    longest = max(asked, key=lambda sample: len(sample.text))
    return Subject(size, target, draft, tokenizer, [longest, *(sample for sample in asked if sample is not longest)])


def _pair() -> tuple[str, Any, Any, Any, Sequence[Sample]]:
    """No text of theirs ends before its last token."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(PAIR / name, dtype=torch.bfloat16).to(DEVICE).eval()
        for name in ("target", "draft")
    )
    target.generation_config.eos_token_id = draft.generation_config.eos_token_id = None
    return "8B", target, draft, AutoTokenizer.from_pretrained(PAIR / "target", padding_side="left"), SAMPLES


def _real(gguf: str) -> tuple[str, Any, Any, Any, Sequence[Sample]]:
    """It answers prompts of four sets in turn, and ends its texts where it likes."""
    source = TargetSettings(target=gguf, dtype="bfloat16", device=str(DEVICE))
    target, tokenizer = load_model(source), load_tokenizer(source)
    draft = load_model(TargetSettings(target=str(CUT), dtype="bfloat16", device=str(DEVICE)))
    sets = [[(name, prompt) for prompt in load_prompts(name, TURNS // len(SETS))] for name in SETS]
    asked = [
        Sample(name, tokenizer.decode(prompt_ids(tokenizer, prompt)))
        for several in zip(*sets, strict=True)
        for name, prompt in several
    ]
    return f"{Path(gguf).stem} as 8B", target, draft, tokenizer, asked


def make_costly(model: Any, size: Size) -> None:
    """As one of this size; its text stays what it is."""
    if size.layers is not None:
        deepen(model, size.layers)
    if size.parameters is not None:
        mlp, hidden = model.model.layers[0].mlp, model.config.hidden_size
        per_unit, own = 3 * hidden * len(model.model.layers), sum(p.numel() for p in model.parameters())
        units = mlp.down_proj.in_features + (size.parameters - own) / per_unit
        widen(model, max(mlp.down_proj.in_features, 64 * round(units / 64)))


@torch.no_grad()
def widen(target: Any, units: int) -> None:
    """Give each MLP of a Llama so many hidden units. The new ones read at random and add exactly nothing."""
    for layer in target.model.layers:
        mlp = layer.mlp
        for linear in (mlp.gate_proj, mlp.up_proj):
            old, extra = linear.weight, units - linear.out_features
            new = old.new_empty(extra, linear.in_features).normal_(0, old.float().std().item())
            linear.weight, linear.out_features = torch.nn.Parameter(torch.cat([old, new]), False), units
        old = mlp.down_proj.weight
        new = old.new_zeros(len(old), units - mlp.down_proj.in_features)
        mlp.down_proj.weight, mlp.down_proj.in_features = torch.nn.Parameter(torch.cat([old, new], 1), False), units


def deepen(target: Any, layers: int) -> None:
    """Append layers of a Llama that add exactly nothing: a large model's launches, and the small one's text. Or leave
    the last ones out."""
    stack = target.model.layers
    del stack[layers:]
    for index in range(len(stack), layers):
        layer = copy.deepcopy(stack[0])
        layer.self_attn.layer_idx = index
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
        stack.append(layer)
    for config in (target.config, target.model.config):  # a cut draft has two
        config.num_hidden_layers = len(stack)
