"""Draft models with another tokenizer: they read the text in their own tokens, and draft those that both have.

The draft model's logits for tokens that the target has too are a distribution over the target's vocabulary like any
other: drafts are drawn from it and tested against it (token-level intersection, Timor et al. 2025). transformers' own
translator finds the shared tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.candidate_generator import AssistantVocabTranslatorCache

from ...errors import SpeculationError, expect_model
from ...hub.tokenizer import ids_of, sizes_apart
from ...target.devices import input_device
from ...target.probe import Support, support
from ...transfer import to_device, to_host
from .model import ModelOverCache
from .over_cache import DraftCall, OverCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Translated:
    """A draft model with another tokenizer than the target's. Drafters take it in place of a draft model, which stays
    as it is. Only tokens of both vocabularies are drafted; the text stays the target's.

    Raises:
        SpeculationError: no model (a drafter's own is `drafter.draft_model`), or the vocabularies share fewer than two
            tokens.
    """

    draft_model: "PreTrainedModel"
    """drafts"""
    tokenizer: "PreTrainedTokenizerBase"
    """the target's"""
    draft_tokenizer: "PreTrainedTokenizerBase"
    """the draft model's"""
    same: dict[int, int] = field(init=False, repr=False, compare=False)
    """the target's ids of the tokens that both have → the draft's ids of them"""
    size: int = field(init=False, compare=False)
    """of the target's vocabulary"""

    def __post_init__(self) -> None:
        expect_model("draft_model", self.draft_model)
        self.size = max(self.tokenizer.get_vocab().values()) + 1
        known = AssistantVocabTranslatorCache.get_translator(self.tokenizer, self.draft_tokenizer, self.size)
        self.same = dict(known.target_to_assistant_input_ids)
        if len(self.same) < 2:
            raise SpeculationError(
                f"the target's vocabulary and the draft model's share {len(self.same)} tokens, of {self.size} and "
                f"{len(self.draft_tokenizer)}; use a draft of a closer family"
            )
        self._same_on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def generation_config(self) -> Any:
        """The draft model's, for what transformers' users set on an assistant."""
        return getattr(self.draft_model, "generation_config", None)

    def check(self, target: "PreTrainedModel") -> None:
        """Refuse a target of another tokenizer.

        Raises:
            SpeculationError: it names both.
        """
        config: Any = target.config.get_text_config(decoder=True)
        ends, mine = ids_of(getattr(config, "eos_token_id", None)), self.tokenizer.eos_token_id
        if sizes_apart(self.size, config.vocab_size) or (mine is not None and ends and mine not in ends):
            raise SpeculationError(
                f"the draft model was translated for a target of {self.size} tokens with the EOS token {mine}, "
                f"and {type(target).__name__} has {config.vocab_size} tokens and the EOS tokens {sorted(ends)}; "
                "pass this target's tokenizer to Translated(...)"
            )

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """The draft's tokens of a whole text, at least one."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return self.draft_tokenizer(text)["input_ids"] or [self.filler]

    def token(self, token: int) -> list[int]:
        """The draft's tokens of one token, at least one: itself, where both have it."""
        if (same := self.same.get(token)) is not None:
            return [same]
        text = self.tokenizer.decode([token], skip_special_tokens=True)
        return self.draft_tokenizer(text, add_special_tokens=False)["input_ids"] or [self.filler]

    @property
    def filler(self) -> int:
        """The draft's token in place of tokens without a text, such as markers."""
        known = (self.draft_tokenizer.bos_token_id, self.draft_tokenizer.eos_token_id)
        return next((token for token in known if token is not None), 0)

    def logits(self, logits: Tensor) -> Tensor:
        """[B, draft's vocabulary] → [B, target's]; the lowest value for tokens that the draft does not have."""
        if logits.device not in self._same_on:
            mine, theirs = to_device([list(self.same), list(self.same.values())], logits.device)
            self._same_on[logits.device] = mine, theirs
        mine, theirs = self._same_on[logits.device]
        said = logits.new_full((len(logits), self.size), torch.finfo(logits.dtype).min)
        said[:, mine] = logits[:, theirs]
        return said


def model_of(draft: "PreTrainedModel | Translated") -> "PreTrainedModel":
    """The draft model itself."""
    return draft.draft_model if isinstance(draft, Translated) else draft


class TranslatedOverCache(OverCache):
    """A draft model with another tokenizer over its own cache. It is fed the target's tokens and answers with logits
    over them. Slots are columns of the target's `ids`; the model inside counts its own."""

    def __init__(self, speech: Translated, call: DraftCall) -> None:
        """
        Args:
            speech: the draft model with the two tokenizers.

        Raises:
            ValueError: a batch, for a model that does not support rows of different lengths.
        """
        model = speech.draft_model
        self.speech, self.device, self.lockstep = speech, input_device(model), call.lockstep
        masks = to_host(call.prompt_mask.bool())
        prompts = zip(to_host(call.prompt_ids), masks, strict=True)
        mine = [speech.prompt(list(compress(row, real))) for row, real in prompts]
        width = max(map(len, mine), default=0)
        self.texts: list[list[int]] = [[0] * (width - len(row)) + row for row in mine]
        """[B] the text in the draft's tokens, with its padding"""
        self.ends: list[list[int]] = [[width] * (len(real) + 1) for real in masks]
        """[B][columns + 1] how much of that stands before each column of the target's"""
        real = to_device([[0] * (width - len(row)) + [1] * len(row) for row in mine], self.device)
        # Rows as long as each other in the target's tokens are not so in the draft's.
        if len(mine) > 1 and support(model) is not Support.RAGGED:
            raise ValueError(
                "rows of a translated batch have different lengths, which the draft model does not support"
            )
        alone, ids = call.lockstep and len(mine) == 1, to_device(self.texts, self.device)
        self.inner = ModelOverCache(model, replace(call, prompt_ids=ids, prompt_mask=real, lockstep=alone))
        self.stats = self.inner.stats
        self.good = [len(real) for real in masks]
        self.held = list(self.good)

    @property
    def context_limit(self) -> int:  # type: ignore[override]
        """In columns of the target's, as long as every token is one of the draft's."""
        longer = (ends[-1] - (len(ends) - 1) for ends in self.ends)
        return self.inner.context_limit - max(longer, default=0)

    def catch_up(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        logits = self._behind_columns(ids, lengths, self.inner.catch_up)
        self.good = list(lengths)
        return logits

    def feed(self, ids: Tensor, lengths: Sequence[int], last: Tensor | None = None) -> Tensor:
        return self._behind_columns(ids, lengths, self.inner.feed)

    def _behind_columns(
        self, ids: Tensor, lengths: Sequence[int], read: Callable[[Tensor, Sequence[int]], Tensor]
    ) -> Tensor:
        """What the model inside says behind so many columns, those that are new translated one by one."""
        self._cut(lengths)
        first = min(len(ends) - 1 for ends in self.ends)
        new = to_host(ids[:, first : max(lengths)])
        for text, ends, row, length in zip(self.texts, self.ends, new, lengths, strict=True):
            for token in row[len(ends) - 1 - first : length - first]:
                text += self.speech.token(token)
                ends.append(len(text))
        self.held = list(lengths)
        width, mine = max(map(len, self.texts)), [len(text) for text in self.texts]
        if width > self.inner.context_limit:
            raise ValueError(
                f"the text has {width} tokens of the draft model, whose context holds {self.inner.context_limit}"
            )
        padded = [text + [0] * (width - len(text)) for text in self.texts]
        return self.speech.logits(read(to_device(padded, self.device), mine))

    def _cut(self, columns: Sequence[int]) -> None:
        """Forget the texts behind so many columns."""
        for text, ends, count in zip(self.texts, self.ends, columns, strict=True):
            del ends[count + 1 :]
            del text[ends[-1] :]

    def roll_back(self, good: list[int] | None = None) -> None:
        self.good = self.good if good is None else good
        self.held = list(self.good)
        self._cut(self.good)
        self.inner.roll_back([min(pair) for pair in zip(map(len, self.texts), self.inner.held, strict=True)])

    def select(self, rows: list[int]) -> None:
        self.good, self.held = [self.good[b] for b in rows], [self.held[b] for b in rows]
        self.texts, self.ends = [list(self.texts[b]) for b in rows], [list(self.ends[b]) for b in rows]
        self.inner.select(rows)

    def read(self, tokens: list[int]) -> None:
        """A row joins, all but its last token."""
        text = self.speech.prompt(tokens[:-1])
        self.inner.read([*text, self.speech.filler])
        self.texts.append(text)
        self.ends.append([len(text)] * len(tokens))
        self.good.append(len(tokens) - 1)
        self.held.append(len(tokens) - 1)


def over_cache(draft: "PreTrainedModel | Translated", call: DraftCall) -> OverCache:
    """A draft model over its own cache, which has read the call's prompt."""
    return TranslatedOverCache(draft, call) if isinstance(draft, Translated) else ModelOverCache(draft, call)
