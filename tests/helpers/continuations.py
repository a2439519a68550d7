"""What every drafter owes: plain decoding's greedy tokens, and the target's own distribution when sampling."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from chi_square import chi_square
from models import llama, prompts
from torch import Tensor
from transformers.generation import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_specdec import Drafter, SpeculationStats
from hf_specdec.engine.guard import GuardedSession
from hf_specdec.protocol import Draft, Sequences

BATCHES = {"one row": [9], "equal rows": [9, 9, 9, 9], "uneven rows": [3, 14, 1, 9]}
SMALL = 6
"""token ids of the target whose distribution is known; 0 is padding, which it may say all the same"""
STEPS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 1.5},
    "top-k": {"top_k": 3},
    "penalty": {"repetition_penalty": 1.3},
}

FORBIDDING: dict[str, dict[str, Any]] = {
    "suppressed": {"suppress_tokens": [3, 5]},
    "bad words": {"bad_words_ids": [[2], [4, 5], [6, 7, 3]]},
    "bias": {"sequence_bias": [[[2, 4], -torch.inf], [[3], -torch.inf], [[5], 1.0]]},
    "no repeated n-grams": {"no_repeat_ngram_size": 4},
    "least new tokens": {"eos_token_id": [4, 5], "min_new_tokens": 24},
    "least length": {"eos_token_id": [4, 5], "min_length": 24},
    "several": {"bad_words_ids": [[2, 3]], "suppress_tokens": [6], "no_repeat_ngram_size": 6},
}
"""Settings of `generate` whose processors give some tokens no chance."""


def same_greedy_text(drafter: Drafter, lengths: list[int], eos: int | None, vocab: int = 8) -> SpeculationStats:
    """Asserts that a greedy call gives plain decoding's tokens, twice; returns the second call's statistics."""
    target = llama(vocab=vocab)
    inputs = prompts(lengths, vocab)
    options: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    plain = target.generate(**inputs, **options)
    for _ in range(2):
        torch.testing.assert_close(target.generate(**inputs, **options, assistant_model=drafter), plain)
    assert drafter.last_stats is not None
    return drafter.last_stats


def proposes_nothing_forbidden(drafter: Drafter, lengths: list[int], settings: dict[str, Any], vocab: int = 8) -> None:
    """Asserts that no drafted token is ruled out by transformers' own processors, and that greedy text is plain's."""
    target = llama(vocab=vocab)
    inputs = prompts(lengths, vocab)
    inputs["input_ids"][:, 3::3] = inputs["input_ids"][:, :1]  # repeats, so that there is something to copy
    inputs["input_ids"] *= inputs["attention_mask"]
    options: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= settings
    allowed: list[bool] = []

    def watched(self: GuardedSession, sequences: Sequences, room: list[int], *given: Any) -> Draft:
        """Every draft, as it is fed."""
        processors = LogitsProcessorList(self.context.pick.processing.processors)
        assert processors
        before, lengths = sequences.ids.clone(), list(sequences.lengths)
        draft = drafted(self, sequences, room, *given)
        for b, length in enumerate(lengths):
            for token, prefix in _nodes(draft, before[b, :length], b):
                scores = processors(prefix[None], torch.zeros(1, vocab))
                allowed.append(bool(scores[0, token] > -torch.inf))
        return draft

    drafted = GuardedSession.draft
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GuardedSession, "draft", watched)
        out = target.generate(**inputs, **options, assistant_model=drafter)
    if not options["do_sample"]:
        torch.testing.assert_close(out, target.generate(**inputs, **options))
    assert allowed and all(allowed)


def _nodes(draft: Draft, text: Tensor, b: int) -> Iterator[tuple[int, Tensor]]:
    """Each drafted token of a row, and the text before it."""
    tokens = draft.tokens[b].tolist()
    parents = range(-1, len(tokens) - 1) if draft.parents is None else draft.parents[b]
    texts = [text]
    for node in range(draft.lengths[b]):
        before = texts[parents[node] + 1]
        yield tokens[node], before
        texts.append(torch.cat([before, draft.tokens[b, node : node + 1]]))


def sampling_p_value(drafter: Drafter, settings: dict[str, Any], rows: int = 3000) -> float:
    """Chi-square test of the first `STEPS` tokens' joint distribution over many rows with one looping prompt."""
    target = llama(vocab=SMALL)
    prompt = torch.tensor([[2, 3, 4, 2, 3, 4, 5, 2, 3]])
    torch.manual_seed(0)
    out = target.generate(
        input_ids=prompt.expand(rows, -1),
        attention_mask=torch.ones(rows, prompt.shape[1], dtype=torch.long),
        assistant_model=drafter,
        do_sample=True,
        max_new_tokens=STEPS + 2,
        pad_token_id=0,
        eos_token_id=None,
        **{"top_k": 0} | settings,
    )
    assert drafter.last_stats is not None and drafter.last_stats.accepted_tokens > 0 < drafter.last_stats.rejections
    new = out[:, prompt.shape[1] : prompt.shape[1] + STEPS]
    cells = (new * SMALL ** torch.arange(STEPS)).sum(1)
    counts = torch.bincount(cells, minlength=SMALL**STEPS).double()
    wanted = _joint(target, prompt, settings) * rows
    assert counts[wanted == 0].sum() == 0
    often = wanted >= 5
    counts = torch.cat([counts[often], counts[~often].sum()[None]])
    wanted = torch.cat([wanted[often], wanted[~often].sum()[None]])
    keep = wanted > 0
    return chi_square(counts[keep], wanted[keep] * rows / wanted.sum())


@torch.no_grad()
def _joint(target: Any, prompt: Tensor, settings: dict[str, Any]) -> Tensor:
    """[SMALL ** STEPS] exact probabilities; the first token is the lowest digit."""
    processors = LogitsProcessorList()
    if "repetition_penalty" in settings:
        processors.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    if "temperature" in settings:
        processors.append(TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        processors.append(TopKLogitsWarper(settings["top_k"]))
    ids, joint = prompt, torch.ones(1, dtype=torch.double)
    for _ in range(STEPS):
        p = processors(ids, target(ids).logits[:, -1]).double().softmax(-1)
        joint = (joint[None, :] * p.T).reshape(-1)
        tokens = torch.arange(SMALL).repeat_interleave(len(ids))[:, None]
        ids = torch.cat([ids.repeat(SMALL, 1), tokens], dim=1)
    return joint
