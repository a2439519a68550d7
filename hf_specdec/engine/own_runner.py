"""A runner that a drafter brings is held to what the engine's own does: probed before its first use, guarded in every
call. One that raises or changes the target's logits is dropped with its drafter, and the engine's goes on where it was.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..errors import shown
from ..protocol import DraftContext, DraftSession, Forward, Runner
from ..schedule import AnyDrafter, Guarded
from ..stats import SpeculationStats
from ..target.captured import CapturedRunner
from ..target.inputs import position_limit
from ..target.lockstep import LockstepRunner
from ..target.probe import ability, runner_agrees
from ..target.ragged import RaggedRunner
from ..target.ranks import ranks_of
from ..target.staggered import StaggeredRunner
from ..transfer import to_device
from ..verify.picking import DraftPicker
from ..verify.processing import Processing
from ..verify.randomness import Randomness
from .call import Call
from .guard import GuardedDrafter, opened
from .modes import Mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

_proved: "weakref.WeakKeyDictionary[Any, weakref.WeakSet[PreTrainedModel]]" = weakref.WeakKeyDictionary()
"""by drafter, the targets whose logits its runner was seen to leave alone"""


def target_runner(call: Call, drafter: GuardedDrafter, session: Guarded, mode: Mode) -> Runner:
    """The engine's runner for a call, behind the drafter's own where that brings one."""
    engines = mode.runner(call.target, call.model_kwargs, call.input_ids, call.new_columns)
    if isinstance(engines, CapturedRunner):
        engines.bitwise = call.rules.forwards == "bitwise"
        engines.expect(call.most_columns)
    runner = StaggeredRunner(engines) if isinstance(engines, LockstepRunner) and mode.staggered else engines
    features = session.ask(lambda s: _named(s.features, call.target))
    runner.features = features or ()
    if not (drafter.brings_runner or features) or not session.alive:
        return runner
    if ranks_of(call.target) is not None:  # only the leading one has a session
        session.drop("it runs inside the target, which is spread over several processes")
        runner.features = ()
        return runner
    if not drafter.brings_runner:
        return runner
    if not isinstance(runner, RaggedRunner):
        runner.features = ()
        session.drop("its runner needs rows of different lengths, which this model or call does not support")
        return runner
    return behind_own(runner, drafter, session)


def behind_own(runner: RaggedRunner, drafter: GuardedDrafter, session: Guarded) -> Runner:
    """The engine's runner behind the one that a session brings, held to what the engine's does."""
    if not session.ask(lambda _: _is_proved(runner.model, drafter.drafter)):
        session.drop("its runner changes the target's logits")
    engine = Remembering(runner)
    own = session.ask(lambda s: s.runner(engine))
    return runner if own is None else GuardedRunner(own, engine, session)


def _named(features: Sequence[int], model: "PreTrainedModel") -> tuple[int, ...]:
    states = model.config.get_text_config(decoder=True).num_hidden_layers + 1
    for name in features:
        if type(name) is not int or not -states <= name < states:
            raise ValueError(f"features must name hidden states from {-states} to {states - 1}, got {name!r}")
    return tuple(features)


def _is_proved(model: "PreTrainedModel", drafter: AnyDrafter) -> bool:
    known = _proved.setdefault(drafter, weakref.WeakSet())
    if model not in known and _is_faithful(model, drafter):
        known.add(model)
    return model in known


def _is_faithful(model: "PreTrainedModel", drafter: AnyDrafter) -> bool:
    """Whether the runner of a session of its own, over the probe's prompt, gives the target's logits."""
    sessions: list[DraftSession] = []

    def wrap(engine: Runner) -> Runner:
        assert isinstance(engine, RaggedRunner)
        vocab, device = ability(model).vocab_size, engine.prompt.device
        context = DraftContext(
            prompt_ids=engine.prompt,
            prompt_mask=engine.model_kwargs["attention_mask"],
            max_length=min(64, position_limit(model)),
            vocab_size=vocab,
            eos_token_ids=frozenset(),
            do_sample=False,
            lockstep=False,
            trees=True,
            pick=DraftPicker(Processing([]), vocab, False, Randomness(0), device),
            device=device,
            stats=SpeculationStats(),
            target=model,
        )
        sessions.append(opened(drafter, context))
        engine.features = sessions[0].features
        return sessions[0].runner(engine)

    try:
        return runner_agrees(model, wrap)
    finally:
        for session in sessions:
            session.close()


class Remembering:
    """The engine's runner as a drafter's own sees it: it knows what it was asked last, should that one fail."""

    def __init__(self, runner: RaggedRunner) -> None:
        self.runner = runner
        self.prompt_answer: Forward | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def prefill(self) -> Forward:
        self.prompt_answer = self.runner.prefill()
        return self.prompt_answer


class GuardedRunner:
    """A drafter's own runner, until it fails."""

    def __init__(self, own: Runner, engine: Remembering, session: Guarded) -> None:
        self.own, self.engine, self.session = own, engine, session
        self.starts: list[int] = []
        """where the present round began"""
        self.fed: Tensor | None = None
        """its tokens"""
        self.vocab = ability(engine.model).vocab_size

    @property
    def features(self) -> Sequence[int]:
        return self.engine.runner.features

    @features.setter
    def features(self, names: Sequence[int]) -> None:
        self.engine.runner.features = names

    @property
    def lengths(self) -> list[int]:
        return self.engine.lengths

    def _try(self, action: Callable[[Runner], T], otherwise: Callable[[], T]) -> T:
        """What the own runner answers; where it is gone or fails, what the engine's does."""
        if self.session.alive:
            try:
                return action(self.own)
            except Exception as error:
                self.session.drop(f"its runner raised {shown(error)}")
                return otherwise()
        return action(self.engine.runner)

    def prefill(self) -> Forward:
        def otherwise() -> Forward:
            return self.engine.prompt_answer or self.engine.runner.prefill()

        rows = len(self.engine.rows)
        try:
            return self._try(lambda runner: _in_form(runner.prefill(), rows, 1, self.vocab), otherwise)
        except BaseException:  # interrupted behind the engine's own prefill, which has taken the caller's cache
            if self.engine.prompt_answer is not None:
                self.finish(None)
            raise

    def forward(
        self, tokens: Tensor, parents: Sequence[Sequence[int]] | None = None, counts: Sequence[int] | None = None
    ) -> Forward:
        self.starts, self.fed = list(self.engine.lengths), tokens

        def otherwise() -> Forward:
            self.engine.runner.truncate(self.starts)
            return self.engine.runner.forward(tokens, parents, counts)

        def action(runner: Runner) -> Forward:
            return _in_form(runner.forward(tokens, parents, counts), len(tokens), tokens.shape[1], self.vocab)

        return self._try(action, otherwise)

    def truncate(self, lengths: list[int]) -> None:
        self._try(lambda runner: runner.truncate(lengths), lambda: self._refeed(lengths, None))

    def keep(self, lengths: list[int], paths: list[list[int]]) -> None:
        self._try(lambda runner: runner.keep(lengths, paths), lambda: self._refeed(lengths, paths))

    def _refeed(self, lengths: list[int], paths: list[list[int]] | None) -> None:
        """What the round has added is computed once more: a runner that failed may have left anything there."""
        assert self.fed is not None
        if paths is None:
            chains = [list(range(n - start)) for n, start in zip(lengths, self.starts, strict=True)]
        else:
            chains = [[0, *(node + 1 for node in path)] for path in paths]
        counts = [len(chain) for chain in chains]
        width = max(counts)
        index = to_device([chain + [0] * (width - len(chain)) for chain in chains], self.fed.device)
        self.engine.runner.truncate(self.starts)
        self.engine.runner.forward(self.fed.gather(1, index), counts=counts)

    def select(self, rows: list[int]) -> None:
        before = len(self.engine.rows)
        self._try(lambda runner: runner.select(rows), lambda: self._leave(before, rows, keep=False))

    def retire(self, stay: list[int], keep: bool) -> None:
        before = len(self.engine.rows)
        self._try(lambda runner: runner.retire(stay, keep), lambda: self._leave(before, stay, keep))

    def _leave(self, before: int, stay: list[int], keep: bool) -> None:
        if len(self.engine.rows) == before:  # it failed before anything was done
            self.engine.runner.retire(stay, keep)

    def finish(self, ids: Tensor | None) -> None:
        self.engine.runner.finish(ids)


def _in_form(answer: Forward, rows: int, width: int, vocab: int) -> Forward:
    """A forward's answer over tokens [rows, width]; which nodes it names is held to those that there are.

    Raises:
        ValueError, or whatever comes of reading something else than tensors.
    """
    logits, nodes = answer.logits, answer.nodes
    places = logits.shape[1]
    if logits.shape != (rows, places, vocab) or not 1 <= places <= width or not logits.is_floating_point():
        raise ValueError(
            f"the runner returned logits of shape {tuple(logits.shape)} for tokens of shape {(rows, width)}"
        )
    if nodes is not None:
        if nodes.shape != (rows, places - 1) or nodes.dtype != torch.int64:
            raise ValueError(
                f"the runner returned nodes of shape {tuple(nodes.shape)} with logits of shape {tuple(logits.shape)}"
            )
        answer.nodes = nodes.clamp(-1, width - 2)
    for name, states in answer.features.items():
        if states.ndim != 3 or states.shape[0] != rows or (width > 1 and states.shape[1] != places):
            raise ValueError(
                f"the runner returned features[{name}] of shape {tuple(states.shape)} with logits of shape "
                f"{tuple(logits.shape)}"
            )
    return answer
