"""`Gemma4Drafter`: the assistants that are published for Gemma 4 (`google/gemma-4-E2B-it-assistant` and others).

An assistant has no keys of its own. Its layers look at those of the target's last layer of each kind, always from the
place of the last token. A step reads the token before it, beside the target's last state; each other one beside what
the step before it made of that.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import PreTrainedConfig

from ...config import DrafterConfig, ranged
from ...hub.registry import register_drafter
from ...protocol import DraftContext
from ...target.cache import RaggedCache
from ...target.devices import input_device
from ...target.features import shared_kinds
from ...target.grouped import grouped_attention
from ...transfer import moved
from .drafter import PublishedHeadDrafter
from .head import ChainHead, News
from .parts import masks_at, over_vocabulary

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


class Gemma4State(NamedTuple):
    """Between two steps."""

    made: Tensor
    """[B, 1, h] what the assistant has made of the last token"""
    asked: dict[str, Any]
    """what all steps look at, and from where"""


class Gemma4Head(ChainHead[Gemma4State]):
    """Transformers' own model over copies of the target's keys, of which a row's stand where its states do."""

    def __init__(self, context: DraftContext, model: Any, most: int) -> None:
        super().__init__(context, model, input_device(model.pre_projection), most)
        self.keys, window = keys_read(model), model.config.get_text_config().sliding_window
        self.features, self.embeddings = [-1, *self.keys], self.target.get_input_embeddings()
        self.held = PreTrainedConfig(
            num_hidden_layers=len(self.keys), layer_types=list(self.keys), sliding_window=window
        )
        # As transformers' assistant has it: places that are a window away are seen, too.
        self.windows = {kind: window + 1 if kind == "sliding_attention" else None for kind in self.keys}

    def begin(self, news: News, cache: RaggedCache, most: int) -> Gemma4State:
        states, shared = self._taken(news, cache)
        slot = news.last(news.slots(cache))
        asked = {
            "attention_mask": masks_at(slot, cache, self.windows, self.model.dtype),
            "position_ids": news.first + slot + 1,
            "shared_kv_states": shared,
        }
        return Gemma4State(self._made(news.last(news.tokens), news.last(states), asked), asked)

    def _taken(self, news: News, cache: RaggedCache) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """The target's states [B, N, H], and by kind all keys and values [B, heads, S, size], with those that have
        come."""
        cache.reserve(news.tokens.shape[1])
        sizes = [heads * size for heads, size in self.keys.values()]
        split = [self.model.config.backbone_hidden_size, *(size for size in sizes for _ in range(2))]
        states, *new = news.states.to(self.model.dtype).split(split, dim=-1)
        shared = {}
        for i, (kind, (heads, _)) in enumerate(self.keys.items()):
            keys, values = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in new[2 * i : 2 * i + 2])
            shared[kind] = cache.update(keys, values, i)
        return states, shared

    def step(self, state: Gemma4State, tokens: Tensor) -> Gemma4State:
        made = self._made(tokens, self.model.post_projection(state.made), state.asked)
        return state._replace(made=made)

    @grouped_attention()
    def _made(self, tokens: Tensor, states: Tensor, asked: dict[str, Any]) -> Tensor:
        """[B, 1, h] what the assistant makes of tokens [B, 1] and states [B, 1, H]."""
        embedded = self.embeddings(moved(tokens, input_device(self.embeddings))).to(states)
        read = self.model.pre_projection(torch.cat([embedded, states], dim=-1))
        return self.model.model(inputs_embeds=read, use_cache=False, **asked).last_hidden_state  # type: ignore[no-any-return]

    def logits(self, state: Gemma4State) -> Tensor:
        """Where tokens stand in groups, those of the likeliest groups have logits, and all others the lowest there is:
        transformers asks the device for the lowest of the batch instead, which nothing recorded may."""
        made, grouped, weight = state.made[:, 0], self.model.masked_embedding, self.model.lm_head.weight
        if grouped is None:
            return self.model.lm_head(made)  # type: ignore[no-any-return]
        groups = grouped.token_ordering.long().view(grouped.num_centroids, -1)
        likeliest = grouped.centroids(made).topk(grouped.centroid_intermediate_top_k).indices
        tokens = groups[likeliest].flatten(1)
        return over_vocabulary((weight[tokens] @ made[:, :, None])[:, :, 0], tokens, len(weight))


@register_drafter
class Gemma4Drafter(PublishedHeadDrafter):
    """Drafts with an assistant that was trained for a Gemma 4 model."""

    config_class = Gemma4Config
    config: Gemma4Config
    what = "an assistant of Gemma 4"

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

    def check_target(self, target: "PreTrainedModel") -> None:
        mine, theirs = self.draft_model.config, target.config.get_text_config(decoder=True)
        read, told = keys_read(self.draft_model), keys_read(target.get_decoder()) if shared_kinds(target) else {}
        wrong, known = "", mine.get_text_config().vocab_size
        if not told:
            wrong = "looks at keys and values that the target does not tell"
        elif known != theirs.vocab_size:
            wrong = f"knows {known} tokens"
        elif differing := [kind for kind, size in read.items() if told.get(kind) != size]:
            kind = differing[0]
            wrong = f"looks at keys of {kind} of (heads, size) {read[kind]}, while the target's are {told.get(kind)}"
        self.check_fits(target, mine.get_text_config(), width=mine.backbone_hidden_size, wrong=wrong)

    def head(self, context: DraftContext) -> Gemma4Head:
        return Gemma4Head(context, self.draft_model, self.most)


def keys_read(model: Any) -> dict[str, tuple[int, int]]:
    """By kind of layer, heads and size of the keys that a Gemma 4 text model, or an assistant, looks at."""
    attentions = [layer.self_attn for layer in getattr(model, "model", model).layers]
    return {
        each.layer_type: (each.config.num_attention_heads // each.num_key_value_groups, each.head_dim)
        for each in attentions
    }
