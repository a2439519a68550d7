"""Requests of many lengths and a drafter of each kind: what tests of `BatchDecoder` share."""

import random
from typing import Any

import models
import torch
from disco_models import classifier

from hf_specdec import DiscoDrafter, DraftModelDrafter, HybridDrafter, NGramDrafter, PromptLookupDrafter, SuffixDrafter
from hf_specdec.train.ngram import train_ngram

REQUESTS = [(5, 20), (1, 7), (30, 12), (17, 1), (8, 33), (3, 3), (12, 18), (26, 9), (2, 25), (9, 14)]
"""tokens of the prompt, and new ones"""
ENDS = [11, 23]
"""tokens that end a text"""


def _close_draft() -> Any:
    """Often agrees with the target."""
    model = models.llama(eos_token_id=ENDS)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for weight in model.parameters():
            weight += 0.05 * weight.std().nan_to_num(0.1) * torch.randn_like(weight)
    return model


TARGET, DRAFT = models.llama(eos_token_id=ENDS), _close_draft()


def texts(seed: int = 0) -> list[list[int]]:
    """Prompts in which words recur."""
    dice = random.Random(seed)
    words = [[dice.randrange(2, 97) for _ in range(3)] for _ in range(6)]
    return [[x for _ in range(n) for x in dice.choice(words)][:n] for n, _ in REQUESTS]


def plain(model: Any, ids: list[int], new: int, **options: Any) -> list[int]:
    options = {"do_sample": False, "pad_token_id": 0} | options
    out = model.generate(torch.tensor([ids]), max_new_tokens=new, speculation_type="none", **options)
    return out[0, len(ids) :].tolist()


def made(kind: str) -> Any:
    """A drafter of each kind."""
    counted = [[random.Random(i).randrange(97) for _ in range(60)] for i in range(4)]
    makers: dict[str, Any] = {
        "nobody": lambda: None,
        "lookup": PromptLookupDrafter,
        "lookup, trees": lambda: PromptLookupDrafter(num_branches=3),
        "suffix": SuffixDrafter,
        "n-gram": lambda: NGramDrafter(train_ngram(counted, 97, order=2)),
        "draft model": lambda: DraftModelDrafter(DRAFT),
        "draft model, 3": lambda: DraftModelDrafter(DRAFT, num_draft_tokens=3),
        "draft model, trees": lambda: DraftModelDrafter(DRAFT, num_draft_tokens=3, num_candidates=3),
        "hybrid": lambda: HybridDrafter(DRAFT),
        "hybrid, 2": lambda: HybridDrafter(DRAFT, num_draft_tokens=2, memory_mb=1),
        "DISCO": lambda: DiscoDrafter(DRAFT, classifier(), rule="token", tau=0.3, max_draft_tokens=6),
        "DISCO, budget": lambda: DiscoDrafter(DRAFT, classifier(), max_draft_tokens=6),
    }
    return makers[kind]()


KINDS = [
    "nobody",
    "lookup",
    "lookup, trees",
    "suffix",
    "n-gram",
    "draft model",
    "draft model, 3",
    "draft model, trees",
    "hybrid",
    "hybrid, 2",
    "DISCO",
    "DISCO, budget",
]
