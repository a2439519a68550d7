"""`AutoDrafter`: chooses a drafter for each target, in the first call, without being asked."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from huggingface_hub.dataclasses import strict

from ...budget import Learned
from ...config import DrafterConfig, ranged
from ...hub.fetching import Allowance
from ...hub.flag import Recent
from ...hub.registry import register_drafter
from ...protocol import DraftContext
from ...session import DraftSession
from ..base import Drafter
from ..draft_model import Translated
from .choosing import chosen, over_draft

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@strict
@dataclass(kw_only=True)
class AutoConfig(DrafterConfig):
    """Options of `AutoDrafter`."""

    drafter_type: ClassVar[str] = "auto"

    max_download_gb: float = ranged(
        2.0,
        0,
        10_000,
        "gigabytes that may be downloaded for a target. 0 uses what is on this machine, and asks the Hub nothing; with "
        "the environment variable HF_HUB_OFFLINE nothing is downloaded either",
    )


@register_drafter
class AutoDrafter(Drafter):
    """Drafts with what a target brings, else with what is known for it, else with copies, past outputs and recycled
    candidates. `last_stats.notes` says what was chosen, and why."""

    config_class = AutoConfig
    config: AutoConfig
    takes_draft_model = True
    proposes_trees = True

    def __init__(self, draft_model: "PreTrainedModel | Translated | None" = None, **options: Any) -> None:
        """
        Args:
            draft_model: a causal language model to draft with, beside copies; None chooses.
            options: of `AutoConfig`.

        Raises:
            SpeculationError: a bad option, or a model that cannot draft.
        """
        super().__init__(**options)
        self._given = None if draft_model is None else over_draft(draft_model)
        self._chosen = Learned(partial(Recent, 1))

    @property
    def draft_model(self) -> "PreTrainedModel | None":
        """The model that was given, if one was."""
        return getattr(self._given, "draft_model", None)

    def for_target(self, target: "PreTrainedModel") -> Drafter:
        """The drafter that drafts for this target; chosen once."""
        if self._given is not None:
            return self._given
        make = lambda: chosen(target, Allowance(self.config.max_download_gb))  # noqa: E731
        return cast(Drafter, self._chosen.of(target).get("chosen", None, make))

    def check_target(self, target: "PreTrainedModel") -> None:
        self.for_target(target).check_target(target)

    def start(self, context: DraftContext) -> DraftSession:
        assert context.target is not None, "it is chosen where the target is"
        return self.for_target(context.target).start(context)
