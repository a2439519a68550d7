"""`ModelOverCache`: a draft model with its own cache, whose slots are the columns of the target's `ids`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...target.capturable import is_captured
from ...target.captured import Captured, CapturedRunner
from ...target.captured_joining import joining_runner
from ...target.devices import input_device
from ...target.encoder_decoder import crosses, encoded, fresh_cache
from ...target.inputs import CACHE, as_when_decoding, mixes_experts, position_limit
from ...target.joining import JoiningRunner, read_at_once
from ...target.lockstep import LockstepRunner
from ...target.masks import attention_windows
from ...target.probe import Support, support
from ...target.ragged import RaggedRunner
from ...target.staggered import StaggeredRunner
from ...transfer import moved, to_device
from .over_cache import DraftCall, OverCache, Picking

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_FIRST = 2
"""tokens that a chain of steps begins with"""


class ModelOverCache(OverCache):
    """A draft model with the target's tokenizer, over a cache whose slots are the columns of the target's `ids`."""

    runner: LockstepRunner | RaggedRunner | StaggeredRunner

    def __init__(self, model: "PreTrainedModel", call: DraftCall) -> None:
        """Reads the prompt.

        Raises:
            ValueError: the prompt fills the model's context.
        """
        self.model, self.mixes_experts = model, mixes_experts(model)
        self.vocab = model.config.get_text_config(decoder=True).vocab_size
        self.device = input_device(model)  # asked once: transformers looks for it among the parameters
        self.context_limit, self.lockstep = position_limit(model), call.lockstep
        self.good = []
        self.stats = call.stats
        self.stats.draft_calls += 1
        if call.most_rows:
            self.runner = joining_runner(model, call.most_rows, call.most_tokens, call.forwards)
            return
        check_room(call.prompt_mask, self.context_limit)
        ids, mask = self._known(call.prompt_ids), call.prompt_mask.to(self.device)
        if call.source is not None and crosses(model):
            with torch.no_grad():
                said = encoded(model, call.source)
            padded = {} if bool(mask.all()) else {"decoder_attention_mask": mask}
            over = said | padded | {CACHE: fresh_cache(model), "use_cache": True}
            equal = LockstepRunner(model, over, ids)
            self.runner = equal if call.lockstep else StaggeredRunner(equal)
        else:
            kwargs: dict[str, Any] = {CACHE: DynamicCache(config=model.config), "use_cache": True}
            kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)
            kwargs["attention_mask"] = None if call.lockstep and bool(mask.all()) else mask
            kwargs["logits_to_keep"] = 1
            eager = LockstepRunner if call.lockstep else RaggedRunner
            kind = CapturedRunner if is_captured(model, call.forwards) else eager
            self.runner = kind(model, kwargs, ids)
            if isinstance(self.runner, CapturedRunner):
                self.runner.expect(call.most_columns)
        self.runner.prefill()
        self.good = self.held

    @property
    def held(self) -> list[int]:  # type: ignore[override]
        return list(self.runner.lengths)

    def catch_up(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        self._leave_one(lengths)
        logits = self.feed(ids, lengths)
        self.good = list(lengths)
        return logits

    def missing(self, ids: Tensor, lengths: Sequence[int]) -> Tensor | None:
        self._leave_one(lengths)
        counts = {length - n for length, n in zip(lengths, self.held, strict=True)}
        return self._columns(ids, self.held, max(counts)) if len(counts) == 1 and max(counts) <= MOST_FIRST else None

    def _leave_one(self, lengths: Sequence[int]) -> None:
        """transformers' own loop asks for a draft right after the prompt: its last token is fed again."""
        if any(good >= length for good, length in zip(self.good, lengths, strict=True)):
            self.roll_back([min(good, length - 1) for good, length in zip(self.good, lengths, strict=True)])

    def places(self, ids: Tensor, lengths: Sequence[int], count: int) -> Tensor:
        self._leave_one(lengths)
        logits = self._fed(ids, [length + count - 1 for length in lengths], None, count)
        self.roll_back(list(lengths))
        return logits

    def feed(self, ids: Tensor, lengths: Sequence[int], last: Tensor | None = None) -> Tensor:
        return self._fed(ids, lengths, last)[:, 0]

    def _fed(self, ids: Tensor, lengths: Sequence[int], last: Tensor | None, count: int = 1) -> Tensor:
        """As `feed`, the logits [B, count, V] after the last of each row's columns."""
        self.stats.draft_calls += 1
        held = self.held
        missing = [length - n for length, n in zip(lengths, held, strict=True)]
        tokens = self._columns(ids, held, max(missing)) if last is None else last[:, None]
        uneven = len(set(missing)) > 1
        with self._decoding():
            logits = self.runner.forward(self._known(tokens), counts=missing if uneven else None).logits
        if not uneven:
            return logits[:, -count:]
        ends = to_device(missing, logits.device)[:, None] + torch.arange(-count, 0, device=logits.device)
        return logits[torch.arange(len(missing), device=logits.device)[:, None], ends]

    @property
    def chains(self) -> bool:  # type: ignore[override]
        return isinstance(self.runner, Captured) and self.runner.is_captured

    def chain(self, first: Tensor, count: int, pick: Picking, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
        assert isinstance(self.runner, Captured)
        self.stats.draft_calls += count

        def choose(logits: Tensor, numbers: Tensor | None) -> tuple[Tensor, ...]:
            tokens, *more = pick.choose(logits, numbers)
            return self._known(tokens), *more

        with self._decoding():
            return self.runner.chain(self._known(first), count, pick.numbers, choose, (pick.key, self.vocab), lengths)

    def learns(self, lengths: list[int], count: int) -> None:
        self.good = list(lengths)
        self.runner.truncate([length + count - 1 for length in lengths])

    def _decoding(self) -> AbstractContextManager[Any]:
        """Where experts are mixed, by the kernel of single tokens; to ask for it takes long."""
        return as_when_decoding(self.model) if self.mixes_experts else nullcontext()

    @staticmethod
    def _columns(ids: Tensor, first: Sequence[int], count: int) -> Tensor:
        """[B, count] columns of each row's ids, from its first one on."""
        if len(set(first)) == 1:
            return ids[:, first[0] : first[0] + count]
        index = to_device(first, ids.device)[:, None] + torch.arange(count, device=ids.device)
        return ids.gather(1, index.clamp(max=ids.shape[1] - 1))

    def roll_back(self, good: list[int] | None = None) -> None:
        self.good = self.good if good is None else good
        if self.held != self.good:
            self.runner.truncate(self.good)

    def read(self, tokens: list[int]) -> None:
        """A row joins. What does not fit into the context is left out: nothing is drafted then."""
        assert isinstance(self.runner, JoiningRunner), "a batch with a prompt gets no new rows"
        known = tokens[: min(len(tokens), self.context_limit) - 1]
        ids = self._known(to_device([known], self.device))
        self.runner.join(read_at_once(self.runner.model, ids), len(known))
        self.good.append(len(known))

    def select(self, rows: list[int]) -> None:
        self.good = [self.good[b] for b in rows]
        self.runner.select(rows)

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


def takes_uneven(model: "PreTrainedModel") -> bool:
    """Whether rows may have lengths of their own. Beside an encoder no row gets far ahead: a stock cache will do."""
    can = support(model)
    return can is Support.RAGGED or (can is Support.LOCKSTEP and crosses(model) and not _windowed(model))
