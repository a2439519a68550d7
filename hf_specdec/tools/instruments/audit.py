"""Exactness audit: where two greedy outputs part, and how close the decision was.

In float32 they must not part. In lower precision a forward of several tokens rounds differently from one of a single
token, so a first difference is fair where plain decoding's own top two logits are within that rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOP_TWO_STEPS, NEXT_STEPS = 4, 2
"""rounding steps of the dtype that plain decoding's two likeliest tokens, or its likeliest and one of the next, may be
apart for a first difference to be a near tie"""


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
        """Whether rounding explains it: the top two, or one of the next, at most so many steps apart."""
        if self.gap is None or self.rounding is None:
            return False
        return self.gap <= (TOP_TWO_STEPS if self.top_two else NEXT_STEPS) * self.rounding

    def said(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Where the texts differ, and whether rounding explains it, in a sentence without its subject."""
        place = f"differs at new token {self.position}"
        if self.gap is None or self.rounding is None:
            return f"{place}: one text has ended there, the other goes on"
        plain, other = (repr(tokenizer.decode([token])) for token in (self.plain_token, self.other_token))
        verdict = "a near tie" if self.near_tie else "NOT a near tie"
        return (
            f"{place}: {other} instead of {plain}, whose logits are {self.gap:.4f} apart, "
            f"{self.gap / self.rounding:.1f} rounding steps: {verdict}"
        )


def first_difference(plain: list[int], other: list[int]) -> int | None:
    """Index of the first token in which two outputs differ (one may be longer), or None."""
    for i, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return i
    return None if len(plain) == len(other) else min(len(plain), len(other))


class Audit:
    """Where outputs for one prompt leave plain decoding's, with the logits that plain decoding itself sees there.

    It decodes plainly once, when the first difference is looked up, and again only for a later one.
    """

    def __init__(self, target: PreTrainedModel, prompt: Tensor, plain: list[int], **generate: Any) -> None:
        """
        Args:
            prompt: [1, P].
            plain: new tokens of plain decoding.
            generate: further arguments of both calls (`pad_token_id` and the like).
        """
        self.target, self.prompt, self.plain, self.generate = target, prompt, plain, generate
        self._said: list[int] = []
        self._logits: Sequence[Tensor] = ()
        """[1, V] each, of the tokens said"""

    @torch.inference_mode()
    def difference(self, other: list[int]) -> Difference | None:
        """The first one of another method's new tokens; None where there is none."""
        plain, position = self.plain, first_difference(self.plain, other)
        if position is None:
            return None
        tokens = [ids[position] if position < len(ids) else None for ids in (plain, other)]
        if tokens[0] is None or tokens[1] is None:
            return Difference(position, tokens[0], tokens[1], None, None, False)
        if len(self._said) <= position:
            self._decode(position + 1)
        if self._said[:position] != plain[:position]:
            # Plain decoding of a batch may have parted, by its padding's rounding, from what it says of a row alone.
            written = torch.cat([self.prompt, self.prompt.new_tensor([plain[:position]])], dim=1)
            found = Audit(self.target, written, plain[position:], **self.generate).difference(other[position:])
            return replace(found, position=position) if found is not None else None
        logits = self._logits[position][0].float()
        a, b = (logits[token].item() for token in tokens)
        rounding = torch.finfo(self.target.dtype).eps * max(abs(a), abs(b))
        top_two = set(tokens) == set(logits.topk(2).indices.tolist())
        return Difference(position, tokens[0], tokens[1], a - b, rounding, top_two)

    def _decode(self, tokens: int) -> None:
        options = self.generate | {"max_new_tokens": tokens, "do_sample": False}
        output = self.target.generate(
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        self._said, self._logits = output.sequences[0, self.prompt.shape[1] :].tolist(), output.logits
