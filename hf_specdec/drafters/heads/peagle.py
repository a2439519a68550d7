"""`ParallelEagleHead`: P-EAGLE. An EAGLE-3 head that drafts all places at once: behind what it reads stand masks, each
with one state that is the same for all, and the embedding of one token."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...protocol import DraftContext
from ...target.cache import RaggedCache
from ...target.devices import input_device
from ...target.grouped import grouped_attention
from ..drawn import Draw
from .head import Head, News
from .parts import Block, embedded, masks_at, over_vocabulary, windows_within

if TYPE_CHECKING:
    from .eagle_model import LlamaForCausalLMEagle3


class ParallelEagleHead(Head):
    """As many tokens a round as are asked for, in one forward."""

    independent = True

    def __init__(self, context: DraftContext, model: "LlamaForCausalLMEagle3", most: int) -> None:
        super().__init__(context, model, input_device(model.fc), most)
        self.features = model.states_read(self.target.config.get_text_config(decoder=True).num_hidden_layers)
        self.beyond, self.vocab_size, self.windows = most, context.vocab_size, windows_within(model, self.target)
        self.embeddings = model.embed_tokens or self.target.get_input_embeddings()

    def draft(self, news: News, cache: RaggedCache, most: int, draw: Draw) -> None:
        known = self.model.lm_head(self._read(news, cache, most))
        for i in range(most):
            draw(over_vocabulary(known[:, i], self.model.tokens, self.vocab_size))

    @grouped_attention()
    def _read(self, news: News, cache: RaggedCache, most: int) -> Tensor:
        """[B, K, H] of which logits are made: at each row's last place, and at the masks behind it."""
        width, masked = news.tokens.shape[1], news.tokens.new_full((len(news.tokens), most - 1), self.model.mask_token)
        block = Block.behind(news, cache, most - 1)
        near = masks_at(news.slots(cache), cache, self.windows, self.model.dtype)
        far = block.masks(self.windows, self.windows, self.model.dtype)
        states = [news.states.to(self.model.dtype), self.model.mask_hidden.expand(*masked.shape, -1)]
        g = self.model.fused(torch.cat(states, dim=1))
        e = embedded(self.embeddings, torch.cat([news.tokens, masked], dim=1)).to(g)
        positions = torch.cat([news.first + news.slots(cache), block.positions], dim=1)
        masks = {kind: torch.cat([near[kind], far[kind]], dim=2) for kind in self.windows}
        _, normed = self.model(g, e, positions, masks, cache)
        return torch.cat([news.last(normed[:, :width]), normed[:, width:]], dim=1)
