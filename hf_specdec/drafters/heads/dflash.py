"""`DFlashDrafter`: a small model that fills in a block of tokens at once, reading the target's hidden states.

The keys and values of all accepted places come from the target's states at some of its layers; the block is the last
token and as many masks as the model was trained for, which see each other both ways (block diffusion). transformers has
the models; what is new here are batches, rows of uneven lengths, and drafts that are tested by what they were drawn
from.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor

from ...config import DrafterConfig
from ...errors import SpeculationError
from ...hub.registry import register_drafter
from ...protocol import DraftContext
from ...target.cache import RaggedCache
from ...target.devices import input_device
from ...target.grouped import grouped_attention
from ...target.inputs import CACHE
from ...target.masks import as_bias, attention_windows
from ...transfer import moved
from .context import News
from .draft import HeadDraft, check_attention
from .drafter import HeadDrafter
from .drawn import Draw

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@strict
@dataclass(kw_only=True)
class DFlashConfig(DrafterConfig):
    """`DFlashDrafter` has no options. (`speculation_type="dflash"` is transformers' own, for one row.)"""

    drafter_type: ClassVar[str] = "block_diffusion"


class DFlashHeads(HeadDraft):
    """A block of tokens a round, in one forward of the draft model."""

    independent = True

    def __init__(self, context: DraftContext, model: "PreTrainedModel") -> None:
        config = model.config
        self.block, self.mask_token = config.block_size, config.mask_token_id
        layers = [layer + 1 for layer in config.target_layer_ids]  # 0 are the embeddings
        super().__init__(context, model, input_device(model), layers, self.block - 1, beyond=self.block)
        assert context.target is not None, "heads draft where the target is"
        self.embed, self.head = context.target.get_input_embeddings(), context.target.get_output_embeddings()
        # Windows of what sees both ways reach one token further.
        windows = attention_windows(model).items()
        self.windows = {kind: None if window is None else window + 1 for kind, window in windows}
        # Of published models only, see `published.py`.
        self.causal = getattr(config, "causal_layers", ())
        self.scale = getattr(config, "input_embedding_scale", None)
        self.factor, self.cap = (
            getattr(config, name, None) for name in ("output_multiplier", "final_logit_softcapping")
        )

    def draft(self, news: News, cache: RaggedCache, most: int, draw: Draw) -> None:
        filled = self._filled(news, cache)
        logits = self.head(moved(filled[:, 1 : most + 1], input_device(self.head)).to(news.states.dtype))
        if self.factor is not None:
            logits = logits * self.factor
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        for i in range(most):
            draw(logits[:, i])

    @grouped_attention()
    def _filled(self, news: News, cache: RaggedCache) -> Tensor:
        """[B, block, H] states at each row's last token and at the masks behind it."""
        width, block = news.tokens.shape[1], torch.arange(self.block, device=self.device)
        cache.reserve(width + self.block)
        # A row's slots: what it held, its news, those of longer rows, the block.
        slots = torch.arange(cache.slots.end, device=self.device)
        known, start = (cache.slots.ends + news.counts)[:, None], (cache.slots.ends + width)[:, None]
        inside = (slots >= start) & (slots < start + self.block)
        allowed = ((slots < known) | inside)[:, None].expand(-1, self.block, -1)
        places = torch.where(inside, known + slots - start, slots)  # without those of longer rows
        distance = (known + block)[:, :, None] - places[:, None]
        last = news.tokens.gather(1, news.counts[:, None] - 1)
        noise = torch.cat([last, last.new_full((len(last), self.block - 1), self.mask_token)], dim=1)
        masks = {
            kind: as_bias(
                allowed & (distance >= 0) if kind in self.causal else allowed,
                distance.abs(),
                {kind: window},
                self.model.dtype,
            )
            for kind, window in self.windows.items()
        }
        behind = news.first + known + block
        return self.model(
            noise_embeds=self._embedded(moved(noise, self.context.device)).to(self.device, self.model.dtype),
            context_hidden_states=news.states.to(self.model.dtype),
            position_ids=torch.cat([news.positions(cache), behind], dim=1),
            attention_mask=masks,
            **{CACHE: cache},
        ).last_hidden_state

    def _embedded(self, ids: Tensor) -> Tensor:
        """As the target embeds them, without the norm that some put behind it; for published models the rows of its
        table, times their own scale."""
        bare = getattr(self.embed, "embed_norm", None) is not None or self.scale is not None
        plain = type(self.embed) is torch.nn.Embedding
        rows = torch.nn.functional.embedding(ids, self.embed.weight) if bare and not plain else self.embed(ids)
        return rows if self.scale is None else rows * self.scale


@register_drafter
class DFlashDrafter(HeadDrafter):
    """Drafts with a DFlash model that was trained for the target."""

    config_class = DFlashConfig
    config: DFlashConfig
    needs_draft_model = True

    def __init__(self, draft_model: "PreTrainedModel", **options: Any) -> None:
        """
        Args:
            draft_model: transformers' assistant for the target, such as `AutoModel.from_pretrained(name)` gives.
                `DFlashDrafter.from_pretrained(name)` loads published ones of z-lab, too.
            options: there are none.

        Raises:
            SpeculationError: a model that takes no hidden states of a target.
        """
        super().__init__(**options)
        if missing := _missing(draft_model):
            raise SpeculationError(
                f"draft_model {type(draft_model).__name__} is not a DFlash model: its config has no "
                f"{missing[0]}; use DraftModelDrafter"
            )
        self.draft_model = draft_model

    @staticmethod
    def takes(model: object) -> bool:
        """Whether it is a DFlash model."""
        return not _missing(model)

    @classmethod
    def reads(cls, content: dict[str, Any]) -> bool:
        return content.get("architectures") == ["DFlashDraftModel"] and "speculators_model_type" not in content

    @classmethod
    def load_model(cls, folder: Path, **loading: Any) -> "PreTrainedModel":
        """Such a model, from its folder; options as of `load_draft`."""
        return import_module(".published", __package__).load_dflash(folder, **loading)  # type: ignore[no-any-return]

    def check_target(self, target: "PreTrainedModel") -> None:
        mine, theirs = self.draft_model.config, target.config.get_text_config()
        if mine.hidden_size != theirs.hidden_size or max(mine.target_layer_ids) >= theirs.num_hidden_layers:
            raise SpeculationError(
                f"this DFlash model reads layers {list(mine.target_layer_ids)} of width {mine.hidden_size}, and "
                f"{type(target).__name__} has {theirs.num_hidden_layers} layers of width {theirs.hidden_size}; "
                "use the target that it was trained for"
            )
        if mine.mask_token_id >= theirs.vocab_size:
            raise SpeculationError(
                f"this DFlash model's mask is token {mine.mask_token_id}, and {type(target).__name__} has "
                f"{theirs.vocab_size} tokens; use the target that it was trained for"
            )
        check_attention(mine)

    def heads(self, context: DraftContext) -> DFlashHeads:
        return DFlashHeads(context, self.draft_model)


def _missing(model: object) -> list[str]:
    """What the model's config does not say, and would if it were a DFlash model."""
    names = ("block_size", "mask_token_id", "target_layer_ids")
    return [name for name in names if getattr(getattr(model, "config", None), name, None) is None]
