"""`ModelDrafter`: what every drafter over a draft model of the target's tokenizer has in common."""

from typing import TYPE_CHECKING, Any

from ...errors import SpeculationError, expect_model
from ...hub.tokenizer import ids_of, sizes_apart
from ...probe import Support, ability, support
from ...target.encoder_decoder import crosses
from ..base import Drafter
from .model import takes_uneven
from .translating import translation

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelDrafter(Drafter):
    """Drafts with a causal language model."""

    needs_draft_model = True

    def __init__(self, draft_model: "PreTrainedModel", **options: Any) -> None:
        """
        Args:
            draft_model: a causal language model with the target's tokenizer, on any device, in any dtype.
            options: of the config.

        Raises:
            SpeculationError: a bad option, or a model that cannot draft.
        """
        super().__init__(**options)
        expect_model("draft_model", draft_model)
        if getattr(draft_model.config.get_text_config(decoder=True), "vocab_size", None) is None:
            raise SpeculationError(
                f"draft_model {type(draft_model).__name__} has no vocabulary, so it is no language model; a "
                "DFlash model drafts with DFlashDrafter"
            )
        self.draft_model = draft_model

    def check_target(self, target: "PreTrainedModel") -> None:
        theirs, mine = type(target).__name__, type(self.draft_model).__name__
        if crosses(self.draft_model) and not target.config.is_encoder_decoder:
            raise SpeculationError(
                f"draft_model {mine} is an encoder-decoder; a decoder-only target ({theirs}) needs a decoder-only "
                "draft (AutoModelForCausalLM)"
            )
        if target.config.is_encoder_decoder and not crosses(self.draft_model):
            raise SpeculationError(
                f"draft_model {mine} reads no source, as {theirs} does; an encoder-decoder needs a draft of its own "
                "family, or a decoder that shares its encoder"
            )
        if target.main_input_name != self.draft_model.main_input_name and self.draft_model.config.is_encoder_decoder:
            raise SpeculationError(
                f"{theirs} reads {target.main_input_name}, draft_model {mine} {self.draft_model.main_input_name}; name "
                "a draft of the same family"
            )
        if (speech := translation(self.draft_model)) is None:
            check_same_tokenizer(target, self.draft_model)
        elif crosses(target):
            raise SpeculationError(
                "a translated draft reads no source; for an encoder-decoder use one of its tokenizer"
            )
        else:
            speech.check(target)
        if self.draft_support() < Support.LOCKSTEP:
            why = ability(self.draft_model).why or "cannot be rolled back"
            raise SpeculationError(
                f"draft_model {type(self.draft_model).__name__} cannot draft: it {why}. Choose a draft with attention "
                "layers only, in another dtype, or without quantized activations"
            )

    def draft_support(self) -> Support:
        """How the draft model can be run; where it lies elsewhere, as it was found out there."""
        return support(self.draft_model)

    def takes_ragged(self) -> bool:
        return takes_uneven(self.draft_model, self.draft_support())


def check_same_tokenizer(target: "PreTrainedModel", draft: "PreTrainedModel") -> None:
    """Refuse a draft of another tokenizer: told by a size difference too large for padding, or by special ids.

    Raises:
        SpeculationError: with a pointer to `translated`.
    """
    mine, theirs = (model.config.get_text_config(decoder=True) for model in (target, draft))
    reason = None
    if sizes_apart(mine.vocab_size, theirs.vocab_size):
        reason = f"vocabularies of {mine.vocab_size} and {theirs.vocab_size} tokens"
    for name in ("bos_token_id", "eos_token_id"):
        a, b = ids_of(getattr(mine, name, None)), ids_of(getattr(theirs, name, None))
        if a and b and not a & b:
            reason = f"{name} {sorted(a)} and {sorted(b)}"
    if reason:
        raise SpeculationError(
            f"the target and the draft have different tokenizers ({reason}). Use a draft of the same family, or name "
            "both tokenizers: generate(..., tokenizer=..., assistant_tokenizer=...)"
        )
