"""Requests that come and go: their prompts are read piece by piece, then their rows join a batch that plays rounds.

Rows of different settings share the target's forwards and nothing else: those of equal settings have a judge of their
own and, unless the drafter lives inside the target, a session of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..budget import Cost, Learned
from ..clock import now
from ..errors import SpeculationError
from ..protocol import Forward
from ..schedule import AnyDrafter
from ..stats import SpeculationStats
from ..target.bitwise_joining import BitwiseJoiningRunner
from ..target.capturable import sums_by_distance, wants_captured, why_not_captured
from ..target.captured_joining import joining_runner
from ..target.devices import input_device
from ..target.fingerprint import fingerprint
from ..target.inputs import as_when_decoding, position_limit
from ..target.joining import SPARE, JoiningRunner, Reading
from ..target.probe import Support, ability
from ..target.shelf import held_bytes
from ..target.stock import why_not_joined
from ..transfer import moved
from ..verify.randomness import RowRandomness
from ..verify.trial import Result, Trial
from .call import Call
from .drafting import Drafting, context_of
from .engine import Engine
from .fitting import no_draft
from .guard import GuardedDrafter
from .modes import UNRECORDABLE, Mode
from .own_runner import behind_own
from .request import Request
from .rows import Row, Rows
from .taking import RaggedRequests
from .verdicts import verdict_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_NOTES = 8
"""of what sessions said, that are kept"""
LEAST_PIECE, LONGEST_PIECE = 128, 512
"""tokens of a prompt that are read between two rounds: fewer take hardly less time"""
MODE = Mode(ragged=True, trees=True, runner=JoiningRunner)

_costs: Learned[Cost] = Learned(Cost)
"""of each target's forwards over such batches"""


@dataclass(eq=False)
class Arriving:
    """A request whose prompt is being read."""

    request: Request
    prompt: Reading
    row: Row | None = None
    """that it is going to be; None before the first piece is read"""


class Requests(Engine):
    """A batch whose rows come and go. It knows nothing of threads: one of them calls it."""

    def __init__(
        self,
        model: "PreTrainedModel",
        drafter: AnyDrafter | None,
        most_rows: int,
        most_tokens: int,
        forwards: str = "auto",
    ) -> None:
        """
        Args:
            most_tokens: slots of all rows together.
            forwards: as in `Rules`, of the target.

        Raises:
            SpeculationError: the model does not take rows of uneven lengths, or cannot have such forwards.
        """
        can, vocab, why = (Support.PLAIN, 0, why) if (why := why_not_joined(model)) else ability(model)
        if can is not Support.RAGGED:
            raise SpeculationError(
                f"BatchDecoder needs a model that decodes rows of different lengths, and {type(model).__name__} "
                f"{why}; use model.generate"
            )
        self.bitwise = forwards == "bitwise"
        mode = MODE._replace(trees=not self.bitwise or sums_by_distance(model))
        cost, stats = _costs.of(model, (most_rows, self.bitwise)), SpeculationStats(mode="joined")
        super().__init__(model, vocab, Rows(input_device(model)), mode, RaggedRequests(), cost, stats)
        self.drafter, self.most_rows, self.most_tokens, self.forwards = drafter, most_rows, most_tokens, forwards
        self.round_seconds = self.reading_seconds = 0.0
        """of the last round, and of all prompts"""
        self.reading_speed = 0.0
        """tokens per second"""
        self._begun_with = self._found()
        self._start()
        if isinstance(self.target, BitwiseJoiningRunner):
            cost.pads_to(self.target.pads_to)  # found out now: whoever makes the batch is told where there are none
        if drafter is not None and drafter.because:
            self.stats.notes.append(drafter.because)
        if wants_captured(forwards, model) and (why := self._why_eager()):
            self.stats.notes.append(f"forwards are not captured: {why}")

    @property
    def stands(self) -> bool:
        """Whether the model is what the batch was begun with."""
        return self._found() == self._begun_with

    def _found(self) -> tuple[object, ...]:
        """What decides how the model's forwards are run; where they are recorded also where its weights lie."""
        captured = wants_captured(self.forwards, self.model) and not self._why_eager()
        return ability(self.model), why_not_joined(self.model), fingerprint(self.model) if captured else None

    def _why_eager(self) -> str:
        """Why forwards are not captured; empty if they are."""
        if not self._recordable:
            return UNRECORDABLE
        why = why_not_captured(self.model)
        return f"{type(self.model).__name__} {why}" if why else ""

    @property
    def _recordable(self) -> bool:
        """Whether a drafter's own runner is, if it brings one."""
        return self.drafter is None or not self.drafter.brings_runner or self.drafter.recordable

    def _start(self) -> None:
        """Nobody is there."""
        self.rows = Rows(self.device)
        self.requests: dict[int, Request] = {}
        """of the rows that are there, by their numbers"""
        self.reading: Arriving | None = None
        sizes = self.most_rows, self.most_tokens
        self.target = (
            BitwiseJoiningRunner(self.model, *sizes)
            if self.bitwise
            else joining_runner(self.model, *sizes, self.forwards, self._recordable)
        )
        self.runner = self.target
        """the drafter's own, where it brings one"""
        self.widest = SPARE - 1

    # ------------------------------------------------------------------ who is there

    def fits(self, request: Request) -> bool:
        """Whether there is room for one more."""
        there = len(self.rows) + (self.reading is not None)
        wanted = [*self.target.wanted, *([self.reading.request.end] if self.reading else []), request.end]
        return there < self.most_rows and self.target.slots_for(wanted) <= self.most_tokens

    def ever_fits(self, request: Request) -> bool:
        """Whether there would be, were it alone."""
        return self.target.slots_for([request.end]) <= self.most_tokens

    @property
    def busy(self) -> bool:
        """Whether anything is being decoded or read."""
        return bool(len(self.rows)) or self.reading is not None

    def present(self) -> list[Request]:
        """Whatever is being decoded or read."""
        return [*self.requests.values(), *([] if self.reading is None else [self.reading.request])]

    def admit(self, request: Request) -> None:
        """Begin to read its prompt."""
        request.began = now()
        self.reading = Arriving(request, Reading(self.model, request.call.input_ids, request.call.model_kwargs))

    def drop_cancelled(self) -> None:
        """Rows whose requests were cancelled go."""
        if self.reading is not None and self.reading.request.answer.cancelled:
            self._stop_reading()
        self._leave([b for b, row in enumerate(self.rows.all) if self.requests[row.number].answer.cancelled])

    def turn(self) -> None:
        """Read a piece of the prompt that is being read, then play a round of the rows that are there."""
        began = now()
        with torch.no_grad():
            if self.reading is not None:
                self._read()
            if len(self.rows):
                playing = now()
                with as_when_decoding(self.model):
                    self.play_round()
                self.round_seconds = now() - playing
                stats = self.stats  # plain rows would have come as far in so many rounds
                stats.plain_steps = round(stats.verify_widths.total() * stats.mean_acceptance_length)
        self.stats.total_seconds += now() - began

    def clock(self) -> float:
        """Seconds, but for those in which prompts are read."""
        return now() - self.reading_seconds

    def fail(self, error: BaseException) -> None:
        """Something is wrong with the model: every request ends with this error, and the next ones begin anew."""
        self.settle()
        for request in self.present():
            request.finish(error)
        self.close()

    def close(self) -> None:
        """All sessions end."""
        for drafting in {id(row.drafting): row.drafting for row in self._there()}.values():
            self._close(drafting)
        self._start()

    # ------------------------------------------------------------------ reading and joining

    def _read(self) -> None:
        """One more piece; what is wrong with a request ends that request alone."""
        assert self.reading is not None
        arriving, request, reading = self.reading, self.reading.request, self.reading.prompt
        left, began = reading.left, now()
        try:
            if arriving.row is None:  # whose session says which hidden states are to be kept
                arriving.row = self._row(request)
            reading.features = reading.features if reading.done else self.target.features
            logits = moved(reading.read(self._piece(left)), self.rows.device)
            if reading.cache.get_seq_length() != reading.done:
                raise SpeculationError(
                    f"{type(self.model).__name__} keeps its prompt outside the cache, which BatchDecoder cannot "
                    "use; use model.generate"
                )
        except Exception as error:
            self._stop_reading(error)
            return
        first = None if reading.left else self._join(request, arriving.row, reading, logits)
        self._has_read(request, left - reading.left, began)
        if first is not None:
            row = self.rows.all[-1]
            for stats in (self.stats, request.answer.stats):
                stats.target_calls += 1
                stats.emitted_tokens += first.emitted
            self._tell(row, first)
            self._leave([len(self.rows) - 1] if row.stopped else [])

    def _has_read(self, request: Request, tokens: int, began: float) -> None:
        """So many tokens of its prompt were read since then."""
        seconds = now() - began
        speed = tokens / max(seconds, 1e-9)
        self.reading_speed = 0.7 * (self.reading_speed or speed) + 0.3 * speed
        self.reading_seconds += seconds
        for stats in (self.stats, request.answer.stats):
            stats.prefill_seconds += seconds

    def _piece(self, left: int) -> int:
        """Of so many tokens how many to read now: others are to wait about as long as a round takes. Where forwards are
        to be alike it is up to the prompt alone."""
        timed = len(self.rows) and not self.bitwise
        fair = int(self.reading_speed * self.round_seconds) if timed else LONGEST_PIECE
        piece = min(max(LEAST_PIECE, fair), LONGEST_PIECE)
        return left if left <= 1.5 * piece else piece

    def _join(self, request: Request, row: Row, reading: Reading, logits: Tensor) -> Result:
        """The row is the last of the batch, and takes its first token: its prompt's forward is the verification of an
        empty draft."""
        places = [len(self.rows)]
        self.target.join(reading.cache, request.end)
        self.requests[request.number], self.reading = request, None
        row.judge.randomness.admit(row.number, request.randomness)
        if row.drafting is not None:
            row.drafting.admit(row.number, request.randomness)
        self.rows.join([row], request.call.input_ids)
        trial = Trial(no_draft(1, self.rows.device), Forward(logits), self.rows.sequences(places))
        (first,) = self.taking.take(row.judge, self.rows, places, trial)
        if row.drafting is not None and row.drafting.traits.features:
            verdict = verdict_of([row], trial.draft, trial.forward, [first])
            verdict.features = reading.states()
            row.drafting.session.tell(lambda session: session.observe_prompt(verdict))
        return first

    def _row(self, request: Request) -> Row:
        """A row for it, with the judge and the session of those of equal settings."""
        call, tokens = request.call, list(request.prompt)
        end = min(request.end - 1, position_limit(self.model))
        for row in self.rows.all:
            if self.requests[row.number].settings == request.settings:
                judge, drafting = row.judge, row.drafting
                break
        else:
            judge, drafting = call.judge(RowRandomness(), self.stats, joined=True), self._drafting(call)
        return Row(request.number, call, tokens, len(tokens), judge, drafting, end, request.answer.stats)

    def _drafting(self, call: Call) -> Drafting | None:
        """Who drafts for calls of such settings: a session of their own. Inside the target there is one for all rows,
        with the settings of the first; what it drafts are point masses."""
        if self.drafter is None:
            return None
        for row in self.rows.all:
            if row.drafting is not None and row.drafting.drafter.brings_runner:
                return row.drafting
        drawing, guarded = RowRandomness(), GuardedDrafter(self.drafter)
        if not guarded.dropped and not guarded.takes_ragged():
            guarded.drop("its draft model does not support rows of different lengths, which a BatchDecoder has")
        noise = call.noise(drawing, joined=True)
        nobody, limit = call.input_ids.new_empty(0, 0), position_limit(self.model)
        context = replace(
            context_of(call, self.rows.device, drawing, self.cost, self.mode, noise),
            prompt_ids=nobody,
            prompt_mask=nobody,
            max_length=min(limit, self.most_tokens),
            most_rows=self.most_rows,
            most_tokens=self.most_tokens,
        )
        drafting = Drafting(guarded, context, drawing)
        self.target.features = list(dict.fromkeys([*self.target.features, *drafting.traits.features]))
        if guarded.brings_runner:
            self.runner = behind_own(self.target, drafting)
            self.widest = max(1, SPARE // drafting.traits.slots_per_token - 1)
        if not drafting.traits.weighs:  # one record for all, as the number of rows changes
            drafting.pause_where_it_loses(self.model, call.draws, joined=True, clock=self.clock)
        return drafting

    # ------------------------------------------------------------------ rounds

    def _tell(self, row: Row, result: Result) -> None:
        if row.failed is None:
            self.requests[row.number].tell(result.tokens)

    def _leave(self, places: list[int]) -> None:
        """Rows that have ended go, and their part of the cache is free."""
        if not places:
            return
        self.settle()
        gone = [self.rows.all[b] for b in places]
        order = self.target.leave(places)
        self.rows.leave(order)
        for row in gone:
            row.judge.randomness.forget(row.number)
            if row.drafting is not None:
                row.drafting.forget(row.number)
            self.requests.pop(row.number).finish(row.failed)
        self._end_sessions(gone)
        self.stats.held_bytes = held_bytes()

    def _stop_reading(self, error: Exception | None = None) -> None:
        """The request whose prompt is being read ends."""
        assert self.reading is not None
        arriving, self.reading = self.reading, None
        self._end_sessions([] if arriving.row is None else [arriving.row])
        arriving.request.finish(error)

    def _there(self) -> list[Row]:
        """All rows, also that of the prompt that is being read."""
        arriving = None if self.reading is None else self.reading.row
        return [*self.rows.all, *([] if arriving is None else [arriving])]

    def _end_sessions(self, gone: Sequence[Row]) -> None:
        """Of those that were there for rows that have gone, all that are there for nobody else."""
        there = self._there()
        for drafting in {id(row.drafting): row.drafting for row in gone}.values():
            if all(row.drafting is not drafting for row in there):
                self._close(drafting)
        if not there:
            self.runner, self.target.features, self.widest = self.target, (), SPARE - 1

    def _close(self, drafting: Drafting | None) -> None:
        if drafting is not None:
            told = SpeculationStats()
            drafting.close(told)
            self.stats.draft_calls += told.draft_calls
            new = [note for note in told.notes if note not in self.stats.notes]
            self.stats.notes = [*self.stats.notes, *new][-MOST_NOTES:]
