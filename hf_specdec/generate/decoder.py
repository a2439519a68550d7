"""`BatchDecoder`: requests come at any time, and their rows join a batch that is being decoded."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from ..clock import now
from ..drafters.base import Drafter
from ..engine.answer import Answer, QueueFull
from ..engine.call import Call
from ..engine.modes import rope_changes
from ..engine.request import Request, settings_of
from ..engine.requests import Requests
from ..errors import SpeculationError, shown
from ..stats import SpeculationStats
from ..target.devices import input_device
from ..target.inputs import CACHE, position_limit, takes_ragged_inputs
from ..verify.randomness import Randomness
from ..verify.rules import Rules
from . import drafter_for, prepared
from .settings import own_draft

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOT_TAKEN = {
    "assistant_model": "name one drafter for all of them, BatchDecoder(model, drafter)",
    "assistant_tokenizer": "give it a drafter over Translated(draft_model, tokenizer, draft_tokenizer)",
    "inputs_embeds": "it takes token ids; use model.generate",
    "position_ids": "the positions of each request begin at 0",
    "output_scores": "a result holds tokens only; use model.generate",
    "output_logits": "a result holds tokens only; use model.generate",
    "output_hidden_states": "a result holds tokens only; use model.generate",
    "output_attentions": "a result holds tokens only; use model.generate",
    "return_dict_in_generate": "a result holds tokens only, and `answer.stats` the statistics",
}
"""options of `generate` that no request may have, and why"""


class Load(NamedTuple):
    """What a decoder holds at this moment."""

    rows: int
    """that are being decoded"""
    waiting: int
    tokens: int
    """in the cache"""
    reserved: int
    """slots of the cache, empty ones among them; never above `max_tokens` but for a prompt that is being read"""
    bytes: int
    """of the cache"""


class BatchDecoder:
    """Decodes what is submitted, as many rows at once as there is room for, first come first served.

    A prompt is read in pieces that hold the other rows up for no longer than a round of theirs. A row that ends leaves
    at once, and its room is the next one's. Every answer is that of `model.generate` for its own settings: rows share
    the target's forwards and nothing else. Drafts are verified as far as that pays for the batch as it is; a full one
    often leaves nothing to gain, and is decoded plainly.

        with BatchDecoder(model, drafter) as decoder:
            answers = [decoder.submit(ids, max_new_tokens=64) for ids in prompts]
            texts = [answer.result() for answer in answers]
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        drafter: "Drafter | PreTrainedModel | str | None" = None,
        generation_config: GenerationConfig | None = None,
        *,
        max_rows: int = 16,
        max_tokens: int = 32_768,
        max_waiting: int = 1024,
        forwards: str = "auto",
    ) -> None:
        """
        Args:
            drafter: any that drafts one after the other with the target (not PEARL), a draft model, or a type such as
                "auto"; None for what the generation config's `speculation_type` or `assistant_early_exit` asks for, or
                for plain decoding.
            generation_config: for all requests, each of which may say otherwise; None for the model's own.
            max_rows: decoded at once.
            max_tokens: bound of the cache, in tokens of all rows together; rows are as long in it as the longest.
            max_waiting: requests that may wait for room, or for their turn to be read.
            forwards: "auto", "eager", "captured" or "bitwise", of all requests, who share them. With "bitwise" no other
                request changes a text, in any dtype: drafts are chains, draws are coupled, and each row has an equal
                share of `max_tokens`.

        Raises:
            SpeculationError: a bad argument, a drafter for another target or with an order of its own, or a model that
                does not take rows of different lengths, or not such forwards.
        """
        for name, value in (("max_rows", max_rows), ("max_tokens", max_tokens), ("max_waiting", max_waiting)):
            if type(value) is not int or value < 1:
                raise SpeculationError(f"{name} must be a whole number of 1 or more, got {shown(value)}")
        self.forwards = Rules(forwards=forwards).forwards  # type: ignore[arg-type]
        if drafter is None:
            drafter, named = own_draft(model, {"generation_config": generation_config})
            generation_config = named["generation_config"]
        self.model, self.generation_config, self.max_waiting = model, generation_config, max_waiting
        self.drafter = drafter_for(model, drafter, generation_config)
        if self.drafter is not None and type(self.drafter).schedule is not Drafter.schedule:
            raise SpeculationError(
                f"drafter={self.drafter} drafts while the target verifies, which works for the rows of one call "
                "only; give BatchDecoder another drafter, for example hybrid, draft_model or prompt_lookup"
            )
        if self.drafter is not None and self.drafter.brings_runner and forwards == "bitwise":
            raise SpeculationError(
                f"drafter={self.drafter} changes the shape of the target's forwards, and with forwards='bitwise' all "
                "have one; give BatchDecoder another drafter, for example hybrid, draft_model or prompt_lookup"
            )
        self._engine = Requests(model, self.drafter, max_rows, max_tokens, forwards)
        self._waiting: deque[Request] = deque()
        self._news = threading.Condition()
        self._numbers, self._closing, self._giving_up = count(), False, False
        self._thread = threading.Thread(target=self._run, name="BatchDecoder", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ for those who ask

    def submit(
        self, input_ids: Tensor | Sequence[int] | Mapping[str, Any], *, streamer: Any = None, **options: Any
    ) -> Answer:
        """Ask for an answer, whose result is the new tokens, without the prompt. Returns at once.

        Args:
            input_ids: [P] or [1, P] tokens of one prompt, or what a tokenizer gives of it.
            streamer: gets each token as `generate`'s would.
            options: any of `generate`'s for one row, among them `generation_config`. An end is needed: `max_new_tokens`
                or `max_length`.

        Raises:
            QueueFull: `max_waiting` requests wait.
            SpeculationError: an argument that `generate` or a batch does not take, or a prompt that never fits.
            ValueError: whatever else transformers refuses.
        """
        request = self._request(input_ids, streamer, options)
        with self._news:
            if not self.alive:
                raise SpeculationError("this BatchDecoder is closed; make a new one")
            if len(self._waiting) >= self.max_waiting:
                raise QueueFull(
                    f"{len(self._waiting)} requests are waiting already, the most that "
                    f"max_waiting={self.max_waiting} allows; try again later"
                )
            if streamer is not None:
                streamer.put(request.call.input_ids.cpu())
            self._waiting.append(request)
            self._news.notify_all()
        return request.answer

    @property
    def load(self) -> Load:
        """What is held at this moment."""
        engine = self._engine
        lengths, target = engine.rows.lengths, engine.target
        return Load(len(lengths), len(self._waiting), sum(lengths), target.reserved, target.bytes)

    @property
    def stats(self) -> SpeculationStats:
        """Of all rounds so far."""
        return self._engine.stats

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._closing

    def close(self, wait: bool = True) -> None:
        """Take no more requests.

        Args:
            wait: finish what was asked for; otherwise it is cancelled.
        """
        with self._news:
            self._closing, self._giving_up = True, self._giving_up or not wait
            self._news.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(wait=kind is None)

    # ------------------------------------------------------------------ a request

    def _request(self, input_ids: Any, streamer: Any, options: dict[str, Any]) -> Request:
        ids = self._ids(input_ids)
        for name, why in NOT_TAKEN.items():
            if options.get(name) is not None and options[name] is not False:
                raise SpeculationError(f"{name} is not supported by BatchDecoder: {why}")
        if options.get("speculation_type") is not None or Rules.split(options.get("speculation"))[1]:
            raise SpeculationError(
                "speculation_type and a drafter's options are set when BatchDecoder is created; a request may "
                f"only set {', '.join(Rules.names())}"
            )
        if not self._engine.stands:
            raise SpeculationError(
                "the model was changed after this BatchDecoder was created, and computes otherwise now (its sizes, "
                "modules, hooks, attention or device); make a new BatchDecoder"
            )
        config = self.generation_config
        if config is not None:
            options = {"generation_config": config} | options
        options = {"attention_mask": torch.ones_like(ids)} | options | {"return_dict_in_generate": False}
        call = prepared(self.model, streamer, input_ids=ids, **options)
        call.rules = self._rules(call.rules)
        self._check(call)
        arrived = now()
        answer = Answer(ids.shape[1], self._wake)
        request = Request(
            next(self._numbers), call, answer, Randomness.from_torch(), arrived, ids[0].tolist(), settings_of(call)
        )
        if not self._engine.ever_fits(request):
            share = ", of which with forwards='bitwise' each row has an equal share" * (self.forwards == "bitwise")
            raise SpeculationError(
                f"a prompt of {ids.shape[1]} tokens and up to {request.end - ids.shape[1]} new ones do not fit into "
                f"max_tokens={self._engine.most_tokens}{share}; ask for fewer new tokens, or create BatchDecoder with "
                "a larger max_tokens"
            )
        return request

    def _rules(self, asked: Rules) -> Rules:
        """A request's, with what all requests have in common."""
        if self.forwards != "bitwise":
            return replace(asked, forwards=self.forwards)
        if not asked.exact:
            raise SpeculationError(
                f"lenience={asked.lenience} lets drafts change the text, which forwards='bitwise' rules out; leave it "
                "out, or create BatchDecoder with other forwards"
            )
        return replace(asked, forwards="bitwise", sampling="coupled")  # else draws would depend on what was drafted

    def _ids(self, given: Any) -> Tensor:
        """[1, P] on the model's device."""
        given = given["input_ids"] if isinstance(given, Mapping) else given
        try:
            ids = torch.as_tensor(given, device=None if isinstance(given, Tensor) else "cpu")
        except (TypeError, ValueError, RuntimeError):
            ids = torch.empty(0, device="cpu")
        ids = ids[None] if ids.ndim == 1 else ids
        if ids.ndim != 2 or ids.shape[0] != 1 or not ids.shape[1] or ids.is_floating_point():
            got = f"shape {tuple(ids.shape)}" if ids.numel() and not ids.is_floating_point() else shown(given)
            raise SpeculationError(
                f"input_ids must be the tokens of one prompt, [P] or [1, P], got {got}; submit several prompts one by "
                "one, and text as tokenizer(text).input_ids"
            )
        vocab = self.model.get_input_embeddings().weight.shape[0]
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise SpeculationError(
                f"input_ids holds token ids from {int(ids.min())} to {int(ids.max())}, and the model has ids from 0 "
                f"to {vocab - 1}; use the model's own tokenizer"
            )
        return ids.to(input_device(self.model), torch.long, copy=True)

    def _check(self, call: Call) -> None:
        """
        Raises:
            SpeculationError: what the rows of a batch cannot have each for itself.
        """
        most, limit = call.stopping.max_length, position_limit(self.model)
        cache = call.model_kwargs.get(CACHE)
        if not isinstance(cache, DynamicCache) or cache.offloading or cache.get_seq_length():
            raise SpeculationError(
                f"each request gets a dynamic cache of its own; leave {CACHE}, cache_implementation and use_cache out"
            )
        if not bool(call.prompt_mask.all()):
            raise SpeculationError("attention_mask must be all ones; submit prompts without padding")
        if call.input_ids.shape[0] != 1:
            raise SpeculationError("num_return_sequences must be 1; submit the prompt once for every answer you want")
        if call.processing.opaque or call.processing.grammars or call.stopping.opaque:
            raise SpeculationError(
                "BatchDecoder does not take logits processors and stopping criteria of your own, which expect "
                "whole batches; use model.generate"
            )
        if not takes_ragged_inputs(self.model, call.model_kwargs):
            raise SpeculationError(
                f"{type(self.model).__name__} was given other inputs besides token ids, which BatchDecoder does not "
                "take; use model.generate"
            )
        if rope_changes(call, joined=True):
            raise SpeculationError(
                f"a prompt of {call.input_ids.shape[1]} tokens and its answer can grow past the length at which "
                f"the rotary embeddings of {type(self.model).__name__} change, and all rows of a batch share "
                "them; shorten the prompt, lower max_new_tokens, or use model.generate"
            )
        if most is None or call.input_ids.shape[1] >= limit:
            raise SpeculationError(
                f"a prompt of {call.input_ids.shape[1]} tokens and its answer may reach "
                f"{most or 'any number of'} tokens, and {type(self.model).__name__} has positions for {limit}; "
                "shorten the prompt, or set max_new_tokens"
            )
        call.stopping.max_length = min(most, limit)  # where its positions end, an answer does

    # ------------------------------------------------------------------ the thread

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()

    def _run(self) -> None:
        error: BaseException = SpeculationError("this BatchDecoder is closed")
        try:
            while self._turn():
                pass
        except BaseException as found:  # nobody may wait for a thread that is not there
            error = found
            with suppress(Exception):
                self._engine.settle()
        with self._news:
            self._closing, left = True, [*self._waiting, *self._engine.present()]
            self._waiting.clear()
        for request in left:
            request.finish(error)
        self._engine.close()

    def _turn(self) -> bool:
        """Let in, let go, decode a round; false where everything is over."""
        engine = self._engine
        with self._news:
            self._news.wait_for(lambda: engine.busy or self._waiting or self._closing)
            if self._giving_up:
                for request in [*self._waiting, *engine.present()]:
                    request.answer.cancelled = True
            gone = [request for request in self._waiting if request.answer.cancelled]
            for request in gone:
                self._waiting.remove(request)
            if engine.reading is None and self._waiting and engine.fits(self._waiting[0]):
                engine.admit(self._waiting.popleft())
            over = self._closing and not self._waiting and not engine.busy
        for request in gone:
            request.finish()
        try:
            engine.drop_cancelled()
            engine.turn()
        except Exception as error:
            engine.fail(error)
        return not over
