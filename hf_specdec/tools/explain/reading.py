"""Take one generation apart: decode with the drafter and plainly, and put texts and probabilities to every round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...target.devices import input_device
from ..instruments.audit import Audit, Difference
from ..instruments.meter import Meter, metered
from ..instruments.recording import RecordingDrafter, Round
from ..loading.checks import check_tokens
from ..loading.drafters import own_model
from ..loading.models import Pair
from ..loading.prompts import WARM_UP_TEXT
from ..loading.sampling import sampling_at
from .explanation import Candidate, ExplainSettings, Explanation, Rejection, TokenInfo, TreeNode
from .timeline import see_worker, timeline_of

COSTLIEST = 10


def explain(
    settings: ExplainSettings,
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
) -> Explanation:
    """Decode the prompt with the drafter and plainly, both after a warm-up, and look at every round."""
    recorder = RecordingDrafter(settings.load_drafter(Pair(tokenizer, target, draft)))
    draft = own_model(recorder.inner)
    inputs = tokenizer(settings.prompt, return_tensors="pt").to(input_device(target))
    prompt = inputs["input_ids"]
    check_tokens(prompt, settings.prompt)
    options: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "pad_token_id": tokenizer.pad_token_id}
    options |= sampling_at(settings.temperature)

    def generate(assistant: RecordingDrafter | None) -> tuple[list[int], Meter]:
        extra = {"assistant_model": assistant} if assistant is not None else {}
        arguments = {"input_ids": prompt, "attention_mask": inputs["attention_mask"]} | options | extra
        warm_up = tokenizer(WARM_UP_TEXT, return_tensors="pt").to(input_device(target))
        warm_up = {name: warm_up[name] for name in ("input_ids", "attention_mask")}
        target.generate(**arguments | warm_up | {"max_new_tokens": min(16, settings.max_new_tokens)})
        torch.manual_seed(settings.seed)
        with metered(target, draft) as meter:
            output = target.generate(**arguments)
        return output[0, prompt.shape[1] :].tolist(), meter

    plain, plain_meter = generate(None)
    new, meter = generate(recorder)
    timeline = timeline_of(recorder.inner, meter, recorder.rounds)
    see_worker(meter, timeline)
    greedy = settings.temperature == 0
    difference = Audit(target, prompt, plain, **options).difference(new) if greedy else None
    ids = torch.cat([prompt, torch.tensor([new], device=prompt.device)], dim=1)
    p = _next_probs(target, ids, settings.temperature)
    q = _next_probs(draft, ids, settings.temperature) if draft is not None else None
    reader = _Reader(tokenizer, prompt.shape[1], new, p, q)
    return Explanation(
        settings=settings,
        lines=reader.lines(recorder.rounds),
        trees=reader.trees(recorder.rounds),
        rounds=recorder.rounds,
        rejections=reader.rejections(recorder.rounds)[:COSTLIEST],
        stats=recorder.last_stats,
        meter=meter,
        plain_meter=plain_meter,
        timeline=timeline,
        new_tokens=len(new),
        plain_tokens=len(plain),
        same_text=plain == new if greedy else None,
        difference=difference,
        difference_texts=_difference_texts(tokenizer, difference),
    )


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
            line += [TokenInfo(self._text([token]), "dropped", None, None) for token in dropped]
            line += [self._info(t, at + r.accepted + i, "own") for i, t in enumerate(r.tokens[r.accepted :])]
            lines.append(line)
            at += len(r.tokens)
        alone = [self._info(token, at + i, "own") for i, token in enumerate(self.new[at:])]
        return [*lines, alone] if alone else lines

    def trees(self, rounds: Sequence[Round]) -> list[list[TreeNode]]:
        shown = [
            [TreeNode(self._text([node.token]), node.parent, node.fate, node.estimate) for node in r.tree]
            for r in rounds
        ]
        return [[], *shown]  # the prefill's token had none

    def rejections(self, rounds: Sequence[Round]) -> list[Rejection]:
        found, at = [], 1
        for number, r in enumerate(rounds):
            if r.rejected is not None:
                position = at + r.accepted
                found.append(
                    Rejection(
                        round=number + 1,
                        position=position,
                        drafted=self._text([r.rejected]),
                        replaced_by=self._text([r.tokens[r.accepted]]),
                        target_top=self._top(self.p, position),
                        draft_top=self._top(self.q, position) if self.q is not None else [],
                        wasted_tokens=r.drafted - r.accepted,
                        wasted_seconds=r.wasted_seconds,
                    )
                )
            at += len(r.tokens)
        return sorted(found, key=lambda rejection: (-rejection.wasted_seconds, rejection.round))

    def _info(self, token: int, position: int, kind: str) -> TokenInfo:
        row = self.prompt_length + position - 1
        q = self.q[row, token].item() if self.q is not None and token < self.q.shape[1] else None
        return TokenInfo(self._text([token]), kind, self.p[row, token].item(), q)

    def _top(self, probs: Tensor, position: int) -> list[Candidate]:
        top = probs[self.prompt_length + position - 1].topk(2)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [Candidate(self._text([token]), prob) for token, prob in pairs]

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def _difference_texts(tokenizer: PreTrainedTokenizerBase, difference: Difference | None) -> tuple[str, str] | None:
    if difference is None:
        return None
    plain, other = (
        "(end)" if token is None else tokenizer.decode([token])
        for token in (difference.plain_token, difference.other_token)
    )
    return plain, other
