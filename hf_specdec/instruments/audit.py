"""Exactness audit: where two greedy outputs part, and how close the decision was.

In float32 they must not part. In lower precision a forward of several tokens rounds differently from one of a single
token, so a first difference is fair where plain decoding's own top two logits are within that rounding.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass
class Difference:
    """The first place where an output leaves plain decoding's."""

    position: int
    """new token, from 0"""
    plain_token: int | None
    """None where plain's text had ended"""
    other_token: int | None
    gap: float | None
    """plain's logit of its own token less that of the other; None where one text had ended by length"""
    rounding: float | None
    """one rounding step of the target's dtype at those logits"""
    top_two: bool
    """whether the two tokens are plain's own top two"""

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it: the top two, at most 4 rounding steps apart."""
        return self.top_two and self.gap is not None and self.rounding is not None and self.gap <= 4 * self.rounding


def first_difference(plain: list[int], other: list[int]) -> int | None:
    """Index of the first token in which two outputs differ (one may be longer), or None."""
    for i, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return i
    return None if len(plain) == len(other) else min(len(plain), len(other))


@torch.inference_mode()
def audit(
    target: PreTrainedModel, prompt: Tensor, plain: list[int], other: list[int], **generate: Any
) -> Difference | None:
    """Compare two greedy outputs for one prompt, with the logits that plain decoding itself sees there.

    Args:
        prompt: [1, P].
        plain: new tokens of plain decoding.
        other: new tokens of another method.
        generate: further arguments of both calls (`pad_token_id` and the like).
    """
    position = first_difference(plain, other)
    if position is None:
        return None
    tokens = [ids[position] if position < len(ids) else None for ids in (plain, other)]
    if tokens[0] is None or tokens[1] is None:
        return Difference(position, tokens[0], tokens[1], None, None, False)
    options = generate | {"max_new_tokens": position + 1, "do_sample": False}
    output = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    if output.sequences[0, prompt.shape[1] : -1].tolist() != plain[:position]:
        # Plain decoding of a batch may have parted, by its padding's rounding, from what it says of a row alone.
        written = torch.cat([prompt, prompt.new_tensor([plain[:position]])], dim=1)
        found = audit(target, written, plain[position:], other[position:], **generate)
        return replace(found, position=position) if found is not None else None
    logits = output.logits[-1][0].float()
    a, b = (logits[token].item() for token in tokens)
    rounding = torch.finfo(target.dtype).eps * max(abs(a), abs(b))
    top_two = set(tokens) == set(logits.topk(2).indices.tolist())
    return Difference(position, tokens[0], tokens[1], a - b, rounding, top_two)
