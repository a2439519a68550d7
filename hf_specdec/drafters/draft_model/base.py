"""`ModelDrafter`: what every drafter over a draft model of the target's tokenizer has in common."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...errors import SpeculationError, expect_model
from ...hub.registry import reader_for
from ...hub.tokenizer import ids_of, sizes_apart
from ...protocol import DraftContext
from ...target.encoder_decoder import crosses
from ...target.inputs import position_limit
from ...target.probe import Support, ability, support
from ..base import Drafter
from .model import check_room, takes_uneven
from .translating import Translated, model_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelDrafter(Drafter):
    """Drafts with a causal language model."""

    needs_draft_model = True
    who = "the draft model"
    """drafts, in notes"""

    def __init__(self, draft_model: "PreTrainedModel | Translated", **options: Any) -> None:
        """
        Args:
            draft_model: a causal language model, on any device, in any dtype; `Translated` where its tokenizer is not
                the target's.
            options: of the config.

        Raises:
            SpeculationError: a bad option, or a model that cannot draft.
        """
        super().__init__(**options)
        self.draft = draft_model
        """what sessions draft with"""
        expect_model("draft_model", self.draft_model)
        if (reader := reader_for(self.draft_model)) is not None:
            raise SpeculationError(
                f"draft_model {type(self.draft_model).__name__} drafts over the target's states, and not by itself; "
                f"use {reader.__name__} or HybridDrafter"
            )
        if getattr(self.draft_model.config, "spd_type", None) == "pard2":
            raise SpeculationError(
                "draft_model is a PARD-2 model, which reads the target's states and is not supported; use one of PARD"
            )
        if getattr(self.draft_model.config.get_text_config(decoder=True), "vocab_size", None) is None:
            raise SpeculationError(
                f"draft_model must be a causal language model, got {type(self.draft_model).__name__}, which has no "
                "vocabulary; for a DFlash model use DFlashDrafter"
            )

    @property
    def draft_model(self) -> "PreTrainedModel":
        """The model itself."""
        return model_of(self.draft)

    def check_target(self, target: "PreTrainedModel") -> None:
        theirs, mine = type(target).__name__, type(self.draft_model).__name__
        if crosses(self.draft_model) and not target.config.is_encoder_decoder:
            raise SpeculationError(
                f"draft_model {mine} is an encoder-decoder; a decoder-only target ({theirs}) needs a decoder-only "
                "draft (AutoModelForCausalLM)"
            )
        if target.config.is_encoder_decoder and not crosses(self.draft_model):
            raise SpeculationError(
                f"the target {theirs} is an encoder-decoder, and draft_model {mine} is not; use a draft of the "
                "same family, or a decoder that shares the target's encoder"
            )
        if target.main_input_name != self.draft_model.main_input_name and self.draft_model.config.is_encoder_decoder:
            raise SpeculationError(
                f"the target {theirs} reads {target.main_input_name}, and draft_model {mine} reads "
                f"{self.draft_model.main_input_name}; use a draft of the same family"
            )
        if not isinstance(self.draft, Translated):
            check_same_tokenizer(target, self.draft_model)
        elif crosses(target):
            raise SpeculationError(
                "a translated draft model cannot draft for an encoder-decoder; use a draft with the target's "
                "own tokenizer"
            )
        else:
            self.draft.check(target)
        if support(self.draft_model) < Support.LOCKSTEP:
            why = ability(self.draft_model).why or "cannot be rolled back"
            raise SpeculationError(
                f"draft_model {type(self.draft_model).__name__} cannot draft: it {why}. Choose a draft with attention "
                "layers only, in another dtype, or without quantized activations"
            )

    def why_not(self, prompt_ids: Tensor, source: dict[str, Any] | None) -> str:
        return super().why_not(prompt_ids, source) or unreadable(self.draft_model, prompt_ids, source)

    def check_prompt(self, context: DraftContext) -> None:
        """Refuse prompts that fill the draft model's context.

        Raises:
            ValueError: one does.
        """
        if not context.most_rows:
            check_room(context.prompt_mask, position_limit(self.draft_model))

    def takes_ragged(self) -> bool:
        return takes_uneven(self.draft_model)


def unreadable(draft: "PreTrainedModel", prompt_ids: Tensor, source: dict[str, Any] | None) -> str:
    """What a call lacks that a draft model would have to read; empty where it lacks nothing."""
    if prompt_ids.shape[1] == 0:
        return f"draft_model {type(draft).__name__} needs token ids, and the prompt is inputs_embeds"
    if source is not None and draft.config.is_encoder_decoder and draft.main_input_name not in source:
        return f"draft_model {type(draft).__name__} reads {draft.main_input_name}, which was not passed to generate"
    return ""


def columns_for(context: DraftContext, draft: "PreTrainedModel | Translated") -> int:
    """Columns that a draft model drafts in: those it has positions for, none where it cannot read the call."""
    joined, model = context.most_rows > 0, model_of(draft)  # rows that join come with all of their text
    return 0 if not joined and unreadable(model, context.prompt_ids, context.source) else position_limit(model)


def check_same_tokenizer(target: "PreTrainedModel", draft: "PreTrainedModel") -> None:
    """Refuse a draft of another tokenizer: told by a size difference too large for padding, or by special ids.

    Raises:
        SpeculationError: with a pointer to translation.
    """
    mine, theirs = (model.config.get_text_config(decoder=True) for model in (target, draft))
    differ = []
    if sizes_apart(mine.vocab_size, theirs.vocab_size):
        differ.append(f"vocabularies of {mine.vocab_size} and {theirs.vocab_size} tokens")
    for name in ("bos_token_id", "eos_token_id"):
        a, b = ids_of(getattr(mine, name, None)), ids_of(getattr(theirs, name, None))
        if a and b and not a & b:
            differ.append(f"{name} {sorted(a)} and {sorted(b)}")
    if differ:
        raise SpeculationError(
            f"the target and the draft model have different tokenizers ({'; '.join(differ)}). Use a draft of "
            "the same family, or pass both tokenizers: generate(..., tokenizer=..., assistant_tokenizer=...)"
        )
