"""`EagleDrafter`: EAGLE-3 (Li et al. 2025, arXiv 2503.01840). A layer over the target's low, middle and high states
drafts a chain: its first step reads these and the tokens behind them, each other one its own last state and the token
that was drawn from it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from huggingface_hub.dataclasses import strict
from torch import Tensor

from ...config import DrafterConfig, ranged
from ...hub.registry import register_drafter
from ...protocol import DraftContext
from ...target.cache import RaggedCache
from ...target.devices import input_device
from ...target.grouped import grouped_attention
from .drafter import PublishedHeadDrafter
from .head import ChainHead, Head, News
from .parts import embedded, masks_at, over_vocabulary, windows_within
from .peagle import ParallelEagleHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .eagle_model import LlamaForCausalLMEagle3


@strict
@dataclass(kw_only=True)
class EagleConfig(DrafterConfig):
    """Options of `EagleDrafter`."""

    drafter_type: ClassVar[str] = "eagle3"

    num_draft_tokens: int = ranged(
        4, 1, 16, "γ, steps of the head per round. Greedy decoding makes fewer where these promise more"
    )


class EagleState(NamedTuple):
    """Where the head stands: T places, of which those drafted behind are read one by one."""

    a: Tensor
    """[B, T, H] what the layer has passed on, at first g"""
    normed: Tensor
    """[B, T, H] what logits are made of"""
    slots: Tensor
    """[B, T] of the cache, where these stand"""
    first: Tensor
    """[B, 1] as of `News`"""
    cache: RaggedCache


class EagleHead(ChainHead[EagleState]):
    """A chain a round."""

    def __init__(self, context: DraftContext, model: "LlamaForCausalLMEagle3", most: int) -> None:
        super().__init__(context, model, input_device(model.fc), most)
        self.features = model.states_read(self.target.config.get_text_config(decoder=True).num_hidden_layers)
        self.beyond, self.vocab_size, self.windows = most, context.vocab_size, windows_within(model, self.target)
        self.embeddings = model.embed_tokens or self.target.get_input_embeddings()

    def begin(self, news: News, cache: RaggedCache, most: int) -> EagleState:
        cache.reserve(news.tokens.shape[1] + most - 1)
        g = self.model.fused(news.states.to(self.model.dtype))
        read = self._read(EagleState(g, g, news.slots(cache), news.first, cache), news.tokens)
        return read._replace(a=news.last(read.a), normed=news.last(read.normed), slots=news.last(read.slots))

    def step(self, state: EagleState, tokens: Tensor) -> EagleState:
        return self._read(state._replace(slots=state.slots + 1), tokens)

    @grouped_attention()
    def _read(self, state: EagleState, tokens: Tensor) -> EagleState:
        """The layer over a and tokens [B, T]. What stands in the slots of shorter rows' padding is written over."""
        state.cache.slots.write_to(state.slots)
        masks = masks_at(state.slots, state.cache, self.windows, state.a.dtype)
        e = embedded(self.embeddings, tokens).to(state.a)
        a, normed = self.model(state.a, e, state.first + state.slots, masks, state.cache)
        return state._replace(a=a, normed=normed)

    def logits(self, state: EagleState) -> Tensor:
        known = self.model.lm_head(state.normed[:, 0])
        return over_vocabulary(known, self.model.tokens, self.vocab_size)


@register_drafter
class EagleDrafter(PublishedHeadDrafter):
    """Drafts with an EAGLE-3 head that was trained for the target (Li et al. 2025)."""

    config_class = EagleConfig
    config: EagleConfig
    what = "an EAGLE-3 head"
    format = "eagle_format"
    published_as = ("eagle3", "peagle")

    @staticmethod
    def takes(model: object) -> bool:
        """Whether it is an EAGLE-3 head."""
        return hasattr(model, "states_read")

    @classmethod
    def reads(cls, content: dict[str, Any]) -> bool:
        names = content.get("architectures")
        names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        ours = any("Eagle3" in name for name in names)
        return ours or (names == ["LlamaForCausalLM"] and "draft_vocab_size" in content)  # SafeAILab's

    def check_target(self, target: "PreTrainedModel") -> None:
        head, theirs, wrong = self.draft_model, target.config.get_text_config(decoder=True), ""
        width, states = head.config.hidden_size, head.states_read(theirs.num_hidden_layers)
        if theirs.num_hidden_layers in states:
            wrong = f"reads hidden state {theirs.num_hidden_layers}, which is at hand behind the target's norm only"
        elif head.embed_tokens is None and width != theirs.hidden_size:
            wrong = f"has width {width} and no embeddings"
        read, last = head.of_config("target_hidden_size", width), max(int(head.tokens.max()), head.mask_token or 0)
        self.check_fits(target, head.config, width=read, states=states, token=last, wrong=wrong)

    def head(self, context: DraftContext) -> Head:
        kind = EagleHead if self.draft_model.mask_token is None else ParallelEagleHead
        return kind(context, self.draft_model, self.config.num_draft_tokens)
