"""`PearlSession`: the target's side of drafting in the background."""

from collections.abc import Callable, Sequence

import torch

from ...budget import Overlap
from ...budget.overlap import Plan
from ...clock import now
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...session import DraftSession
from ...transfer import to_device
from ...verify.picking import DraftPicker
from .timeline import Timeline
from .token import DraftTokens
from .worker.call import WorkerCall
from .worker.wire import Order, RowOrder, Setup
from .worker.workers import Worker

SHORT = 4
"""rounds of a call that say nothing yet: the last one has no room for a draft anyway"""


class PearlSession(DraftSession):
    """Gives a worker its orders, and turns what it drafts into what rows carry."""

    patience = 30.0

    def __init__(
        self,
        context: DraftContext,
        worker: Worker,
        give_back: Callable[[Worker, bool], None],
        planner: Overlap,
        timeline: Timeline,
        forks: bool = False,
    ) -> None:
        """
        Args:
            give_back: what becomes of the worker at the end, and whether it can be used again.
            planner: of the window, for this target.
            timeline: where the call is recorded.
            forks: whether the draft takes rows of uneven lengths, which drafting for corrections needs.
        """
        super().__init__(context)
        self.planner, self.timeline = planner, timeline
        self.weighs = planner.window != "auto"  # a fixed window is kept whatever it costs
        rows, columns = context.prompt_ids.shape
        self.forks = forks and (rows == 1 or not context.lockstep)
        self.told = dict.fromkeys(range(rows), columns)
        """by row, accepted columns at the time of the last order: what the worker was told of them never changes"""
        self.texts = {row: row for row in range(rows)}
        """by row, the number of the worker's text that goes on as the row"""
        self.broken: set[int] = set()
        """rows whose last test rejected a token"""
        self.paused = 0
        """rounds in which drafting was"""
        assert isinstance(context.pick, DraftPicker)
        host = torch.device("cpu")
        setup = Setup(
            context.prompt_ids.to(host),
            context.prompt_mask.to(host),
            context.eos_token_ids,
            context.lockstep and not self.forks,
            _autocast(),
            context.pick.on(host),
        )

        def record(order: Order, draft_calls: int, began: float, ended: float, forked: bool) -> None:
            context.stats.draft_calls = draft_calls
            timeline.draft.append((began, ended))
            planner.observe_step(ended - began, order.beside, order.corrections if forked else 0)

        self.call = WorkerCall(worker, setup, self.patience, record, give_back)
        if not planner.resting:  # where drafting mostly pauses, the worker would read the prompt in vain
            self.call.open()

    # ------------------------------------------------------------------ for the schedule

    def plan(self, rows: int) -> Plan:
        """How to run the next round of so many rows."""
        self.planner.pads_to(self.context.cost.widths)
        return self.planner.plan(rows)

    def order(
        self,
        sequences: Sequences,
        wanted: list[int],
        carried: Sequence[DraftTokens],
        corrections: int = 0,
        beside: bool = False,
    ) -> None:
        """Have the worker draft `wanted[b]` tokens behind each row's accepted tokens and what it carries.

        Args:
            corrections: how many to draft for, for each token that the target has not seen.
            beside: whether the target verifies meanwhile.
        """
        rows, numbers = [], sequences.rows
        for row, text, end, most, held in zip(
            numbers, sequences.tokens, sequences.lengths, wanted, carried, strict=True
        ):
            start = self.told[row]
            new = text[len(text) - (end - start) :] + [drafted.token for drafted in held]
            rows.append(RowOrder(row, self.texts[row], start, new, len(held), most))
        self.told |= zip(numbers, sequences.lengths, strict=True)
        self.texts = {row: number for number, row in enumerate(numbers)}
        self.call.draft(Order(rows, corrections if self.forks else 0, beside))

    def wait(self, steps: int | None) -> list[DraftTokens]:
        """[B] what was drafted, once this many steps are there (None: all of them).

        Raises:
            ConnectionError: the worker is gone or answers garbage.
            TimeoutError: it is silent.
        """
        began = now()
        self.call.wait(steps)
        self.timeline.waited += now() - began
        assert self.call.order is not None
        return [self.call.drafted[b][: row.wanted] for b, row in enumerate(self.call.order.rows)]

    def settle(self, passed: list[int], corrected: list[tuple[int, int, int]]) -> dict[int, DraftTokens]:
        """By row, what it carries into the next round, once it is there. Drafting that is of use to none is cancelled.

        Args:
            passed: rows that passed all their tests. They carry their new tokens but the first, which was tested.
            corrected: (row, column, token) of the other rows' corrections, which may have been drafted for.
        """
        order = self.call.order
        forks = {fork[:3]: i for i, fork in enumerate(self.call.forks)}
        foreseen = {place[0]: forks[place] for place in corrected if place in forks}
        self.timeline.corrections.append((len(corrected), len(foreseen)))
        if order is not None and order.forking:
            self.planner.observe_corrections(len(corrected), len(foreseen), order.corrections)
        if order is None or not (passed or foreseen):
            self.call.cancel()
            return {}
        rows = [row.row for row in order.rows]
        carried = {row: new[1:] for row, new in zip(rows, self.wait(None), strict=True) if row in passed}
        for row, i in foreseen.items():
            self.texts[row] = number = len(rows) + i
            wanted = order.rows[rows.index(row)].wanted - self.call.forks[i].first
            carried[row] = self.call.drafted[number][:wanted]
        return carried

    def saw_target(self, rows: int, width: int, span: tuple[float, float], beside: bool, paused: bool) -> None:
        """Record a forward of the target.

        Args:
            width: tokens per row.
            span: when it began and ended.
            beside: something was drafted meanwhile.
            paused: nothing was to be drafted in this round.
        """
        self.paused += paused
        self.planner.observe_forward(rows, width, span[1] - span[0], beside)
        self.timeline.target.append(span)

    # ------------------------------------------------------------------ the rest of a session

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        """Draft and wait, in transformers' own loop."""
        window = self.planner.plan(len(room)).window
        self.order(sequences, [min(window, most) for most in room], [[]] * len(room))
        return as_draft(self.wait(None), self.context)

    def observe(self, verdict: Verdict) -> None:
        self.timeline.tests.append((sum(verdict.drafted), sum(verdict.accepted)))
        for row, tested, accepted in zip(verdict.rows, verdict.drafted, verdict.accepted, strict=True):
            self.planner.observe_tests(tested, accepted, row in self.broken)
            if tested:
                (self.broken.add if accepted < tested else self.broken.discard)(row)

    def close(self) -> None:
        """Free the worker, or end it if it may be in trouble."""
        rounds = len(self.timeline.target)
        if self.planner.window == "auto" and rounds > SHORT:
            self.planner.resting = self.paused > rounds - self.paused
        self.call.close()


def _autocast() -> dict[str, torch.dtype]:
    return {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}


def as_draft(drafted: Sequence[DraftTokens], context: DraftContext, tested: bool = True) -> Draft:
    """A draft of uneven rows.

    Args:
        tested: whether it is, by the q of draws.
    """
    draft = Draft.from_lists([[one.token for one in row] for row in drafted])
    if context.do_sample and tested:
        likely = [[one.likely for one in row] for row in drafted]
        chances = [[one.chances for one in row] for row in drafted]
        width, most = draft.tokens.shape[1], max((len(one) for row in likely for one in row), default=0)
        where, said = (
            [[[*one, *[0] * (most - len(one))] for one in row] + [[0] * most] * (width - len(row)) for row in told]
            for told in (likely, chances)
        )
        shape = len(drafted), width, most
        index = to_device(where, context.device, torch.long).view(shape)
        draft.q = torch.zeros(*shape[:2], context.vocab_size, device=context.device)
        draft.q.scatter_add_(2, index, to_device(said, context.device, torch.float32).view(shape))
    return draft
