"""`PearlSession`: the target's side of drafting in the background."""

import torch
from torch import Tensor

from ...budget import Overlap
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...session import DraftSession
from ...transfer import to_device
from ...verify.picking import DraftPicker
from .config import PearlConfig
from .overlap import Chain, Plan
from .timeline import Timeline
from .worker import Conversation, Order, Setup, Worker

SHORT = 4
"""rounds of a call that say nothing yet: the last one has no room for a draft anyway"""


class PearlSession(DraftSession):
    """Gives a worker its orders, and turns what it drafts into what rows carry."""

    patience = 30.0

    def __init__(
        self,
        context: DraftContext,
        worker: Worker,
        config: PearlConfig,
        planner: Overlap,
        timeline: Timeline,
        forks: bool = False,
    ) -> None:
        """
        Args:
            planner: of the window, for this target.
            timeline: where the call is recorded.
            forks: whether the draft takes rows of uneven lengths, which drafting for corrections needs.
        """
        super().__init__(context)
        self.config, self.planner, self.timeline = config, planner, timeline
        self.weighs = planner.window != "auto"  # a fixed window is kept whatever it costs
        self.rows = list(range(len(context.prompt_ids)))
        """[B] of the present order"""
        self.forks_can_be = forks and (len(self.rows) == 1 or not context.lockstep)
        self.told: dict[int, int] = dict.fromkeys(self.rows, context.prompt_ids.shape[1])
        """by row, accepted columns at the time of the last order: what the worker was told of them never changes"""
        self.branches = {row: row for row in self.rows}
        """by row, the branch of the present order that goes on as the row"""
        self.wanted: list[int] = []
        """[B] of the present order"""
        self.recorded = 0
        """steps of the present order that were recorded"""
        self.beside = False
        """whether the target verifies while the present order is carried out"""
        self.corrections = 0
        """for each unverified token, how many it drafts for"""
        self.broken: set[int] = set()
        """rows whose last test rejected a token"""
        self.rounds = {True: 0, False: 0}
        """how many there were, with drafting and with drafting paused"""
        assert isinstance(context.pick, DraftPicker)
        setup = Setup(
            context.prompt_ids.cpu(),
            context.prompt_mask.cpu(),
            context.eos_token_ids,
            context.lockstep and not self.forks_can_be,
            _autocast(),
            context.pick,
        )
        self.worker = Conversation(worker, setup, self.patience)
        if not planner.resting:  # where drafting mostly pauses, the worker would read the prompt in vain
            self.worker.open()

    # ------------------------------------------------------------------ for the schedule

    def plan(self, rows: int) -> Plan:
        """How to run the next round of so many rows."""
        found = self.planner.plan(rows)
        pre_verify, post_verify = self.config.pre_verify, self.config.post_verify
        if not found.overlapped:
            pre_verify = post_verify = False
        return Plan(found.window, pre_verify, post_verify, found.corrections)

    def order(
        self, sequences: Sequences, wanted: list[int], carried: list[Chain], corrections: int = 0, beside: bool = False
    ) -> None:
        """Have the worker draft `wanted[b]` tokens behind each row's accepted tokens and what it carries.

        Args:
            corrections: how many likely ones of each token to remember.
            beside: the target verifies meanwhile: draft behind corrections of the unverified tokens, too.
        """
        self.corrections = corrections if self.forks_can_be else 0
        starts = [self.told[row] for row in sequences.rows]
        tokens = [
            text[len(text) - (end - start) :] + [place.token for place in chain]
            for text, end, start, chain in zip(sequences.tokens, sequences.lengths, starts, carried, strict=True)
        ]
        order = Order(
            width=max(wanted),
            corrections=self.corrections,
            forking=beside and self.corrections > 0,
            branches=[self.branches[row] for row in sequences.rows],
            starts=starts,
            wanted=list(wanted),
            unverified=[len(chain) for chain in carried],
            tokens=tokens,
        )
        self.rows, self.wanted, self.beside, self.recorded = list(sequences.rows), list(wanted), beside, 0
        self.told |= zip(self.rows, sequences.lengths, strict=True)
        self.branches = {row: branch for branch, row in enumerate(self.rows)}
        self.worker.draft(order)

    def wait(self, steps: int | None) -> list[Chain]:
        """[B] what was drafted, once this many steps are there (None: all of them).

        Raises:
            ConnectionError: the worker is gone or answers garbage.
            TimeoutError: it is silent.
        """
        self.worker.wait(steps)
        self._record()
        return [self._chain(b, 0, most) for b, most in enumerate(self.wanted)]

    def settle(self, passed: list[int], corrected: list[tuple[int, int, int]]) -> dict[int, Chain]:
        """By row, what it carries into the next round, once it is there. Drafting that is of use to none is cancelled.

        Args:
            passed: rows that passed all their tests. They carry their new tokens but the first, which was tested.
            corrected: (row, column, token) of the other rows' corrections, which may have been drafted for.
        """
        self._record()
        order, forks = self.worker.order, {(f.row, f.column, f.token): i for i, f in enumerate(self.worker.forks)}
        foreseen = {place[0]: forks[place] for place in corrected if place in forks}
        self.timeline.corrections.append((len(corrected), len(foreseen)))
        if order is not None and order.forking:
            self.planner.observe_corrections(len(corrected), len(foreseen), order.corrections)
        if not passed and not foreseen:
            self.worker.cancel()
            return {}
        chains = dict(zip(self.rows, self.wait(None), strict=True))
        return {row: chains[row][1:] for row in passed} | {row: self._go_on_from(i) for row, i in foreseen.items()}

    def _go_on_from(self, index: int) -> Chain:
        """What was drafted behind a correction that the target has made."""
        fork = self.worker.forks[index]
        self.branches[fork.row] = branch = len(self.rows) + index
        return self._chain(branch, fork.first, self.wanted[self.rows.index(fork.row)])

    def _chain(self, branch: int, first: int, last: int) -> Chain:
        """What the steps from `first` until before `last` have drafted in a branch."""
        return [step.drafted(branch) for step in self.worker.steps[first:last]]

    def question(self, row: int, column: int, tokens: Tensor | None = None) -> Tensor:
        """q of some tokens, or of all [V], at a drafted column of a row of the call's batch."""
        self.timeline.questions += 1
        wanted = [] if tokens is None else tokens.tolist()
        return self.worker.q(self.branches[row], column, wanted).to(self.context.device)

    def saw_target(self, rows: int, width: int, span: tuple[float, float], alone: bool, paused: bool) -> None:
        """Record a forward of the target.

        Args:
            width: tokens per row.
            span: when it began and ended.
            alone: nothing was drafted meanwhile.
            paused: nothing was to be drafted in this round.
        """
        self.rounds[not paused] += 1
        self.planner.observe_forward(rows, width, span[1] - span[0], beside=not alone)
        self.timeline.target.append(span)

    def _record(self) -> None:
        """Record the draft steps that were heard of since the last time."""
        for step in self.worker.steps[self.recorded :]:
            self.context.stats.draft_calls = step.draft_calls
            self.timeline.draft.append((step.began, step.ended))
            forked = len(step.tokens) > len(self.rows)
            self.planner.observe_step(step.ended - step.began, self.beside, self.corrections if forked else 0)
        self.recorded = len(self.worker.steps)

    # ------------------------------------------------------------------ the rest of a session

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        """Draft and wait, in transformers' own loop."""
        window = self.planner.plan(len(room)).window
        self.order(sequences, [min(window, most) for most in room], [[]] * len(room))
        return as_draft(self.wait(None), self.context)

    def q(self, row: int, node: int, tokens: Tensor | None = None) -> Tensor:
        return self.question(self.rows[row], self.told[self.rows[row]] + node, tokens)

    def observe(self, verdict: Verdict) -> None:
        self.timeline.tests.append((sum(verdict.drafted), sum(verdict.accepted)))
        for row, tested, accepted in zip(verdict.rows, verdict.drafted, verdict.accepted, strict=True):
            self.planner.observe_tests(tested, accepted, row in self.broken)
            if tested:
                (self.broken.add if accepted < tested else self.broken.discard)(row)

    def close(self) -> None:
        """Free the worker, or end it if it may be in trouble."""
        if self.planner.window == "auto" and sum(self.rounds.values()) > SHORT:
            self.planner.resting = self.rounds[False] > self.rounds[True]
        self.timeline.messages, self.timeline.bytes = self.worker.traffic
        self.worker.close()


def _autocast() -> dict[str, torch.dtype]:
    return {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}


def as_draft(chains: list[Chain], context: DraftContext) -> Draft:
    """A draft of uneven chains."""
    draft = Draft.from_lists([[place.token for place in chain] for chain in chains], context.device)
    if context.do_sample:
        width = draft.tokens.shape[1]
        q = [[place.q for place in chain] + [1.0] * (width - len(chain)) for chain in chains]
        draft.token_probs = to_device(q, context.device, torch.float32).view(len(chains), width)
    return draft
