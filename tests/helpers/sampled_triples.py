"""Three sampled tokens in a row: how often each triple came out, and how likely it is."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from chi_square import chi_square
from torch import Tensor
from transformers.generation import LogitsProcessorList
from transformers.generation import logits_process as lp

from hf_specdec.drafters.base import Drafter

VOCAB, ROWS, FEWER, CHUNK, NEW = 5, 50_000, 10_000, 10_000, 4
LEVEL = 1e-4
PROMPT = torch.tensor([[1, 3]])
SETTINGS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    # what generate is told, and the same by transformers' own processors
    "temperature": ({"temperature": 1.7}, [lp.TemperatureLogitsWarper(1.7)]),
    "top-k": ({"temperature": 2.0, "top_k": 3}, [lp.TemperatureLogitsWarper(2.0), lp.TopKLogitsWarper(3)]),
    "top-p": ({"temperature": 1.5, "top_p": 0.8}, [lp.TemperatureLogitsWarper(1.5), lp.TopPLogitsWarper(0.8)]),
    "penalties": (
        {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2},
        [lp.RepetitionPenaltyLogitsProcessor(1.8), lp.NoRepeatNGramLogitsProcessor(2)],
    ),
}


def table(seed: int) -> Callable[[Tensor], Tensor]:
    """Draft logits that depend on the last token only."""
    logits = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    return lambda last: logits[last]


@pytest.fixture(scope="module")
def target() -> Any:
    return models.small(VOCAB)


def joint(target: Any, processors: list[Any]) -> Tensor:
    """[V, V, V] the exact distribution of the last three of `NEW` tokens, from all texts there are."""
    texts, mass = PROMPT, torch.ones(1, dtype=torch.float64)
    for _ in range(NEW):
        with torch.no_grad():
            logits = target(texts).logits[:, -1].float()
        p = LogitsProcessorList(processors)(texts, logits).double().softmax(-1)
        mass = (mass[:, None] * p).flatten()
        tokens = torch.arange(VOCAB).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), tokens], dim=1)
    return mass.view(VOCAB, -1).sum(0)


def sample(target: Any, drafter: Drafter, rows: int = ROWS, chunk: int = CHUNK, **settings: Any) -> Tensor:
    """How often each triple came out."""
    counts = torch.zeros(VOCAB**3, dtype=torch.long)
    base = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0}
    for seed in range(rows // chunk):
        torch.manual_seed(seed)
        prompt = PROMPT.expand(chunk, -1)
        mask = torch.ones_like(prompt)
        text = target.generate(prompt, attention_mask=mask, assistant_model=drafter, **base | settings)
        a, b, c = text[:, -3:].T
        counts += torch.bincount((a * VOCAB + b) * VOCAB + c, minlength=VOCAB**3)
    return counts


def p_value(counts: Tensor, p: Tensor) -> float:
    """Of a chi-square test; cells that expect fewer than 5 are taken together."""
    assert counts[p == 0].sum() == 0, "a text of probability 0 was sampled"
    expected = p * counts.sum()
    rare = expected < 5
    observed = [*counts[~rare].tolist(), int(counts[rare].sum())]
    wanted = [*expected[~rare].tolist(), float(expected[rare].sum())]
    if wanted[-1] < 5:
        observed[-2:], wanted[-2:] = [sum(observed[-2:])], [sum(wanted[-2:])]
    return chi_square(observed, wanted)
