"""`NGramConfig`: the options of the n-gram drafter."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ...config import LONGEST_DRAFT, DrafterConfig, option, ranged
from ...hub.tokenizer import check_fingerprint


@strict
@dataclass(kw_only=True)
class NGramConfig(DrafterConfig):
    """Options of `NGramDrafter`."""

    drafter_type: ClassVar[str] = "ngram"

    num_draft_tokens: int | Literal["auto"] = ranged(
        "auto",
        1,
        LONGEST_DRAFT,
        'γ, tokens per draft. "auto" verifies as many as pay: in greedy decoding a tree of likely tokens, else a chain',
    )
    vocab_size: int = ranged(0, 0, 1 << 24, "of the stored model", trained=True)
    sizes: list[int] = ranged(  # noqa: RUF009  (a field)
        [], 0, 1 << 30, "stored n-grams of each order from 2 up", entries=15, trained=True
    )
    tokenizer: dict | None = option(  # noqa: RUF009
        None,
        "fingerprint of the tokenizer that made the ids. Models without one are held against the target by the size of "
        "their vocabulary",
        trained=True,
    )

    def validate_tokenizer(self) -> None:
        check_fingerprint(self.tokenizer or {})
