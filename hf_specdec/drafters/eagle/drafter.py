"""`EagleDrafter`: EAGLE-3 heads, of the formats in which people publish them."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from huggingface_hub.dataclasses import strict

from ...config import DrafterConfig, ranged
from ...errors import SpeculationError
from ...hub.registry import register_drafter
from ...protocol import DraftContext
from ..heads import HeadDrafter
from ..heads.draft import HeadDraft, check_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .model import LlamaForCausalLMEagle3


@strict
@dataclass(kw_only=True)
class EagleConfig(DrafterConfig):
    """Options of `EagleDrafter`."""

    drafter_type: ClassVar[str] = "eagle3"

    num_draft_tokens: int = ranged(
        4, 1, 16, "γ, steps of the head per round. Greedy decoding makes fewer where these promise more"
    )


@register_drafter
class EagleDrafter(HeadDrafter):
    """Drafts with an EAGLE-3 head that was trained for the target (Li et al. 2025)."""

    config_class = EagleConfig
    config: EagleConfig
    needs_draft_model = True

    def __init__(self, draft_model: "PreTrainedModel", **options: Any) -> None:
        """
        Args:
            draft_model: the head. `Drafter.from_pretrained(name)` loads published ones.
            options: of `EagleConfig`.

        Raises:
            SpeculationError: a bad option, or a model that is no such head.
        """
        super().__init__(**options)
        if not self.takes(draft_model):
            raise SpeculationError(
                f"draft_model {type(draft_model).__name__} is not an EAGLE-3 head; load one with "
                "Drafter.from_pretrained(), or use DraftModelDrafter"
            )
        self.draft_model: LlamaForCausalLMEagle3 = draft_model  # type: ignore[assignment]

    @staticmethod
    def takes(model: object) -> bool:
        """Whether it is an EAGLE-3 head."""
        return hasattr(model, "states_read")

    @classmethod
    def reads(cls, content: dict[str, Any]) -> bool:
        if "speculators_model_type" in content:
            return content["speculators_model_type"] == "eagle3"
        names = content.get("architectures")
        names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        ours = any("Eagle3" in name for name in names)
        return ours or (names == ["LlamaForCausalLM"] and "draft_vocab_size" in content)  # SafeAILab's

    @classmethod
    def load_model(cls, folder: Path, **loading: Any) -> "PreTrainedModel":
        return _code("published").load_head(folder, **loading)

    def check_target(self, target: "PreTrainedModel") -> None:
        head, theirs = self.draft_model, target.config.get_text_config(decoder=True)
        count, size, vocab = theirs.num_hidden_layers, theirs.hidden_size, theirs.vocab_size
        read, width = head.states_read(count), head.of_config("target_hidden_size", head.config.hidden_size)
        largest, wrong = int(head.tokens.max()), ""
        # The last state is at hand behind the target's norm only.
        if width != size or not all(0 <= state < count for state in read):
            wrong = f"reads the hidden states {read} of width {width}"
        elif head.embed_tokens is None and head.config.hidden_size != size:
            wrong = f"has width {head.config.hidden_size} and no embeddings"
        elif largest >= vocab:
            wrong = f"drafts token {largest}"
        if wrong:
            raise SpeculationError(
                f"this EAGLE-3 head {wrong}, and {type(target).__name__} has {vocab} tokens and hidden states from 0 "
                f"to {count - 1} of width {size}; use the target that it was trained for"
            )
        check_attention(head.config)

    def heads(self, context: DraftContext) -> HeadDraft:
        return _code("heads").EagleHeads(context, self.draft_model, self.config.num_draft_tokens)


def _code(module: str) -> Any:
    """Of this folder, what needs models' code, which takes longer to import than all of this package."""
    return import_module(f".{module}", __package__)
