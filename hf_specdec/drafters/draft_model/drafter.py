"""`DraftModelDrafter`: any causal language model as the draft, one forward per drafted token over its own cache."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedModel

from ...config import LONGEST_DRAFT, DrafterConfig, ranged
from ...errors import SpeculationError
from ...hub.tokenizer import ids_of, sizes_apart
from ...probe import Support, support
from ...protocol import DraftContext, DraftSession
from ...registry import register_drafter
from ..base import Drafter
from ..learned import Learned
from .session import DraftModelSession
from .window import WindowTuner


@strict
@dataclass(kw_only=True)
class DraftModelConfig(DrafterConfig):
    """Options of the draft-model drafter."""

    drafter_type: ClassVar[str] = "draft_model"

    num_draft_tokens: int | Literal["auto"] = ranged("auto", 1, LONGEST_DRAFT)
    """γ: tokens drafted per round, from 1 to 512, or "auto" to choose it from measured acceptance and times"""


@register_drafter
class DraftModelDrafter(Drafter):
    """Speculative decoding with a smaller model of the same tokenizer (Leviathan 2023)."""

    config_class = DraftModelConfig
    config: DraftModelConfig
    needs_draft_model = True

    def __init__(self, draft_model: PreTrainedModel, **options: Any) -> None:
        """
        Args:
            draft_model: a causal language model with the target's tokenizer, on any device, in any dtype.
            options: see `DraftModelConfig`.

        Raises:
            SpeculationError: a bad option, or a model that cannot draft.
        """
        super().__init__(**options)
        if not hasattr(draft_model, "forward") or not hasattr(draft_model, "config"):
            raise SpeculationError(f"draft_model must be a transformers model, got {type(draft_model).__name__}")
        if draft_model.config.is_encoder_decoder:
            raise SpeculationError(
                f"draft_model {type(draft_model).__name__} is an encoder-decoder; a decoder-only target needs a "
                "decoder-only draft (AutoModelForCausalLM)"
            )
        self.draft_model = draft_model
        self._tuners = Learned(WindowTuner)

    def check_target(self, target: PreTrainedModel) -> None:
        check_same_tokenizer(target, self.draft_model)
        if self.draft_support() < Support.LOCKSTEP:
            raise SpeculationError(
                f"draft_model {type(self.draft_model).__name__} keeps a state that cannot be rolled back; "
                "choose a draft with attention layers only"
            )

    def draft_support(self) -> Support:
        """How the draft model can be run; where it lies elsewhere, as it was found out there."""
        return support(self.draft_model)

    def takes_ragged(self) -> bool:
        return self.draft_support() is Support.RAGGED

    def start(self, context: DraftContext) -> DraftSession:
        tuner = None
        if self.config.num_draft_tokens == "auto":  # what a call has measured serves the next one
            tuner = self._tuners.of(context.target, len(context.prompt_ids))
        else:
            context.stats.window = int(self.config.num_draft_tokens)
        return DraftModelSession(context, self.draft_model, self.config.num_draft_tokens, tuner)


def check_same_tokenizer(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Refuse a draft of another tokenizer: told by a size difference too large for padding, or by special ids.

    Raises:
        SpeculationError: with a pointer to transformers' own route for different tokenizers.
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
            f"the target and the draft have different tokenizers ({reason}). Use a draft of the same family, or "
            "transformers' own route for different tokenizers: "
            "generate(assistant_model=draft, tokenizer=..., assistant_tokenizer=...) without speculation_type"
        )
