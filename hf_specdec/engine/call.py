"""`Call`: one `generate` call as transformers prepared it."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from ..stats import SpeculationStats
from ..target.inputs import CACHE, cached_columns
from ..target.probe import Ability, ability
from ..verify.judging import Judge
from ..verify.noise import Noise
from ..verify.processing import Processing
from ..verify.randomness import Randomness
from ..verify.rules import Rules
from .outputs import StepOutputs
from .stopping import Stopping

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Call:
    """One `generate` call, prepared by transformers."""

    target: "PreTrainedModel"
    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict[str, Any]
    streamer: Any = None
    new_columns: int | None = None
    """how many of the last columns of the prompt, ids or `inputs_embeds`, the cache does not hold yet; None for all"""
    keeps_cache: bool = False
    """whether the cache outlives the call: the user passed it, or is given it"""
    pad_token_id: int = 0
    rules: Rules = field(default_factory=Rules)
    source: dict[str, Any] | None = None
    """what the encoder was given, of an encoder-decoder"""
    notice: str = ""
    """what to warn of once it is known that the call is not decoded plainly"""
    stopping: Stopping = field(init=False)
    processing: Processing = field(init=False)

    def __post_init__(self) -> None:
        self.stopping, self.processing = Stopping(self.criteria), Processing(self.processors)

    @cached_property
    def ability(self) -> Ability:
        """Of the target, as it is in this call."""
        return ability(self.target)

    @property
    def prompt_mask(self) -> Tensor:
        """[B, P] 1 where `input_ids` is not padding."""
        mask = self.model_kwargs.get("attention_mask" if self.source is None else "decoder_attention_mask")
        if mask is None:
            return torch.ones_like(self.input_ids)
        missing = self.input_ids.shape[1] - mask.shape[1]  # fewer than none where a cache is continued
        return torch.nn.functional.pad(mask, (missing, 0), value=1).to(self.input_ids.device)

    @property
    def unnamed(self) -> int:
        """Columns of the prompt that are embeddings without ids, which `max_length` does not count."""
        embeds = None if self.source is not None else self.model_kwargs.get("inputs_embeds")
        return 0 if embeds is None else embeds.shape[1] - self.input_ids.shape[1]

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn; where sampling is coupled the likeliest ones are taken, of scores with noise."""
        return bool(self.config.do_sample) and not self.rules.coupled

    @property
    def most_columns(self) -> int:
        """That the text may come to."""
        return 2**31 if self.stopping.max_length is None else self.stopping.max_length

    def judge(self, randomness: Randomness, stats: SpeculationStats, joined: bool = False) -> Judge:
        """By what the call asks for.

        Args:
            joined: whether it judges other calls of equal settings, too, without padding.
        """
        noise = self.noise(randomness, joined)
        return Judge(self.processing, self.processors, self.draws, randomness, stats, self.rules, noise)

    def noise(self, randomness: Randomness, joined: bool = False) -> Noise | None:
        """Of coupled sampling; None elsewhere. Arguments as for `judge`."""
        if not (self.config.do_sample and self.rules.coupled):
            return None
        return Noise(randomness, [] if joined else self._pads(), self.config.num_return_sequences or 1)

    def _pads(self) -> list[int]:
        """[B] columns of `input_ids` that are no tokens, less the tokens that only a continued cache holds."""
        pads, cache = (self.prompt_mask == 0).sum(1), self.model_kwargs.get(CACHE)
        held = 0 if cache is None or self.new_columns is not None else cached_columns(cache)
        mask = self.model_kwargs.get("attention_mask")
        if held and self.source is None and mask is not None and mask.shape[1] > self.input_ids.shape[1]:
            return (pads - (mask[:, : -self.input_ids.shape[1]] != 0).sum(1).to(pads)).tolist()
        return (pads - held).tolist()

    def may_be_ragged(self) -> bool:
        """Whether no part of the call needs the whole rectangular batch at every step."""
        return not (
            self.processing.opaque
            or self.stopping.opaque
            or self.streamer is not None
            or StepOutputs.wanted(self.config)
            # Without an EOS, plain decoding goes on with stopped rows until all have stopped.
            or (self.stopping.asked and not self.stopping.has_eos)
        )


class PlainDecodingNeeded(Exception):
    """Raised before any forward where this call cannot be sped up; the message says why."""

    def __init__(self, call: Call, reason: str) -> None:
        super().__init__(reason)
        self.call = call
