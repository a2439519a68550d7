"""`PearlConfig`: the options of PEARL."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ...config import LONGEST_DRAFT, DrafterConfig, option, ranged


@strict
@dataclass(kw_only=True)
class PearlConfig(DrafterConfig):
    """Options of `PearlDrafter`."""

    drafter_type: ClassVar[str] = "pearl"

    window: int | Literal["auto"] = ranged(
        "auto",
        1,
        LONGEST_DRAFT,
        'γ, tokens drafted per target forward. "auto" takes the fastest of 1 to 24, or the serial schedule, by '
        "measured times and acceptance, and pauses where plain decoding is faster",
    )
    worker: Literal["auto", "thread", "process"] = option(
        "auto",
        'where the draft model runs. "thread" has its own CUDA stream, "process" the cores that the target leaves; '
        '"auto" is the thread for drafts on a GPU or offloaded by accelerate, the process for others',
    )
    pre_verify: bool = option(True, "verify the first draft token while drafting goes on (§3.2)")
    post_verify: bool = option(True, "go on drafting while the target verifies (§3.3)")
    corrections: int | Literal["auto"] = ranged(
        "auto",
        0,
        8,
        "likely corrections that get a draft in advance, per token that the target is verifying. They are the "
        'likeliest of all places together; "auto" takes the fastest of 0, 1 and 4',
    )
