"""Hybrid drafter: copies and, where there is one, a draft model's tokens in one tree, each token once, as far as they
pay."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...budget import MOST_NODES, Acceptance, Controller
from ...errors import SpeculationError
from ...hub.registry import reader_for, register_drafter
from ...protocol import DraftContext
from ..base import Drafter
from ..chains import ChainSession, candidates_of
from ..draft_model import DraftModelDrafter, Translated
from ..heads import HeadDrafter
from ..rules import Planned
from ..sources import Copies, Memory, Recycled, Source, SuffixStore
from ..suffix.config import SuffixConfig
from ..trees import TreeSession
from .config import HybridConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["HybridConfig", "HybridDrafter"]


@register_drafter
class HybridDrafter(Drafter):
    """Prompt lookup and a draft model in one tree; what was measured is kept for the next call."""

    config_class = HybridConfig
    config: HybridConfig
    takes_draft_model = True
    reads_prompt = False

    def __init__(
        self,
        draft_model: "PreTrainedModel | Translated | HeadDrafter | None" = None,
        **options: Any,
    ) -> None:
        """
        Args:
            draft_model: a causal language model, on any device, in any dtype; `Translated` where its tokenizer is not
                the target's; or a drafter with heads, such as `DFlashDrafter(model)`. None drafts with what needs no
                model: copies, past outputs and recycled candidates.
            options: of `HybridConfig`.

        Raises:
            SpeculationError: a bad option, one of the draft model's without any, or a model that cannot draft.
        """
        super().__init__(**options)
        self.store = SuffixStore(self.config.memory_mb) if self.config.memory_mb else None
        self.model_drafter: DraftModelDrafter | HeadDrafter | None = None
        if isinstance(draft_model, HeadDrafter):
            self.model_drafter = draft_model
        elif (reader := reader_for(draft_model)) is not None:
            self.model_drafter = reader(draft_model)  # type: ignore[assignment]
        elif draft_model is not None:
            self.model_drafter = DraftModelDrafter(draft_model)
        elif changed := _changed(self.config, "num_draft_tokens", "num_candidates"):
            raise SpeculationError(f"{changed} is the draft model's, and there is none; pass one, or leave it out")
        self.proposes_trees = True

    @property
    def draft_model(self) -> "PreTrainedModel | None":
        """The model itself, if there is one beside the target."""
        return getattr(self.model_drafter, "draft_model", None)

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        if self.model_drafter is not None and self.draft_model is None:
            name = type(self.model_drafter).__name__
            raise SpeculationError(
                f"HybridDrafter({name}()) cannot be saved: its layers are in the target's checkpoint; write the same "
                "where it is to be used"
            )
        super().save_pretrained(folder, **options)

    def check_target(self, target: "PreTrainedModel") -> None:
        if self.model_drafter is not None:
            self.model_drafter.check_target(target)

    def takes_ragged(self) -> bool:
        return self.model_drafter is None or self.model_drafter.takes_ragged()

    def start(self, context: DraftContext) -> TreeSession:
        experience = self._experience.of(context.target, (context.rows, context.do_sample))
        acceptance = experience.acceptance
        sources = self._sources(context, acceptance)
        if self.model_drafter is None:
            return TreeSession(context, acceptance, sources, most=MOST_NODES)
        window, k = self.config.num_draft_tokens, candidates_of(context, self.config.num_candidates)
        if window != "auto":
            context.stats.window = int(window)
        fixed, who = None if window == "auto" else int(window), self.model_drafter.who
        control = Controller(context, experience, fixed, k, alone=False, who=who)
        steps = self.model_drafter.steps(context, control.cost, None if context.do_sample else k)
        if context.do_sample:
            return ChainSession(context, steps, Planned(control), 1, acceptance, sources)
        return TreeSession(context, acceptance, sources, steps, control, most=MOST_NODES)

    def _sources(self, context: DraftContext, acceptance: Acceptance) -> list[Source]:
        """What is proposed without a step of any model."""
        config, sources = self.config, list[Source]([Copies(context, self.config, acceptance)])
        if self.store is not None:
            remembered = SuffixConfig(max_draft_tokens=16, tokens_per_match=4, num_branches=config.num_branches)
            sources.append(Memory(context, remembered, self.store, acceptance))
        if config.num_recycled:
            sources.append(Recycled(context, acceptance, config.num_recycled))
        return sources


def _changed(config: HybridConfig, *names: str) -> str:
    """The first of these options that is not as it is by default, for a message; empty where all are."""
    usual = HybridConfig()
    return next((f"{n}={getattr(config, n)!r}" for n in names if getattr(config, n) != getattr(usual, n)), "")
