"""`DraftModelDrafter`: any causal language model as the draft, one forward per drafted token over its own cache."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ...budget import MOST_NODES, Controller, DraftCost
from ...config import LONGEST_DRAFT, DrafterConfig, ranged
from ...hub.registry import register_drafter
from ...protocol import DraftContext
from ...session import DraftSession
from ..chains import ChainSession, candidates_of
from ..rules import Planned, Stepwise
from ..trees import TreeSession
from .base import ModelDrafter
from .masked_draft import MaskedDraft, mask_of
from .model_draft import ModelDraft, is_blind
from .translating import Translated

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MOST_CANDIDATES = 16


@strict
@dataclass(kw_only=True)
class DraftModelConfig(DrafterConfig):
    """Options of `DraftModelDrafter`."""

    drafter_type: ClassVar[str] = "draft_model"

    num_draft_tokens: int | Literal["auto"] = ranged(
        "auto", 1, LONGEST_DRAFT, 'γ, tokens drafted per round. "auto" chooses it from measured acceptance and times'
    )
    num_candidates: int = ranged(
        1,
        1,
        MOST_CANDIDATES,
        "k, tokens tried at each position of a greedy draft. They are the draft's likeliest ones, of which it goes on "
        "with the first. Pays where a wide forward of the target costs little more than a narrow one; sampled drafts, "
        "and targets that take no trees, try one",
    )


@register_drafter
class DraftModelDrafter(ModelDrafter):
    """Speculative decoding with a smaller model of the same tokenizer (Leviathan 2023)."""

    config_class = DraftModelConfig
    config: DraftModelConfig

    def __init__(self, draft_model: "PreTrainedModel | Translated", **options: Any) -> None:
        """
        Args:
            draft_model: a causal language model, on any device, in any dtype; `Translated` where its tokenizer is not
                the target's.
            options: of `DraftModelConfig`.

        Raises:
            SpeculationError: a bad option, or a model that cannot draft.
        """
        super().__init__(draft_model, **options)
        self.proposes_trees = self.config.num_candidates > 1

    def steps(self, context: DraftContext, cost: DraftCost, candidates: int | None = None) -> ModelDraft:
        """What drafts in a call.

        Args:
            cost: as of `ModelDraft`.
            candidates: likewise.
        """
        mask = None if isinstance(self.draft, Translated) else mask_of(self.draft)
        if mask is None:
            return ModelDraft(context, self.draft, cost, candidates)
        return MaskedDraft(context, self.draft, cost, candidates, mask=mask)

    def start(self, context: DraftContext) -> DraftSession:
        self.check_prompt(context)
        window, k = self.config.num_draft_tokens, candidates_of(context, self.config.num_candidates)
        experience = self._experience.of(context.target, (context.rows, context.do_sample))
        control = Controller(context, experience, None if window == "auto" else int(window), k)
        if window != "auto":
            context.stats.window = int(window)
        # To decide step by step is to read each token.
        if window != "auto" or is_blind(context, self.draft):
            model = self.steps(context, control.cost, k if k > 1 else None)
            return ChainSession(context, model, Planned(control), k)
        if context.do_sample:
            return ChainSession(context, self.steps(context, control.cost), Stepwise(control))
        model = self.steps(context, control.cost, k)
        return TreeSession(context, control.acceptance, (), model, control, most=MOST_NODES)
