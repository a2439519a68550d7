"""`PearlConfig`: the options of PEARL."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ...config import LONGEST_DRAFT, DrafterConfig, ranged


@strict
@dataclass(kw_only=True)
class PearlConfig(DrafterConfig):
    """Options of `PearlDrafter`, which says what they mean."""

    drafter_type: ClassVar[str] = "pearl"

    window: int | Literal["auto"] = ranged("auto", 1, LONGEST_DRAFT)
    worker: Literal["auto", "thread", "process"] = "auto"
    pre_verify: bool = True
    post_verify: bool = True
    corrections: int | Literal["auto"] = ranged("auto", 0, 8)
