"""`Gemma4Heads`: a chain a round, one step of the assistant after the other.

An assistant has no keys of its own. Its layers look at those of the target's last layer of each kind, always from the
place of the last token. A step reads the token before it, beside the target's last state; each other one beside what
the step before it made of that.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...protocol import DraftContext
from ...target.cache import RaggedCache
from ...target.devices import input_device
from ...target.grouped import grouped_attention
from ...target.masks import as_bias
from ...transfer import moved
from ..heads.context import News
from ..heads.draft import HeadDraft
from ..heads.drawn import Draw

Shared = dict[str, tuple[Tensor, Tensor]]
"""[kind] keys and values [B, heads, S, size]"""


class Gemma4Heads(HeadDraft):
    """Transformers' own model over copies of the target's keys, of which a row's stand where its states do."""

    model: Any
    at_once = False

    def __init__(self, context: DraftContext, assistant: Any, keys: dict[str, tuple[int, int]], most: int) -> None:
        """
        Args:
            keys: [kind] heads and size of those that are looked at.
            most: tokens of a draft.
        """
        assert context.target is not None, "heads draft where the target is"
        config = assistant.config.get_text_config()
        held = PreTrainedConfig(
            num_hidden_layers=len(keys), layer_types=list(keys), sliding_window=config.sliding_window
        )
        super().__init__(context, assistant, input_device(assistant.pre_projection), [-1, *keys], most, held=held)
        self.forwards, self.keys, self.embed = most, keys, context.target.get_input_embeddings()
        # As transformers' assistant has it: places that are a window away are seen, too.
        self.windows = {kind: config.sliding_window + 1 if kind == "sliding_attention" else None for kind in keys}

    def draft(self, news: News, cache: RaggedCache, most: int, draw: Draw) -> None:
        rows, last = torch.arange(len(news.counts), device=self.device), news.counts - 1
        states, shared = self._taken(news, cache)
        place = (cache.slots.ends + last)[:, None]
        distance = (place - torch.arange(cache.slots.end, device=self.device))[:, None]
        masks = {
            kind: as_bias(distance >= 0, distance, {kind: window}, self.model.dtype)
            for kind, window in self.windows.items()
        }
        state, token = states[rows, last], news.tokens[rows, last]
        for k in range(most):
            seen = self._step(token, state, news.first + place + 1, masks, shared)
            token = moved(draw(self._logits(seen)), self.device)
            if k + 1 < most:
                state = self.model.post_projection(seen)

    def _taken(self, news: News, cache: RaggedCache) -> tuple[Tensor, Shared]:
        """The target's states [B, N, H], and all keys and values, with those that have come."""
        cache.reserve(news.tokens.shape[1])
        sizes = [heads * size for heads, size in self.keys.values()]
        split = [self.model.config.backbone_hidden_size, *(size for size in sizes for _ in range(2))]
        states, *new = news.states.to(self.model.dtype).split(split, dim=-1)
        shared = {}
        for i, (kind, (heads, _)) in enumerate(self.keys.items()):
            keys, values = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in new[2 * i : 2 * i + 2])
            shared[kind] = cache.update(keys, values, i)
        return states, shared

    @grouped_attention()
    def _step(self, token: Tensor, state: Tensor, places: Tensor, masks: dict[str, Any], shared: Shared) -> Tensor:
        """[B, h] what the assistant makes of tokens [B] and states [B, H], at these places [B, 1]."""
        embedded = self.embed(moved(token, input_device(self.embed))).to(state)
        outputs = self.model.model(
            inputs_embeds=self.model.pre_projection(torch.cat([embedded, state], dim=-1))[:, None],
            attention_mask=masks,
            position_ids=places,
            shared_kv_states=shared,
            use_cache=False,
        )
        return outputs.last_hidden_state[:, 0]

    def _logits(self, seen: Tensor) -> Tensor:
        """[B, V]. Where tokens stand in groups, those of the likeliest groups have logits, and all others the lowest
        there is: transformers asks the device for the lowest of the batch instead, which nothing recorded may."""
        grouped, weight = self.model.masked_embedding, self.model.lm_head.weight
        if grouped is None:
            return self.model.lm_head(seen)
        groups = grouped.token_ordering.long().view(grouped.num_centroids, -1)
        likeliest = grouped.centroids(seen).topk(grouped.centroid_intermediate_top_k).indices
        tokens = groups[likeliest].flatten(1)
        known = (weight[tokens] @ seen[:, :, None])[:, :, 0]
        lowest = known.new_full((len(known), len(weight)), torch.finfo(known.dtype).min)
        return lowest.scatter(1, tokens, known)
