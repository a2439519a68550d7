"""`EagleHeads`: a chain a round, one step of the head after the other."""

import torch
from torch import Tensor

from ...protocol import DraftContext
from ...target.cache import RaggedCache
from ...target.devices import input_device
from ...target.grouped import grouped_attention
from ...target.masks import as_bias, attention_windows
from ...transfer import moved
from ..heads.context import News
from ..heads.draft import HeadDraft
from ..heads.drawn import Draw
from .model import LlamaForCausalLMEagle3, embedded


class EagleHeads(HeadDraft):
    """The first step reads the target's states and the tokens behind them, each other one its own last state and the
    token that was drawn from it."""

    model: LlamaForCausalLMEagle3
    at_once = False

    def __init__(self, context: DraftContext, head: LlamaForCausalLMEagle3, most: int) -> None:
        """
        Args:
            most: tokens of a draft.
        """
        assert context.target is not None, "heads draft where the target is"
        layers = head.states_read(context.target.config.get_text_config(decoder=True).num_hidden_layers)
        super().__init__(context, head, input_device(head.fc), layers, most, beyond=most)
        self.forwards, self.windows = most, attention_windows(head)
        self.embed = head.embed_tokens or context.target.get_input_embeddings()

    def draft(self, news: News, cache: RaggedCache, most: int, draw: Draw) -> None:
        counts, width = news.counts, news.tokens.shape[1]
        rows, last = torch.arange(len(counts), device=self.device), counts - 1
        cache.reserve(width + most - 1)
        places = cache.slots.ends[:, None] + torch.arange(width, device=self.device)
        g = self.model.fused(news.states.to(self.model.dtype))
        a, normed = self._step(g, news.tokens, places, news.first, cache)
        a, normed, place = a[rows, last], normed[rows, last], cache.slots.ends + last
        for k in range(most):
            drawn = moved(draw(self._logits(normed)), self.device)
            if k + 1 < most:  # what stands in the slots of shorter rows' padding is written over
                place = place + 1
                stepped = self._step(a[:, None], drawn[:, None], place[:, None], news.first, cache)
                a, normed = (states[:, 0] for states in stepped)

    @grouped_attention()
    def _step(
        self, g: Tensor, tokens: Tensor, places: Tensor, first: Tensor, cache: RaggedCache
    ) -> tuple[Tensor, Tensor]:
        """A step of the head over g [B, T, H] and tokens [B, T], at these slots [B, T] of the cache."""
        cache.slots.write_to(places)
        distance = places[:, :, None] - torch.arange(cache.slots.end, device=self.device)
        masks = as_bias(distance >= 0, distance, self.windows, g.dtype)
        e = embedded(self.embed, moved(tokens, input_device(self.embed)))
        return self.model(g, e.to(g), first + places, masks, cache)

    def _logits(self, normed: Tensor) -> Tensor:
        """[B, V] over the target's vocabulary; tokens that the draft does not know have the lowest there is."""
        known = self.model.lm_head(normed)
        logits = known.new_full((len(known), self.context.vocab_size), torch.finfo(known.dtype).min)
        logits[:, self.model.tokens] = known
        return logits
