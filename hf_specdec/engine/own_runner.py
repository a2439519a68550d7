"""A runner that a drafter brings is held to what the engine's own does: probed before its first use, guarded in every
call. One that raises or changes the target's logits is dropped with its drafter, and the engine's goes on where it was.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from ..protocol import DraftContext, Forward, Runner
from ..schedule import AnyDrafter
from ..stats import SpeculationStats
from ..target.capturable import sums_by_distance
from ..target.captured import CapturedRunner
from ..target.lockstep import LockstepRunner
from ..target.probe import ability, runner_agrees
from ..target.ragged import RaggedRunner
from ..target.ranks import ranks_of
from ..target.remembered import Remembered
from ..target.staggered import StaggeredRunner
from .call import Call
from .checks import Unfit, checked_forward
from .drafting import Drafting
from .guard import GuardedSession, opened
from .modes import Mode
from .ranks import SharedSession

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

_proved: "WeakKeyDictionary[AnyDrafter, Remembered[None]]" = WeakKeyDictionary()
"""by drafter, the targets whose logits its runner was seen to leave alone"""


def target_runner(call: Call, drafting: Drafting, mode: Mode) -> Runner:
    """The engine's runner for a call, behind the drafter's own where that brings one."""
    session, brings_runner = drafting.session, drafting.drafter.brings_runner
    engines = mode.runner(call.target, call.model_kwargs, call.input_ids, call.new_columns)
    if isinstance(engines, CapturedRunner):
        engines.bitwise = call.rules.forwards == "bitwise"
        engines.sums_by_distance = engines.bitwise and sums_by_distance(call.target)
        engines.expect(call.most_columns)
    runner: Runner = StaggeredRunner(engines) if isinstance(engines, LockstepRunner) and mode.staggered else engines
    runner.features = session.traits.features
    if (brings_runner or runner.features) and ranks_of(call.target) is not None:  # only the leading one has a session
        session.drop("it runs inside the target, which is spread over several processes")
    elif brings_runner and isinstance(runner, RaggedRunner):
        runner = behind_own(runner, drafting)
    elif brings_runner:
        session.drop("its runner needs rows of different lengths, which this model or call does not support")
    if not session.alive:
        runner.features = ()
    return runner


def behind_own(runner: RaggedRunner, drafting: Drafting) -> Runner:
    """The engine's runner behind the one that a session brings, held to what the engine's does."""
    engine = EngineRunner(runner)

    def proved(session: Any) -> Runner:
        drafter = drafting.drafter.drafter
        known = _proved.setdefault(drafter, Remembered())
        known.of(runner.model, lambda: _prove(runner.model, drafter, drafting.session.context))
        return session.runner(engine)

    own = drafting.session.ask(proved)
    return runner if own is None else GuardedRunner(own, engine, drafting.session)


def _prove(model: "PreTrainedModel", drafter: AnyDrafter, context: DraftContext) -> None:
    """See that the runner of a session of its own gives the target's logits, over the probe's prompt.

    Raises:
        Unfit: it does not.
    """
    with ExitStack() as closing:

        def wrap(engine: RaggedRunner) -> Runner:
            mask = engine.model_kwargs["attention_mask"]
            call = replace(context, prompt_ids=engine.prompt, prompt_mask=mask, most_rows=0, stats=SpeculationStats())
            session = opened(drafter, replace(call, do_sample=False, lockstep=False, trees=True))
            closing.callback(session.close)
            engine.features = session.features
            return session.runner(engine)

        if not runner_agrees(model, wrap):
            raise Unfit("its runner changes the target's logits")


class EngineRunner:
    """The engine's runner as a drafter's own sees it. It reads the prompt once, also where the own one then fails."""

    def __init__(self, runner: RaggedRunner) -> None:
        self.runner = runner
        self.prompt_answer: Forward | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def prefill(self) -> Forward:
        if self.prompt_answer is None:
            self.prompt_answer = self.runner.prefill()
        return self.prompt_answer


class GuardedRunner:
    """A drafter's own runner, until it fails."""

    def __init__(self, own: Runner, engine: EngineRunner, session: GuardedSession | SharedSession) -> None:
        self.engine: Any = engine
        self.own, self.session, self.features = own, session, engine.features
        self.starts: list[int] = []
        """where the present round began"""
        self.fed: tuple[Any, ...] = ()
        """what its forward was given"""
        self.vocab = ability(engine.model).vocab_size

    def _ask(self, action: Callable[[Runner], T], restore: Callable[[], object]) -> T:
        """What the own runner answers. Once that fails, or its drafter is dropped, the engine's takes its place.

        Args:
            restore: brings the engine's to where the own one was to begin: it may have left anything in the cache.
        """

        def engines() -> T:
            if self.own is not self.engine:
                self.own = self.engine
                self.engine.runner.features = ()  # nobody reads them any more
                restore()
            return action(self.own)

        return self.session.attempt(lambda: action(self.own), engines) if self.session.alive else engines()

    @property
    def lengths(self) -> list[int]:
        return self.engine.lengths

    @property
    def widths(self) -> Sequence[int]:
        return self.engine.widths

    def prefill(self) -> Forward:
        rows = len(self.engine.rows)
        try:
            return self._ask(lambda runner: checked_forward(runner.prefill(), rows, 1, self.vocab), lambda: None)
        except BaseException:  # interrupted behind the engine's own prefill, which has taken the caller's cache
            if self.engine.prompt_answer is not None:
                self.finish(None)
            raise

    def forward(
        self, tokens: Tensor, parents: Sequence[Sequence[int]] | None = None, counts: Sequence[int] | None = None
    ) -> Forward:
        self.starts, self.fed, (rows, width) = list(self.lengths), (tokens, parents, counts), tokens.shape
        return self._ask(
            lambda runner: checked_forward(runner.forward(*self.fed), rows, width, self.vocab),
            lambda: self.engine.truncate(self.starts),
        )

    def truncate(self, lengths: list[int]) -> None:
        self._ask(lambda runner: runner.truncate(lengths), self._feed_again)

    def keep(self, lengths: list[int], paths: list[list[int]]) -> None:
        self._ask(lambda runner: runner.keep(lengths, paths), self._feed_again)

    def _feed_again(self) -> None:
        self.engine.truncate(self.starts)
        self.engine.forward(*self.fed)

    def retire(self, stay: list[int], keep: bool) -> None:
        before = len(self.engine.rows)
        self._ask(lambda runner: runner.retire(stay, keep) if len(self.engine.rows) == before else None, lambda: None)

    def finish(self, ids: Tensor | None) -> None:
        self.engine.finish(ids)
