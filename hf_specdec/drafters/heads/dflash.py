"""`DFlashDrafter`: a small model that fills in a block of tokens at once, reading the target's hidden states.

The keys and values of all accepted places come from the target's states at some of its layers; the block is the last
token and as many masks as the model was trained for, which see each other both ways (block diffusion). transformers has
the models; what is new here are batches, rows of uneven lengths, and drafts that are tested by what they were drawn
from.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor

from ...config import DrafterConfig
from ...hub.registry import register_drafter
from ...protocol import DraftContext
from ...target.cache import RaggedCache
from ...target.devices import input_device
from ...target.grouped import grouped_attention
from ...target.inputs import CACHE
from ...transfer import moved
from ..drawn import Draw
from .drafter import PublishedHeadDrafter
from .head import Head, News
from .parts import Block, embedded, over_vocabulary, windows_within

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ARCHITECTURES = (
    "DFlashDraftModel",
    "DFlash2DraftModel",
    "Qwen3DSparkModel",
    "Gemma4DSparkModel",
    "BlockDiffusionModel",
)
"""z-lab's, DeepSpec's, and what is saved here"""


@strict
@dataclass(kw_only=True)
class DFlashConfig(DrafterConfig):
    """`DFlashDrafter` has no options. (`speculation_type="dflash"` is transformers' own, for one row.)"""

    drafter_type: ClassVar[str] = "block_diffusion"


class DFlashHead(Head):
    """A block of tokens a round, in one forward of the draft model."""

    def __init__(self, context: DraftContext, model: "PreTrainedModel") -> None:
        config = model.config
        self.first = 0 if getattr(config, "sample_from_anchor", False) else 1
        """the place of the block behind which its first token is drawn"""
        super().__init__(context, model, input_device(model), config.block_size - self.first)
        self.features = [layer + 1 for layer in config.target_layer_ids]  # 0 are the embeddings
        self.beyond = self.block = config.block_size
        self.own, self.vocab_size = getattr(model, "lm_head", None), context.vocab_size
        """the head of the model's own vocabulary, where it has one"""
        self.lm_head = self.own or self.target.get_output_embeddings()
        self.embeddings = self.target.get_input_embeddings()
        self.linked = getattr(model, "place", None) is not None
        """whether the model says something of a place once the token before it is drawn"""
        self.independent, self.again = getattr(model, "independent", True), getattr(model, "again", 0)
        # Windows of what sees both ways reach one token further.
        windows = windows_within(model, self.target).items()
        self.windows = {kind: None if window is None else window + 1 for kind, window in windows}
        # Of published models only, see `dflash_format.py`.
        self.causal, self.one_window = getattr(config, "causal_layers", ()), getattr(config, "one_window", False)
        self.scale = getattr(config, "input_embedding_scale", None)
        self.factor, self.cap = (
            getattr(config, name, None) for name in ("output_multiplier", "final_logit_softcapping")
        )

    def draft(self, news: News, cache: RaggedCache, most: int, draw: Draw) -> None:
        block = self._filled(news, cache)
        filled = block[:, self.first : self.first + most]
        logits = moved(self._logits(moved(filled, input_device(self.lm_head)), news.states.dtype), self.device)
        token, said = news.last(news.tokens)[:, 0], None
        state = self.model.opened(block, news.last(news.tokens, 2)[:, 0]) if self.linked else None
        for i in range(most):
            known = logits[:, i]
            if self.linked:
                known, said, state = self.model.place(known, filled[:, i], token, state)
            token = moved(draw(self._over(known), said), self.device)

    def _logits(self, filled: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, L, K] of states [B, L, H], over the tokens that the model knows."""
        logits: Tensor = self.lm_head(filled.to(dtype if self.own is None else self.model.dtype))
        if self.factor is not None:
            logits = logits * self.factor
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits

    def _over(self, logits: Tensor) -> Tensor:
        """[B, V] over the target's tokens."""
        return logits if self.own is None else over_vocabulary(logits, self.model.tokens, self.vocab_size)

    @grouped_attention()
    def _filled(self, news: News, cache: RaggedCache) -> Tensor:
        """[B, block, H] states at each row's last token and at the masks behind it."""
        block, last = Block.behind(news, cache, self.block), news.last(news.tokens)
        noise = torch.cat([last, last.new_full((len(last), self.block - 1), self.model.config.mask_token_id)], dim=1)
        return self.model(  # type: ignore[no-any-return]
            noise_embeds=self._embedded(noise).to(self.device, self.model.dtype),
            context_hidden_states=news.states.to(self.model.dtype),
            position_ids=torch.cat([news.first + news.slots(cache), block.positions], dim=1),
            attention_mask=block.masks(self.windows, self.causal, self.model.dtype, self.one_window),
            **{CACHE: cache},
        ).last_hidden_state

    def _embedded(self, tokens: Tensor) -> Tensor:
        """As the target embeds them, without the norm that some put behind it; for published models the rows of its
        table, times their own scale."""
        if self.scale is not None:
            return embedded(self.embeddings, tokens) * self.scale
        if getattr(self.embeddings, "embed_norm", None) is not None:
            return embedded(self.embeddings, tokens)
        return self.embeddings(moved(tokens, input_device(self.embeddings)))  # type: ignore[no-any-return]


@register_drafter
class DFlashDrafter(PublishedHeadDrafter):
    """Drafts with a DFlash model that was trained for the target: transformers' assistant, such as
    `AutoModel.from_pretrained(name)` gives, or one that others have published."""

    config_class = DFlashConfig
    config: DFlashConfig
    what = "a DFlash model"
    format = "dflash_format"
    published_as = ("dflash", "dflash2", "dspark", "xpress")

    @staticmethod
    def takes(model: object) -> bool:
        """Whether it is a DFlash model."""
        names = ("block_size", "mask_token_id", "target_layer_ids")
        return all(getattr(getattr(model, "config", None), name, None) is not None for name in names)

    @classmethod
    def reads(cls, content: dict[str, Any]) -> bool:
        return content.get("architectures") in [[name] for name in ARCHITECTURES]

    def check_target(self, target: "PreTrainedModel") -> None:
        mine, theirs, wrong = self.draft_model.config, target.config.get_text_config(decoder=True), ""
        states = [layer + 1 for layer in mine.target_layer_ids]
        if getattr(mine, "vocab_size", theirs.vocab_size) != theirs.vocab_size:
            wrong = f"was trained with {mine.vocab_size} tokens"
        elif getattr(mine, "one_window", False) and theirs.num_hidden_layers in states:
            wrong = f"reads hidden state {theirs.num_hidden_layers}, which is at hand behind the target's norm only"
        self.check_fits(target, mine, width=mine.hidden_size, states=states, token=mine.mask_token_id, wrong=wrong)

    def head(self, context: DraftContext) -> DFlashHead:
        return DFlashHead(context, self.draft_model)
