"""`PearlSession`: the target's side of drafting in the background."""

from itertools import islice

import torch
from torch import Tensor

from ...budget import Overlap
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...session import DraftSession
from ...transfer import to_device
from ...verify.picking import DraftPicker
from .config import PearlConfig
from .overlap import NO_TURN, Carried, Chain, Drafted, Plan, Side, Turn
from .timeline import Timeline
from .worker import Conversation, Fork, Order, Setup, Worker

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
        self.sides_can_be = self.forks_can_be and context.trees and not (context.lockstep or context.do_sample)
        self.told: dict[int, int] = dict.fromkeys(self.rows, context.prompt_ids.shape[1])
        """by row, accepted columns at the time of the last order: what the worker was told of them never changes"""
        self.branches = {row: row for row in self.rows}
        """by row, the branch of the present order that goes on as the row"""
        self.sides: dict[int, list[int]] = {}
        """by row, the branches of the present order that go on as its sides"""
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
        self.taken = 0
        """rows of the last round that were accepted along a side"""
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
        return Plan(found.window, pre_verify, post_verify, found.corrections, found.spare if self.sides_can_be else 0)

    def order(self, sequences: Sequences, wanted: list[int], turns: list[Turn], plan: Plan, beside: bool) -> None:
        """Have the worker draft `wanted[b]` tokens behind each row's accepted tokens and what it carries.

        Args:
            beside: the target verifies meanwhile: draft behind corrections of the unverified tokens, too, and where
                there is width to spare, behind such of the new ones.
        """
        corrections = plan.corrections if self.forks_can_be else 0
        pending = [turn.carried for turn in turns]
        starts = [self.told[row] for row in sequences.rows]
        tokens = [
            text[len(text) - (end - start) :] + [place.token for place in chain]
            for text, end, start, chain in zip(sequences.tokens, sequences.lengths, starts, pending, strict=True)
        ]
        order = Order(
            width=max(wanted),
            corrections=corrections,
            forking=beside and corrections > 0,
            siding=plan.spare if beside and corrections > 0 else 0,
            branches=[self.branches[row] for row in sequences.rows],
            starts=starts,
            sides=[side.branch for turn in turns for side in turn.sides],
            wanted=list(wanted),
            unverified=[len(chain) for chain in pending],
            tokens=tokens,
        )
        self.rows, self.wanted, self.beside, self.recorded = list(sequences.rows), list(wanted), beside, 0
        self.corrections = corrections
        self.told |= zip(self.rows, sequences.lengths, strict=True)
        self.branches = {row: branch for branch, row in enumerate(self.rows)}
        numbers = iter(range(len(self.rows), len(self.rows) + len(order.sides)))
        self.sides = {row: list(islice(numbers, len(turn.sides))) for row, turn in zip(self.rows, turns, strict=True)}
        self.worker.draft(order)

    def wait(self, steps: int | None) -> list[list[Chain]]:
        """[B] what was drafted behind each row and behind its sides, once so many steps are there (None: all of them).

        Raises:
            ConnectionError: the worker is gone or answers garbage.
            TimeoutError: it is silent.
        """
        self.worker.wait(steps)
        self._record()
        return [
            [self._chain(branch, 0, most) for branch in [b, *self.sides[row]]]
            for b, (row, most) in enumerate(zip(self.rows, self.wanted, strict=True))
        ]

    def settle(self, passed: dict[int, int], corrected: list[tuple[int, int, int]]) -> dict[int, Carried]:
        """By row, what it carries into the next round, once it is there. Drafting that is of use to none is cancelled.

        Args:
            passed: rows that passed all their tests, by which line: 0 are the carried tokens, n is the n-th side. They
                carry their new tokens but the first, which was tested.
            corrected: (row, column, token) of the other rows' corrections, which may have been drafted for.
        """
        self._record()
        order, rows = self.worker.order, range(len(self.rows))
        ready = {(self.rows[f.origin], f.column, f.token): n for n, f in self._forks().items() if f.origin in rows}
        foreseen = {place[0]: ready[place] for place in corrected if place in ready}
        self.timeline.corrections.append((len(corrected), len(foreseen)))
        if order is not None and order.forking:
            made, seen = len(corrected) + self.taken, len(foreseen) + self.taken
            self.planner.observe_corrections(made, seen, order.corrections)
        if not passed and not foreseen:
            self.worker.cancel()
            return {}
        self.wait(None)
        onward = {row: ([self.branches[row], *self.sides[row]][line], 1) for row, line in passed.items()}
        onward |= {row: (n, self._forks()[n].first) for row, n in foreseen.items()}
        self.branches |= {row: branch for row, (branch, _) in onward.items()}
        return {row: self._carried(row, branch, first) for row, (branch, first) in onward.items()}

    def _forks(self) -> dict[int, Fork]:
        """Those of the present order by the numbers of their branches, behind those of rows and sides."""
        return dict(enumerate(self.worker.forks, start=len(self.rows) + sum(map(len, self.sides.values()))))

    def _carried(self, row: int, branch: int, first: int) -> Carried:
        """What a branch was given from step `first` on, and the sides that were forked off that."""
        last = self.wanted[self.rows.index(row)]
        sides = [
            Side(fork.first - 1 - first, [Drafted(fork.token), *self._chain(n, fork.first, last)], n)
            for n, fork in self._forks().items()
            if fork.origin == branch and first < fork.first <= last
        ]
        return Carried(self._chain(branch, first, last), sides)

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
        plan = self.plan(len(room))
        self.order(sequences, [min(plan.window, most) for most in room], [NO_TURN] * len(room), plan, beside=False)
        return as_draft([chain for (chain,) in self.wait(None)], self.context)

    def q(self, row: int, node: int, tokens: Tensor | None = None) -> Tensor:
        return self.question(self.rows[row], self.told[self.rows[row]] + node, tokens)

    def observe(self, verdict: Verdict) -> None:
        self.timeline.tests.append((sum(verdict.drafted), sum(verdict.accepted)))
        self.taken = 0
        for b, (row, tested, accepted) in enumerate(zip(verdict.rows, verdict.drafted, verdict.accepted, strict=True)):
            straight = along_first(verdict, b)
            self.planner.observe_tests(tested, straight, row in self.broken)
            if straight < accepted:  # then comes a correction, and what was drafted behind it
                self.taken += 1
                self.planner.observe_tests(tested - straight - 1, accepted - straight - 1, True)
            if tested:
                (self.broken.add if accepted < tested else self.broken.discard)(row)
        self.timeline.sides += self.taken

    def close(self) -> None:
        """Free the worker, or end it if it may be in trouble."""
        if self.planner.window == "auto" and sum(self.rounds.values()) > SHORT:
            self.planner.resting = self.rounds[False] > self.rounds[True]
        self.timeline.messages, self.timeline.bytes = self.worker.traffic
        self.worker.close()


def along_first(verdict: Verdict, b: int) -> int:
    """How many tokens of a row were accepted before the first that is not its parent's first child."""
    parents = None if verdict.draft is None else verdict.draft.parents
    if parents is None:
        return verdict.accepted[b]
    path, row = verdict.paths[b], parents[b]
    return next((i for i, node in enumerate(path) if row.index(row[node]) < node), len(path))


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
