"""`PearlDrafter`: a draft model that works while the target does (Liu et al. 2024)."""

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from ...budget import Learned, Overlap
from ...errors import SpeculationError
from ...hub.registry import register_drafter
from ...protocol import DraftContext
from ...schedule import Guarded, Schedule
from ...session import DraftSession
from ...target.devices import input_device
from ..draft_model import ModelDrafter, Translated
from .config import PearlConfig
from .schedule import PearlSchedule
from .session import PearlSession
from .timeline import Timeline
from .worker.workers import Workers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@register_drafter
class PearlDrafter(ModelDrafter):
    """Parallel speculative decoding: draft and target run at the same time.

    A worker process is launched with the drafter and outlives its calls. `close()` ends it, as does the end of the
    drafter.
    """

    config_class = PearlConfig
    config: PearlConfig

    def __init__(self, draft_model: "PreTrainedModel | Translated", **options: Any) -> None:
        """
        Args:
            draft_model: a causal language model, on any device, in any dtype; `Translated` where its tokenizer is not
                the target's.
            options: of `PearlConfig`.

        Raises:
            SpeculationError: a bad option, or a model that cannot draft.
        """
        super().__init__(draft_model, **options)
        config = self.config
        settings = config.window, config.corrections, config.pre_verify, config.post_verify
        self.planners = Learned(partial(Overlap, *settings))
        self._begin()

    def _begin(self) -> None:
        """What runs beside the drafter, and is its own."""
        self.last_timeline: Timeline | None = None
        """when each model was busy in the last call"""
        self.workers = Workers(self._in_thread())
        weakref.finalize(self, self.workers.close)

    def _in_thread(self) -> bool:
        # A model that accelerate has spread or offloaded cannot be sent to a process.
        stays = input_device(self.draft_model).type != "cpu" or hasattr(self.draft_model, "_hf_hook")
        return self.config.worker == "thread" or (self.config.worker == "auto" and stays)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in ("workers", "last_timeline")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    # ------------------------------------------------------------------ a call

    def check_target(self, target: "PreTrainedModel") -> None:
        if target.config.is_encoder_decoder:
            raise SpeculationError(
                f"PEARL does not support encoder-decoders such as {type(target).__name__}; use "
                "DraftModelDrafter(draft_model)"
            )
        super().check_target(target)

    def schedule(self, session: Guarded, context: DraftContext) -> Schedule:
        return PearlSchedule(session, context)

    def start(self, context: DraftContext) -> DraftSession:
        """Two calls at once get a worker each."""
        worker = self.workers.take(self.draft, context.device)
        self.last_timeline = timeline = Timeline()
        try:
            planner = self.planners.of(context.target, (context.rows, context.do_sample))
            return PearlSession(context, worker, self.workers.give_back, planner, timeline, self.takes_ragged())
        except BaseException:
            self.workers.give_back(worker, False)
            raise

    def close(self) -> None:
        """End the worker processes; the next call starts a new one."""
        self.workers.close()

    def __enter__(self) -> "PearlDrafter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
