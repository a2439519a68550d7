"""`DiscoConfig`: the options of the DISCO drafter."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ...config import LONGEST_DRAFT, DrafterConfig, option, ranged
from ..draft_model import MOST_CANDIDATES


@strict
@dataclass(kw_only=True)
class DiscoConfig(DrafterConfig):
    """Options of `DiscoDrafter`."""

    drafter_type: ClassVar[str] = "disco"

    rule: Literal["token", "budget"] = option(
        "budget",
        'when drafting stops. "budget": where another step does not promise more tokens per second, by the '
        "classifier's chances and by measured times; it needs no τ, and drafts nothing where nothing pays. "
        '"token", as in the paper: where the last token\'s chance of acceptance falls below τ',
    )
    tau: float = ranged(0.4, 0, 1, "τ in greedy decoding")
    tau_sampled: float = ranged(0.4, 0, 1, "τ in sampling")
    max_draft_tokens: int = ranged(16, 1, LONGEST_DRAFT, "SLmax, the longest draft")
    num_candidates: int = ranged(
        1,
        1,
        MOST_CANDIDATES,
        'tokens tried at each position of a greedy draft. Only by rule "budget", on the CPU; other drafts are chains',
    )
    lookup: bool = option(True, "whether the classifier sees what copying from earlier text would draft", trained=True)
    sees_token: bool = option(
        False, "whether it sees the drafted token: its chance, and whether copying proposes it", trained=True
    )
    k: int = ranged(10, 1, 1024, "how many of the draft's top probabilities the classifier sees", trained=True)
    hidden: int = ranged(32, 1, 1024, "inner units of the classifier", trained=True)
    draft_fingerprint: str | None = option(
        None, "of the draft that the classifier was trained for, at most 64 characters", trained=True
    )

    def threshold(self, do_sample: bool) -> float:
        """τ of a generation."""
        return self.tau_sampled if do_sample else self.tau

    def validate_fingerprint(self) -> None:
        if self.draft_fingerprint is not None and len(self.draft_fingerprint) > 64:
            raise ValueError(f"draft_fingerprint must have at most 64 characters, got {len(self.draft_fingerprint)}")
