"""Take one generation apart: decode with the drafter and plainly, and put texts to every round."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafters.pearl import Timeline
from ...stats import SpeculationStats
from ...target.devices import input_device
from ..bench.decoding import Generation, decode
from ..bench.method import Method
from ..bench.methods import PLAIN
from ..instruments.audit import Audit
from ..instruments.recording import RecordingDrafter, Round
from ..loading.checks import check_tokens
from ..loading.drafters import DrafterSettings, own_model
from ..loading.models import Pair
from ..loading.prompts import WARM_UP_TEXT
from ..loading.sampling import sampling_at
from .timeline import timeline_of

COSTLIEST = 10
"""rejections that are shown"""
SAMPLED = "Exactness: sampled text is not compared; its distribution is the target's."

Likeliest = list[tuple[str, float]]
"""tokens, and how likely a model found them"""


class Token(NamedTuple):
    """A token as it is shown."""

    text: str
    kind: str
    """first (from the prefill), accepted, rejected, own (the target's correction or bonus token), dropped (drafted
    after a rejection)"""


class Rejection(NamedTuple):
    """A drafted token that the target replaced."""

    round: int
    drafted: str
    replaced_by: str
    target_top: Likeliest
    draft_top: Likeliest
    """empty for drafters without a model"""
    wasted_tokens: int
    wasted_seconds: float


@dataclass
class Explanation:
    """All that is shown of a generation."""

    lines: list[list[Token]]
    """the prefill's token, a line per round, and what the target wrote alone after the drafter was dropped"""
    rounds: list[Round]
    rejections: list[Rejection]
    """the costliest first"""
    stats: SpeculationStats | None
    ours: Generation
    plain: Generation
    timeline: Timeline
    exactness: str
    """whether the text is plain decoding's, in a sentence"""


def explain(
    settings: DrafterSettings, pair: Pair, prompt: str, max_new_tokens: int, temperature: float = 0.0, seed: int = 0
) -> Explanation:
    """Decode the prompt with the drafter and plainly, both after a warm-up, and look at every round."""
    target, tokenizer = pair.target, pair.tokenizer
    recorder = RecordingDrafter(settings.load_drafter(pair))
    draft = own_model(recorder.inner)
    warm_up, inputs = (
        {name: found[name] for name in ("input_ids", "attention_mask")}
        for found in (tokenizer(text, return_tensors="pt").to(input_device(target)) for text in (WARM_UP_TEXT, prompt))
    )
    ids = inputs["input_ids"]
    check_tokens(ids, prompt)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "pad_token_id": tokenizer.pad_token_id}
    options |= sampling_at(temperature)

    def generated(method: Method) -> Generation:
        decode(target, method, warm_up, **options | {"max_new_tokens": min(16, max_new_tokens)})
        return decode(target, method, inputs, seed, **options)

    plain = generated(Method(PLAIN))
    ours = generated(Method(settings.spec, {"assistant_model": recorder}, draft, recorder))
    (new,), (expected,) = ours.rows, plain.rows
    exactness = SAMPLED if temperature else _exactness(tokenizer, Audit(target, ids, expected, **options), new)
    whole = torch.cat([ids, torch.tensor([new], device=ids.device)], dim=1)
    models = [target] if draft is None else [target, draft]
    chances = [_next_probs(model, whole, temperature)[ids.shape[1] - 1 :] for model in models]
    rejections = _rejections(tokenizer, recorder.rounds, chances)
    return Explanation(
        lines=_lines(tokenizer, recorder.rounds, new),
        rounds=recorder.rounds,
        rejections=sorted(rejections, key=lambda found: (-found.wasted_seconds, found.round))[:COSTLIEST],
        stats=recorder.last_stats,
        ours=ours,
        plain=plain,
        timeline=timeline_of(recorder.inner, ours.meter, recorder.rounds),
        exactness=exactness,
    )


def _exactness(tokenizer: PreTrainedTokenizerBase, audit: Audit, new: list[int]) -> str:
    found = audit.difference(new)
    if found is None:
        return "Exactness: every token is plain decoding's."
    unexplained = found.gap is not None and not found.near_tie
    return f"Exactness: the text {found.said(tokenizer)}." + (" Please report this." if unexplained else "")


@torch.inference_mode()
def _next_probs(model: PreTrainedModel, ids: Tensor, temperature: float) -> Tensor:
    """[columns, V] each position's probabilities of the next token, float32, in one forward over the finished text."""
    logits = model(input_ids=ids).logits[0].float()
    return torch.softmax(logits / (temperature or 1.0), dim=-1)


def _lines(tokenizer: PreTrainedTokenizerBase, rounds: list[Round], new: list[int]) -> list[list[Token]]:
    def named(tokens: list[int], kind: str) -> list[Token]:
        return [Token(tokenizer.decode([token]), kind) for token in tokens]

    lines = [named(new[:1], "first")]  # the prefill's token comes before any round
    for r in rounds:
        rejected = [] if r.rejected is None else [r.rejected]
        dropped = r.draft[r.accepted + len(rejected) :]
        line = named(r.tokens[: r.accepted], "accepted") + named(rejected, "rejected") + named(dropped, "dropped")
        lines.append(line + named(r.tokens[r.accepted :], "own"))
    alone = new[1 + sum(len(r.tokens) for r in rounds) :]
    return [*lines, named(alone, "own")] if alone else lines


def _rejections(tokenizer: PreTrainedTokenizerBase, rounds: list[Round], chances: list[Tensor]) -> list[Rejection]:
    """
    Args:
        chances: [new tokens, V] of each new token, by the target, and by the draft where there is one.
    """

    def top(place: int) -> list[Likeliest]:
        tops = [probs[place].topk(2) for probs in chances]
        return [[(tokenizer.decode([i]), p) for p, i in zip(*map(Tensor.tolist, two), strict=True)] for two in tops]

    found, at = [], 1
    for number, r in enumerate(rounds, start=1):
        if r.rejected is not None:
            target_top, draft_top = [*top(at + r.accepted), []][:2]
            drafted, own = (tokenizer.decode([token]) for token in (r.rejected, r.tokens[r.accepted]))
            wasted = r.drafted - r.accepted
            found.append(Rejection(number, drafted, own, target_top, draft_top, wasted, r.wasted_seconds))
        at += len(r.tokens)
    return found
