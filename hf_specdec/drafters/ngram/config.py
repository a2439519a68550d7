"""`NGramConfig`: the options of the n-gram drafter."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ...config import LONGEST_DRAFT, DrafterConfig, ranged
from ...hub.tokenizer import check_fingerprint


@strict
@dataclass(kw_only=True)
class NGramConfig(DrafterConfig):
    """Options of `NGramDrafter`, which says what they mean."""

    drafter_type: ClassVar[str] = "ngram"

    num_draft_tokens: int | Literal["auto"] = ranged("auto", 1, LONGEST_DRAFT)
    vocab_size: int = ranged(0, 0, 1 << 24)
    sizes: list[int] = ranged([], 0, 1 << 30, entries=15)  # noqa: RUF009  (a field)
    tokenizer: dict | None = None

    def validate_tokenizer(self) -> None:
        check_fingerprint(self.tokenizer or {})
