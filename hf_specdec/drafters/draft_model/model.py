"""`ModelOverCache`: a draft model with its own cache, whose slots are the columns of the target's `ids`."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...clock import now
from ...stats import SpeculationStats
from ...target.devices import input_device
from ...target.encoder_decoder import EncoderDecoderRunner, crosses, encoded, fresh_cache
from ...target.inputs import CACHE, position_limit
from ...target.joining import JoiningRunner, read_at_once
from ...target.lockstep import LockstepRunner
from ...target.masks import attention_windows
from ...target.probe import Support, support
from ...target.ragged import RaggedRunner
from ...target.staggered import StaggeredRunner
from ...transfer import moved, to_device
from .ahead import Ahead, reading_ahead
from .over_cache import OverCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelOverCache(OverCache):
    """Fed with the target's own tokens."""

    runner: LockstepRunner | RaggedRunner | StaggeredRunner

    def __init__(
        self,
        model: "PreTrainedModel",
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        lockstep: bool,
        most_rows: int = 0,
        most_tokens: int = 0,
        source: dict[str, Any] | None = None,
        stats: SpeculationStats | None = None,
        often: bool = False,
    ) -> None:
        """Reads the prompt.

        Args:
            prompt_ids: [B, P] left-padded.
            prompt_mask: [B, P] 1 where it is not padding.
            lockstep: rows keep equal lengths.
            most_rows: where rows come and go, how many are expected at once; there is no prompt then.
            most_tokens: of those together.
            source: for a draft of an encoder-decoder, `DraftContext.source`.
            stats: where its forwards are counted.
            often: it is rolled back more than once between two verdicts, as is what reads ahead.

        Raises:
            ValueError: the prompt fills the model's context.
        """
        self.vocab = model.config.get_text_config(decoder=True).vocab_size
        self.device = input_device(model)  # asked once: transformers looks for it among the parameters
        self.context_limit, self.lockstep = position_limit(model), lockstep
        self.good, self.held = [], []
        self.stats = SpeculationStats() if stats is None else stats
        self.stats.draft_calls += 1
        self.ahead: Ahead | None = None
        """what stands in the slots behind those that hold the text"""
        self.below: ModelOverCache | None = None
        """what guesses for it, over a cache of its own"""
        if (how := reading_ahead(model)) is not None and _jumps(model):
            smaller, prompt, bounds = how.smaller, (prompt_ids, prompt_mask), (most_rows, most_tokens)
            if smaller is not None and _jumps(smaller) and (lockstep or takes_uneven(smaller, support(smaller))):
                with suppress(ValueError):  # the prompt fills its context: copies are guessed instead
                    self.below = ModelOverCache(smaller, *prompt, lockstep, *bounds, source, often=True)
            self.ahead = Ahead(how, self.below)
        if most_rows:
            self.runner = JoiningRunner(model, most_rows, most_tokens)
            return
        check_room(prompt_mask, self.context_limit)
        ids, mask = self._known(prompt_ids), prompt_mask.to(self.device)
        if source is not None and crosses(model):
            with torch.no_grad():
                said = encoded(model, source)
            padded = {} if bool(mask.all()) else {"decoder_attention_mask": mask}
            over = said | padded | {CACHE: fresh_cache(model), "use_cache": True}
            equal = EncoderDecoderRunner(model, over, ids)
            self.runner = equal if lockstep else StaggeredRunner(equal)
        else:
            kwargs: dict[str, Any] = {CACHE: DynamicCache(config=model.config), "use_cache": True}
            kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)
            kwargs["attention_mask"] = None if lockstep and bool(mask.all()) else mask
            kwargs["logits_to_keep"] = 1
            jumps = often or self.ahead is not None
            uneven = not lockstep or (jumps and _windowed(model))
            self.runner = (RaggedRunner if uneven else LockstepRunner)(model, kwargs, ids)
        self.runner.prefill()
        self.good, self.held = list(self.runner.lengths), list(self.runner.lengths)

    def catch_up(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        if any(good >= length for good, length in zip(self.good, lengths, strict=True)):
            # transformers' own loop asks for a draft right after the prompt: its last token is fed again.
            self.roll_back([min(good, length - 1) for good, length in zip(self.good, lengths, strict=True)])
        logits = self.feed(ids, lengths)
        self.good = list(lengths)
        return logits

    def feed(self, ids: Tensor, lengths: Sequence[int], last: Tensor | None = None) -> Tensor:
        known = None if self.ahead is None else self.ahead.recall(ids, lengths)
        if known is None:
            known = self._read_on(ids, lengths, last)
        self.held = list(lengths)
        return known

    def _read_on(self, ids: Tensor, lengths: Sequence[int], last: Tensor | None) -> Tensor:
        """A forward, of guesses too where the model reads ahead."""
        self._drop()
        missing = [length - held for length, held in zip(lengths, self.held, strict=True)]
        tokens = self._columns(ids, self.held, max(missing)) if last is None else last[:, None]
        if self.ahead is None:
            return self._behind(self._forward(tokens, missing), missing)[:, -1]
        guesses = self.ahead.guess(ids, lengths, self.context_limit - max(lengths))
        count = len(guesses[0])
        if count:
            tokens = torch.nn.functional.pad(tokens, (0, count))
            places = to_device(missing, ids.device)[:, None] + torch.arange(count, device=ids.device)
            tokens = tokens.scatter(1, places, to_device(guesses, ids.device))
        began = now()
        logits = self._behind(self._forward(tokens, [n + count for n in missing]), missing, count)
        logits[0, 0, 0].item()  # an accelerator's answer is waited for, as its time is wanted
        self.ahead.how.cost.observe_forward(len(lengths), tokens.shape[1], now() - began)
        self.ahead.remember(logits)
        return logits[:, 0]

    def _forward(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Append tokens [B, T], of which `counts` are real; logits [B, T, V]."""
        self.stats.draft_calls += 1
        uneven = None if len(set(counts)) == 1 else counts
        return self.runner.forward(self._known(tokens), counts=uneven).logits

    @staticmethod
    def _behind(logits: Tensor, missing: Sequence[int], ahead: int = 0) -> Tensor:
        """[B, 1 + ahead, V] after the last of each row's missing tokens, and after those read ahead."""
        if len(set(missing)) == 1:
            return logits[:, missing[0] - 1 : missing[0] + ahead]
        first = to_device(missing, logits.device)[:, None] - 1
        places = first + torch.arange(1 + ahead, device=logits.device)
        return logits[torch.arange(len(missing), device=logits.device)[:, None], places]

    @staticmethod
    def _columns(ids: Tensor, first: Sequence[int], count: int) -> Tensor:
        """[B, count] columns of each row's ids, from its first one on."""
        if len(set(first)) == 1:
            return ids[:, first[0] : first[0] + count]
        index = to_device(first, ids.device)[:, None] + torch.arange(count, device=ids.device)
        return ids.gather(1, index.clamp(max=ids.shape[1] - 1))

    def _drop(self) -> None:
        """What was read ahead in vain."""
        if self.ahead is not None:
            self.ahead.forget()
        if self.runner.lengths != self.held:
            self.runner.truncate(self.held)

    def roll_back(self, good: list[int] | None = None) -> None:
        self.good = self.good if good is None else good
        self.held = list(self.good)
        self._drop()
        if self.below is not None:
            self.below.roll_back([min(pair) for pair in zip(self.below.good, self.good, strict=True)])

    def read(self, tokens: list[int]) -> None:
        """A row joins. What does not fit into the context is left out: nothing is drafted then."""
        assert isinstance(self.runner, JoiningRunner), "a batch with a prompt gets no new rows"
        known = tokens[: min(len(tokens), self.context_limit) - 1]
        ids = self._known(to_device([known], self.device))
        self.runner.join(read_at_once(self.runner.model, ids), len(known))
        self.good.append(len(known))
        self.held.append(len(known))
        if self.below is not None:
            self.below.read(tokens)

    def select(self, rows: list[int]) -> None:
        self._drop()
        self.good, self.held = [self.good[b] for b in rows], [self.held[b] for b in rows]
        self.runner.select(rows)
        if self.below is not None:
            self.below.select(rows)

    def notes(self) -> list[str]:
        return [] if self.ahead is None else self.ahead.notes()

    def _known(self, ids: Tensor) -> Tensor:
        """Ids for the model's embedding; ones it does not have cost acceptance, not the run."""
        return moved(ids, self.device).clamp(0, self.vocab - 1)


def check_room(prompt_mask: Tensor, limit: int) -> None:
    """Refuse prompts [B, P] that fill a context of `limit` tokens.

    Raises:
        ValueError: one does.
    """
    if (longest := int(prompt_mask.sum(-1).max())) >= limit:
        raise ValueError(f"the prompt has {longest} tokens, and the draft model's context holds {limit}")


def _windowed(model: "PreTrainedModel") -> bool:
    try:
        return any(attention_windows(model).values())
    except TypeError:  # layers of other kinds
        return True


def takes_uneven(model: "PreTrainedModel", can: Support) -> bool:
    """Whether rows may have lengths of their own. Beside an encoder no row gets far ahead: a stock cache will do."""
    return can is Support.RAGGED or (can is Support.LOCKSTEP and crosses(model) and not _windowed(model))


def _jumps(model: "PreTrainedModel") -> bool:
    """Whether a model can be rolled back again and again between two verdicts: a stock cache of sliding windows lets
    go of what lies before the first place that it is rolled back to."""
    return support(model) is Support.RAGGED or not _windowed(model)
