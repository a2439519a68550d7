"""Take one generation apart: decode with the drafter and plainly, and put texts and probabilities to every round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafters.pearl import Timeline
from ...stats import SpeculationStats
from ...target.devices import input_device
from ..bench.decoding import Generation, decode
from ..bench.methods import PLAIN, Method
from ..instruments.audit import Audit, Difference
from ..instruments.recording import Node, RecordingDrafter, Round
from ..loading.checks import check_tokens
from ..loading.drafters import own_model
from ..loading.models import Pair
from ..loading.prompts import WARM_UP_TEXT
from ..loading.sampling import sampling_at
from .settings import ExplainSettings
from .timeline import see_worker, timeline_of

COSTLIEST = 10
"""rejections that are shown"""


class Candidate(NamedTuple):
    """A token, and how likely a model found it."""

    text: str
    prob: float


@dataclass
class Rejection:
    """A drafted token that the target replaced."""

    round: int
    drafted: str
    replaced_by: str
    target_top: list[Candidate]
    draft_top: list[Candidate]
    """empty for drafters without a model"""
    wasted_tokens: int
    wasted_seconds: float


@dataclass
class TokenInfo:
    """A token as it is shown."""

    text: str
    kind: str
    """first (from the prefill), accepted, rejected, own (the target's correction or bonus token), dropped (drafted
    after a rejection)"""
    p: float | None
    """the target's probability of it"""
    q: float | None
    """the draft's"""


@dataclass
class Explanation:
    """All that is shown of a generation."""

    settings: ExplainSettings
    lines: list[list[TokenInfo]]
    """the prefill's token, a line per round, and what the target wrote alone after the drafter was dropped"""
    trees: list[list[tuple[str, Node]]]
    """text and node of each drafted token, per line; empty where the draft was no tree"""
    rounds: list[Round]
    rejections: list[Rejection]
    """the costliest first"""
    stats: SpeculationStats | None
    ours: Generation
    plain: Generation
    timeline: Timeline
    same_text: bool | None
    """None when sampling"""
    exactness: str
    """whether the text is plain decoding's, in a sentence"""


def explain(
    settings: ExplainSettings,
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
) -> Explanation:
    """Decode the prompt with the drafter and plainly, both after a warm-up, and look at every round."""
    recorder = RecordingDrafter(settings.load_drafter(Pair(tokenizer, target, draft)))
    draft = own_model(recorder.inner)
    warm_up, inputs = (
        {name: found[name] for name in ("input_ids", "attention_mask")}
        for found in (
            tokenizer(t, return_tensors="pt").to(input_device(target)) for t in (WARM_UP_TEXT, settings.prompt)
        )
    )
    prompt = inputs["input_ids"]
    check_tokens(prompt, settings.prompt)
    options: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "pad_token_id": tokenizer.pad_token_id}
    options |= sampling_at(settings.temperature)

    def generated(method: Method) -> Generation:
        decode(target, method, warm_up, **options | {"max_new_tokens": min(16, settings.max_new_tokens)})
        return decode(target, method, inputs, settings.seed, **options)

    plain = generated(Method(PLAIN))
    ours = generated(Method(settings.spec, {"assistant_model": recorder}, draft, recorder))
    timeline = timeline_of(recorder.inner, ours.meter, recorder.rounds)
    see_worker(ours.meter, timeline)
    (new,), (expected,) = ours.rows, plain.rows
    greedy = settings.temperature == 0
    difference = Audit(target, prompt, expected, **options).difference(new) if greedy else None
    ids = torch.cat([prompt, torch.tensor([new], device=prompt.device)], dim=1)
    p = _next_probs(target, ids, settings.temperature)
    q = _next_probs(draft, ids, settings.temperature) if draft is not None else None
    reader = _Reader(tokenizer, prompt.shape[1], new, p, q)
    return Explanation(
        settings=settings,
        lines=reader.lines(recorder.rounds),
        trees=[[], *([(reader.text(node.token), node) for node in r.tree] for r in recorder.rounds)],
        rounds=recorder.rounds,
        rejections=reader.rejections(recorder.rounds)[:COSTLIEST],
        stats=recorder.last_stats,
        ours=ours,
        plain=plain,
        timeline=timeline,
        same_text=expected == new if greedy else None,
        exactness=_exactness(tokenizer, difference) if greedy else SAMPLED,
    )


SAMPLED = "Exactness: sampled text is not compared; its distribution is the target's."


def _exactness(tokenizer: PreTrainedTokenizerBase, difference: Difference | None) -> str:
    if difference is None:
        return "Exactness: every token is plain decoding's."
    unexplained = difference.gap is not None and not difference.near_tie
    return f"Exactness: the text {difference.said(tokenizer)}." + (" Please report this." if unexplained else "")


@torch.inference_mode()
def _next_probs(model: PreTrainedModel, ids: Tensor, temperature: float) -> Tensor:
    """[columns, V] each position's probabilities of the next token, float32, in one forward over the finished text."""
    logits = model(input_ids=ids).logits[0].float()
    return torch.softmax(logits / (temperature or 1.0), dim=-1)


@dataclass
class _Reader:
    """Puts texts and probabilities to the tokens of the rounds."""

    tokenizer: PreTrainedTokenizerBase
    prompt_length: int
    new: list[int]
    p: Tensor
    q: Tensor | None

    def lines(self, rounds: Sequence[Round]) -> list[list[TokenInfo]]:
        at = 1  # the prefill's token comes before any round
        lines = [[self._info(self.new[0], 0, "first")]]
        for r in rounds:
            line = [self._info(token, at + i, "accepted") for i, token in enumerate(r.tokens[: r.accepted])]
            if r.rejected is not None:
                line.append(self._info(r.rejected, at + r.accepted, "rejected"))
            dropped = r.draft[r.accepted + (r.rejected is not None) :]
            line += [TokenInfo(self.text(token), "dropped", None, None) for token in dropped]
            line += [self._info(t, at + r.accepted + i, "own") for i, t in enumerate(r.tokens[r.accepted :])]
            lines.append(line)
            at += len(r.tokens)
        alone = [self._info(token, at + i, "own") for i, token in enumerate(self.new[at:])]
        return [*lines, alone] if alone else lines

    def rejections(self, rounds: Sequence[Round]) -> list[Rejection]:
        found, at = [], 1
        for number, r in enumerate(rounds, start=1):
            if r.rejected is not None:
                position = at + r.accepted
                found.append(
                    Rejection(
                        round=number,
                        drafted=self.text(r.rejected),
                        replaced_by=self.text(r.tokens[r.accepted]),
                        target_top=self._top(self.p, position),
                        draft_top=self._top(self.q, position) if self.q is not None else [],
                        wasted_tokens=r.drafted - r.accepted,
                        wasted_seconds=r.wasted_seconds,
                    )
                )
            at += len(r.tokens)
        return sorted(found, key=lambda rejection: (-rejection.wasted_seconds, rejection.round))

    def text(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def _info(self, token: int, position: int, kind: str) -> TokenInfo:
        row = self.prompt_length + position - 1
        q = self.q[row, token].item() if self.q is not None and token < self.q.shape[1] else None
        return TokenInfo(self.text(token), kind, self.p[row, token].item(), q)

    def _top(self, probs: Tensor, position: int) -> list[Candidate]:
        top = probs[self.prompt_length + position - 1].topk(2)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [Candidate(self.text(token), prob) for token, prob in pairs]
