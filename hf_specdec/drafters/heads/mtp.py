"""`MtpDrafter`: layers that a model was trained with to foretell its next tokens, one token each.

Layer k reads the target's last hidden states (for k > 0 what layer k - 1 made of them) beside the embeddings of the
tokens k + 1 places on, and foretells the token behind those (multi-token prediction, as DeepSeek-V3 describes it). The
layers, and how they are loaded, are transformers' own `MtpModel`; what is new here are batches, rows of uneven lengths,
and drafts that are tested by what they were drawn from.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor

from ...budget import Learned
from ...config import DrafterConfig
from ...errors import SpeculationError
from ...hub.registry import register_drafter
from ...protocol import DraftContext
from ...target.cache import RaggedCache
from ...target.devices import input_device
from ...target.grouped import grouped_attention
from ...target.inputs import CACHE
from ...target.masks import attention_windows
from ...transfer import moved
from ..drawn import Draw
from .drafter import HeadDrafter, check_attention
from .head import Head, News
from .parts import masks_at

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_layers import MtpModel


@strict
@dataclass(kw_only=True)
class MtpConfig(DrafterConfig):
    """`MtpDrafter` has no options."""

    drafter_type: ClassVar[str] = "mtp"


class MtpHead(Head):
    """As many tokens a round as there are layers."""

    def __init__(self, context: DraftContext, model: "MtpModel") -> None:
        depth = len(model.layers)
        super().__init__(context, model, input_device(model.layers), depth)
        # The slots that the layers above the first have filled with drafted tokens are filled again.
        self.forwards, self.again, self.windows = depth, depth - 1, attention_windows(model)
        self.kinds = (getattr(model.config, "layer_types", None) or [next(iter(self.windows))] * depth)[:depth]

    def draft(self, news: News, cache: RaggedCache, most: int, draw: Draw) -> None:
        states, tokens, counts, first = news
        rows, slots = torch.arange(len(counts), device=self.device), news.slots(cache)
        cache.reserve(tokens.shape[1])
        masks = masks_at(slots, cache, self.windows, states.dtype)
        for k, kind in enumerate(self.kinds):
            states = self._layer(k, states, tokens, first + slots + k + 1, masks[kind], cache)
            if k < most:
                drawn = draw(self.model._project_to_logits(news.last(states)[:, 0]))
            # Every token makes room for the one behind it, the last one for what was drawn.
            tokens = tokens.roll(-1, dims=1)
            tokens[rows, counts - 1] = moved(drawn, self.device)

    @grouped_attention()
    def _layer(
        self, k: int, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, cache: RaggedCache
    ) -> Tensor:
        """States [B, T, H] → what layer k makes of them and of the tokens [B, T] at `positions`."""
        model, rotary, embedded = self.model, None, self.model.embed_tokens(tokens).to(states.device)
        if model.rotary_emb is not None:
            kind = {"layer_type": self.kinds[k]} if getattr(model, "has_per_layer_rope", False) else {}
            rotary = model.rotary_emb(embedded, position_ids=positions, **kind)
        states = model.layers[k](
            embedded,
            states,
            position_embeddings=rotary,
            position_ids=positions,
            attention_mask=mask,
            **{CACHE: cache},
        )
        return model.shared_post_norm(states) if model.use_shared_post_norm else states


@register_drafter
class MtpDrafter(HeadDrafter):
    """Drafts with the target's own layers for multi-token prediction (`num_mtp_layers` in its config)."""

    config_class = MtpConfig
    config: MtpConfig

    def __init__(self, model: "MtpModel | None" = None, **options: Any) -> None:
        """
        Args:
            model: the layers; None loads those of the target's checkpoint in the first call.
            options: there are none.

        Raises:
            SpeculationError: something else is given as a model.
        """
        super().__init__(**options)
        if model is not None and not isinstance(model, _mtp_model()):
            raise SpeculationError(f"model must be transformers' MtpModel, got {type(model).__name__}")
        self.model = model
        self._loaded: Learned[list[MtpModel]] = Learned(list)

    def check_target(self, target: "PreTrainedModel") -> None:
        if not getattr(target.config.get_text_config(), "num_mtp_layers", None):
            raise SpeculationError(
                f"{type(target).__name__} has no layers for multi-token prediction (num_mtp_layers in its "
                "config); use another drafter"
            )
        config = self._layers(target).config
        if unknown := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
            raise SpeculationError(
                f"MTP layers of type {', '.join(sorted(unknown))} are not supported; use another drafter"
            )
        check_attention(config)

    def untaught(self) -> Self:
        made = super().untaught()
        made._loaded = self._loaded  # weights
        return made

    def head(self, context: DraftContext) -> MtpHead:
        assert context.target is not None, "heads draft where the target is"
        return MtpHead(context, self._layers(context.target))

    def _layers(self, target: "PreTrainedModel") -> "MtpModel":
        """The target's layers, which are loaded once, and again once the target is of another dtype, lies elsewhere, or
        embeds by another table."""
        if self.model is not None:
            return self.model
        loaded = self._loaded.of(target, (target.dtype, input_device(target), id(target.get_input_embeddings())))
        if not loaded:
            loaded.append(_loaded(target))
        return loaded[0]


def _loaded(target: "PreTrainedModel") -> "MtpModel":
    """
    Raises:
        SpeculationError: its checkpoint has no such layers.
    """
    device = input_device(target.get_decoder().layers[-1])
    try:
        return _mtp_model().from_pretrained(target, device_map={"": device}).eval()
    except Exception as error:  # every checkpoint fails in its own way
        said = " ".join(str(error).split())
        raise SpeculationError(
            f"the checkpoint {target.config.name_or_path!r} holds no layers for multi-token prediction: "
            f"{said}; load the target from one that has them, or pass MtpDrafter(model)"
        ) from error


def _mtp_model() -> type["MtpModel"]:
    """transformers' own, which takes longer to import than all of this package."""
    from transformers.modeling_layers import MtpModel

    return MtpModel
