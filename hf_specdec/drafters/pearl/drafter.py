"""`PearlDrafter`: a draft model that works while the target does (Liu et al. 2024)."""

import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from huggingface_hub.dataclasses import strict

from ...budget import Acceptance, Learned
from ...config import LONGEST_DRAFT, DrafterConfig, ranged
from ...errors import SpeculationError
from ...hub.registry import register_drafter
from ...protocol import DraftContext, DraftSession
from ...schedule import Guarded, Schedule
from ...target.devices import input_device
from ...target.probe import Support
from ...target.ranks import ranks_of
from ..draft_model import ModelDrafter, Translated
from .copying import Copying
from .rank import Seat, join
from .schedule import Overlapped
from .session import PearlSession
from .timeline import Timeline
from .window import Planner
from .workers import Pool, launch, make_ready, start_thread, threads_beside

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@strict
@dataclass(kw_only=True)
class PearlConfig(DrafterConfig):
    """Options of `PearlDrafter`, which says what they mean."""

    drafter_type: ClassVar[str] = "pearl"

    window: int | Literal["auto"] = ranged("auto", 1, LONGEST_DRAFT)
    worker: Literal["auto", "thread", "process", "rank"] = "auto"
    pre_verify: bool = True
    post_verify: bool = True
    corrections: int | Literal["auto"] = ranged("auto", 0, 8)
    lookup: bool = False


@register_drafter
class PearlDrafter(ModelDrafter):
    """Parallel speculative decoding: draft and target run at the same time.

    A worker process is launched with the drafter and outlives its calls; `close()` ends it, as does the end of the
    drafter.
    """

    config_class = PearlConfig
    config: PearlConfig

    def __init__(
        self,
        draft_model: "PreTrainedModel | Translated",
        *,
        window: int | Literal["auto"] = "auto",
        worker: Literal["auto", "thread", "process", "rank"] = "auto",
        pre_verify: bool = True,
        post_verify: bool = True,
        corrections: int | Literal["auto"] = "auto",
        lookup: bool = False,
    ) -> None:
        """
        Args:
            draft_model: a causal language model, on any device, in any dtype; `Translated` where its tokenizer is not
                the target's.
            window: γ, tokens drafted per target forward, from 1 to 512; "auto" is the one that would have been
                fastest on the last runs of accepted tokens, by measured times (mostly the speed ratio, Theorem 1).
            worker: where the draft model runs: a thread (its own CUDA stream), a process, the last rank of a launch;
                "auto" is the thread for drafts on a GPU, the process for others.
            pre_verify: verify the first draft token while drafting goes on (§3.2).
            post_verify: go on drafting while the target verifies (§3.3).
            corrections: for each token that the target is verifying, draft behind so many corrections, the likeliest
                of all places together, from 0 to 8; "auto" is 1 while that pays, by the measured times and by how many
                were foreseen.
            lookup: whether rows that have nothing drafted copy what followed the longest earlier match of their text's
                end, as far as that is as likely to be kept as a token of the draft model's; drafting goes on behind it.
                In rounds in which nobody would draft behind it, as far as it promises more tokens per second than the
                draft.

        Raises:
            SpeculationError: a bad option, or a model that cannot draft.
        """
        super().__init__(
            draft_model,
            window=window,
            worker=worker,
            pre_verify=pre_verify,
            post_verify=post_verify,
            corrections=corrections,
            lookup=lookup,
        )
        self.planners = Learned(partial(Planner, window, pre_verify, post_verify, corrections))
        self.acceptance = Learned(Acceptance)
        self._begin()

    def _begin(self) -> None:
        """What runs beside the drafter, and is its own."""
        self.pool = Pool()
        weakref.finalize(self, self.pool.close)
        self.seat: Seat | None = None
        self.stream: Any = None
        self.last_timeline: Timeline | None = None
        """when each model was busy in the last call, and what the line between them carried"""
        if self.config.worker != "rank" and not self._in_thread():
            self.pool.free.append(launch())  # so that the first call does not wait for its imports

    def __getstate__(self) -> dict[str, Any]:
        running = ("pool", "seat", "stream", "last_timeline")
        return {name: value for name, value in super().__getstate__().items() if name not in running}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def _in_thread(self) -> bool:
        on_host = input_device(self.draft_model).type == "cpu"
        return self.config.worker == "thread" or (self.config.worker == "auto" and not on_host)

    def join(self) -> "PearlDrafter":
        """With `worker="rank"`: take this process's place in the launch, on every rank at once, before the target is
        loaded. Returns the drafter itself.

        Raises:
            SpeculationError: there is no launch of 2 ranks or more, or it is taken, or `worker` is another.
        """
        if self.config.worker != "rank":
            raise SpeculationError(f'join() is for worker="rank"; worker={self.config.worker!r} needs no launch')
        self.seat = join(self.draft_model, PearlSession.patience)
        if self.seat.worker is not None:
            self.pool.free.append(self.seat.worker)
        return self

    @property
    def drafts(self) -> bool:
        """With `worker="rank"`, whether this process is the drafting rank, whose part is `serve()`."""
        return self.seat is not None and self.seat.drafts

    def serve(self) -> None:
        """On the drafting rank: draft until the target's ranks have closed their drafter.

        Raises:
            SpeculationError: this is no drafting rank, or it has served.
        """
        if self.config.worker != "rank":
            raise SpeculationError(f'serve() is for worker="rank"; worker={self.config.worker!r} serves itself')
        self._joined().serve(self.draft)

    def _joined(self) -> Seat:
        if self.seat is None:
            raise SpeculationError('worker="rank": call join() on every rank first, before the target is loaded')
        return self.seat

    def draft_support(self) -> Support:
        return super().draft_support() if self.seat is None else self.seat.support

    def check_target(self, target: "PreTrainedModel") -> None:
        if self.config.worker == "rank":
            self._joined().check(ranks_of(target))
        if target.config.is_encoder_decoder:
            raise SpeculationError(
                f"PEARL does not support encoder-decoders such as {type(target).__name__}; use "
                "DraftModelDrafter(draft_model)"
            )
        super().check_target(target)

    def schedule(self, session: Guarded, context: DraftContext) -> Schedule:
        return Overlapped(session, context)

    def start(self, context: DraftContext) -> DraftSession:
        """Two calls at once get a worker each."""
        config, in_thread = self.config, self._in_thread()
        worker = None if in_thread else self.pool.take()
        if worker is not None and worker.process is not None and worker.ready and worker.draft != self.draft:
            worker.close()  # it was sent the model with another translation, or none
            worker = None
        if in_thread:
            worker = start_thread(self.draft, PearlSession.patience, self._stream())
        elif worker is None and self.seat is not None:
            raise ConnectionError("the drafting rank is gone, or busy with another call")
        elif worker is None:
            worker = launch()
        if not worker.ready:
            make_ready(worker, self.draft, PearlSession.patience, threads_beside(context.device))
        self.last_timeline = timeline = Timeline()
        try:
            release = worker.close if in_thread else self.pool.return_of(worker)
            planner, copying = self.planners.of(context.target), None
            if config.lookup:
                copying = Copying(context, self.acceptance.of(context.target, context.do_sample))
            return PearlSession(context, worker, planner, timeline, release, self.takes_ragged(), copying)
        except BaseException:
            worker.close()
            raise

    def _stream(self) -> Any:
        """The CUDA stream that all of this drafter's worker threads draft on; None where there are none."""
        device = input_device(self.draft_model)
        if device.type != "cuda":
            return None
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
            self.stream.wait_stream(torch.cuda.current_stream(device))  # the weights may be on the way
        return self.stream

    def close(self) -> None:
        """End the worker processes; the next call starts a new one. With `worker="rank"`, end the drafting rank's
        `serve()`, for good."""
        if self.seat is not None:
            self.seat.close()
        self.pool.close()

    def __enter__(self) -> "PearlDrafter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
