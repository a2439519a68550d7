"""`Gemma4Drafter`: the assistants that are published for Gemma 4 (`google/gemma-4-E2B-it-assistant` and others)."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ...config import DrafterConfig, ranged
from ...errors import SpeculationError
from ...hub.draft import load_draft
from ...hub.registry import register_drafter
from ...protocol import DraftContext
from ...target.features import shared_kinds
from ..heads import HeadDrafter
from ..heads.draft import HeadDraft, check_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""`model_type` of their configs"""
LONGEST, USUAL = 16, 4
"""tokens of a draft"""


@strict
@dataclass(kw_only=True)
class Gemma4Config(DrafterConfig):
    """Options of `Gemma4Drafter`."""

    drafter_type: ClassVar[str] = "gemma4"

    num_draft_tokens: int | Literal["auto"] = ranged(
        "auto",
        1,
        LONGEST,
        "γ, steps of the assistant per round. Greedy decoding makes fewer where these promise more. "
        '"auto" is `num_assistant_tokens` of the assistant\'s generation config, else 4',
    )


@register_drafter
class Gemma4Drafter(HeadDrafter):
    """Drafts with an assistant that was trained for a Gemma 4 model."""

    config_class = Gemma4Config
    config: Gemma4Config
    needs_draft_model = True

    def __init__(self, draft_model: "PreTrainedModel", **options: Any) -> None:
        """
        Args:
            draft_model: the assistant. `Drafter.from_pretrained(name)` loads published ones.
            options: of `Gemma4Config`.

        Raises:
            SpeculationError: a bad option, or a model that is no such assistant.
        """
        super().__init__(**options)
        if not self.takes(draft_model):
            raise SpeculationError(
                f"draft_model {type(draft_model).__name__} is not an assistant of Gemma 4; use DraftModelDrafter"
            )
        self.draft_model = draft_model

    @property
    def most(self) -> int:
        """Steps per round."""
        asked = self.config.num_draft_tokens
        said = getattr(self.draft_model.generation_config, "num_assistant_tokens", None) or USUAL
        return min(said, LONGEST) if asked == "auto" else int(asked)

    @staticmethod
    def takes(model: object) -> bool:
        """Whether it is an assistant of Gemma 4."""
        return getattr(getattr(model, "config", None), "model_type", None) in ASSISTANTS

    @classmethod
    def reads(cls, content: dict[str, Any]) -> bool:
        return content.get("model_type") in ASSISTANTS

    @classmethod
    def load_model(cls, folder: Path, **loading: Any) -> "PreTrainedModel":
        if (quantization := loading.get("quantization")) is not None:
            raise SpeculationError(
                f"quantization={quantization!r} is for draft models; an assistant of Gemma 4 is small: leave it"
            )
        return load_draft(folder, **loading)

    def check_target(self, target: "PreTrainedModel") -> None:
        mine, theirs = self.draft_model.config, target.config.get_text_config(decoder=True)
        read, told = keys_read(self.draft_model), keys_read(target.get_decoder()) if shared_kinds(target) else {}
        wrong = ""
        if not told:
            wrong = f"looks at keys and values that {type(target).__name__} does not tell"
        elif mine.backbone_hidden_size != theirs.hidden_size:
            wrong = f"reads states of width {mine.backbone_hidden_size}, and the target's have {theirs.hidden_size}"
        elif mine.get_text_config().vocab_size != theirs.vocab_size:
            wrong = f"knows {mine.get_text_config().vocab_size} tokens, and the target {theirs.vocab_size}"
        elif differing := [kind for kind, size in read.items() if told.get(kind) != size]:
            kind = differing[0]
            wrong = f"looks at keys of {kind} of (heads, size) {read[kind]}, and the target's are {told.get(kind)}"
        if wrong:
            raise SpeculationError(
                f"this assistant of Gemma 4 {wrong}; use the target that it was trained for, such as "
                "google/gemma-4-E2B-it for google/gemma-4-E2B-it-assistant"
            )
        check_attention(mine.get_text_config())

    def heads(self, context: DraftContext) -> HeadDraft:
        code = import_module(".heads", __package__)  # a model's code takes longer to import than all of this package
        return code.Gemma4Heads(context, self.draft_model, keys_read(self.draft_model), self.most)


def keys_read(model: Any) -> dict[str, tuple[int, int]]:
    """By kind of layer, heads and size of the keys that a Gemma 4 text model, or an assistant, looks at."""
    attentions = [layer.self_attn for layer in getattr(model, "model", model).layers]
    return {
        each.layer_type: (each.config.num_attention_heads // each.num_key_value_groups, each.head_dim)
        for each in attentions
    }
