"""`Verifier`: what a published head says of the model that it was trained for."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from safetensors import safe_open
from torch import Tensor

from ...errors import warn
from ...hub.loading import WEIGHTS
from ...transfer import moved
from .fields import nested

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NORM = "verifier_norm.weight"
APART = 0.1
"""of its length that the weights of a norm may be off: those of a model that was trained further are hardly"""


class Verifier(NamedTuple):
    """As `speculators` calls it."""

    name: str | None
    """of its repository"""
    norm: Tensor | None
    """[H] weights of its last norm"""

    @classmethod
    def of(cls, content: dict[str, Any], folder: Path) -> Self:
        """
        Args:
            content: of the head's `config.json`.
            folder: with its weights.

        Raises:
            SpeculationError: an object is expected, and something else is there.
        """
        name = nested(nested(content, "speculators_config"), "verifier").get("name_or_path")
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            norm = file.get_tensor(NORM) if NORM in file.keys() else None  # noqa: SIM118
        return cls(name if isinstance(name, str) else None, norm)

    def is_other(self, target: "PreTrainedModel") -> bool:
        """Whether the norm's weights are not those of this target."""
        theirs = getattr(getattr(target.get_decoder(), "norm", None), "weight", None)
        if self.norm is None or theirs is None or theirs.shape != self.norm.shape:
            return False
        mine, theirs = self.norm.float(), moved(theirs.detach(), self.norm.device).float()
        return bool((mine - theirs).norm() > APART * mine.norm())

    def look_at(self, target: "PreTrainedModel", what: str) -> None:
        """Say so where the target has another name. It may be a copy, or trained further."""
        name = target.config.name_or_path
        if self.name and name and Path(self.name).name != Path(name).name:
            warn(
                f"draft_model is {what} that was trained for {self.name}, and the target is {name}: unless they are "
                "akin, few of its tokens will be accepted. The text is not affected"
            )
