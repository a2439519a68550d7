"""The overlapped schedule (Liu et al. 2024, Figure 3): the target verifies while the draft model drafts.

A row carries drafted tokens that the target has not seen. In every round the target is fed the row's last accepted
token and those; meanwhile the draft model goes on behind them. The logits then test the unverified tokens and the
first new one:

- none carried (*pre-verify*): the new x1 is tested while x2 … xγ are being drafted;
- x2 … xγ carried (*post-verify*): they and the next x(γ+1) are tested. x1 was tested a round ago, and is not again.

A row that passes all its tests ends in a drafted token and carries its other new tokens on; one that fails carries
nothing, unless its correction was foreseen, or a copy of earlier text stands in (`copying.py`).
"""

import torch
from torch import Tensor

from ...clock import now
from ...protocol import Draft, DraftContext, Verdict
from ...schedule import Correct, Guarded, Round
from ...transfer import to_device
from ...verify.picking import DraftPicker
from ...verify.verification import residual
from .copying import Chain
from .correction import corrected
from .session import as_draft
from .window import Plan


class Overlapped:
    """`PearlDrafter`'s schedule: orders for the worker, through the guarded session of a call."""

    def __init__(self, session: Guarded, context: DraftContext) -> None:
        self.session, self.context = session, context
        assert isinstance(context.pick, DraftPicker)
        self.randomness = context.pick.randomness
        self.carried: dict[int, Chain] = {}
        """unverified tokens, by row"""
        self.chains: list[Chain] = []
        """[B] the same in the present round"""
        self.copied: list[int] = []
        """[B] how many of those, the first ones, were copied"""
        self.fresh: list[Chain] = []
        """[B] what has been drafted behind them"""
        self.lookup = bool(session.ask(lambda d: d.copying is not None))
        self.drafting = False
        self.fed_at = 0.0

    def feed(self, round: Round) -> Draft:
        """What rows carry; drafting begins behind it. Rows without room let go of what they carry."""
        self.round, self.rows, self.starts = round, list(round.sequences.rows), list(round.sequences.lengths)
        s, rows = round.sequences, self.rows
        plan: Plan | None = self.session.ask(lambda d: d.planner.plan(len(rows))) if any(round.room) else None
        chains = [self.carried.get(row, [])[:room] for row, room in zip(rows, round.room, strict=True)]
        copies: list[Chain] = [[] for _ in rows]
        if self.lookup and plan is not None and (plan.post_verify or plan.speed):
            copies = self.session.ask(lambda d: d.copy(chains, s, list(round.room), plan)) or copies
        chains = [chain or copy for chain, copy in zip(chains, copies, strict=True)]
        if plan is not None and not plan.pre_verify and not (plan.serial and any(copies)):
            chains = self._drafted_first(plan, chains)
        budget = [0] * len(rows) if plan is None else self._budget(plan, chains)
        if round.lockstep:  # the rows of a lockstep batch are all in one mode
            active = [b for b, out in enumerate(round.passive) if not out]
            budget = [min(budget[b] for b in active)] * len(rows)
            width = min(len(chains[b]) for b in active)
            chains = [chain[:width] for chain in chains]
        self.drafting = plan is not None and any(budget)
        if self.drafting:
            assert plan is not None
            self.session.ask(lambda d: d.start_draft(s, budget, chains, plan.corrections, beside=True))
        self.chains = chains if self.session.alive else [[]] * len(rows)
        self.copied = [min(len(copy), len(chain)) for copy, chain in zip(copies, self.chains, strict=True)]
        self.fed_at = now()
        return self._as_draft(self.chains)

    def _drafted_first(self, plan: Plan, chains: list[Chain]) -> list[Chain]:
        """Without pre-verify, rows that carry nothing wait for a draft."""
        budget = [0 if c else min(plan.window, n) for c, n in zip(chains, self._left(chains), strict=True)]
        if not any(budget):
            return chains
        s, began = self.round.sequences, [list(chain) for chain in chains]
        self.session.ask(lambda d: d.start_draft(s, budget, began, plan.corrections))
        more: list[Chain] = self.session.ask(lambda d: d.wait(None)) or [[]] * len(chains)
        return [chain + new for chain, new in zip(chains, more, strict=True)]

    def _budget(self, plan: Plan, chains: list[Chain]) -> list[int]:
        """[B] tokens to draft behind each chain while the target verifies it."""
        ahead = [plan.post_verify or (plan.pre_verify and not chain) for chain in chains]
        return [min(plan.window, n) if go else 0 for n, go in zip(self._left(chains), ahead, strict=True)]

    def _left(self, chains: list[Chain]) -> list[int]:
        return [max(0, room - len(chain)) for room, chain in zip(self.round.room, chains, strict=True)]

    def test(self, fed: Draft) -> tuple[Draft, list[int] | None]:
        """The carried tokens and the first one drafted behind each row's, waited for if need be."""
        if self.context.device.type == "cuda":
            torch.cuda.current_stream(self.context.device).synchronize()  # the draft may be at work on another
        over, rows = now(), len(self.chains)
        self.fresh = [[]] * rows
        if self.drafting:
            self.fresh = self.session.ask(lambda d: d.wait(1)) or self.fresh
        if not self.session.alive:  # nobody is left to ask for q: as if nothing had been drafted
            self.fresh = self.chains = [[]] * rows
        width, alone, paused = fed.tokens.shape[1] + 1, not self.drafting, not any(self.round.room)
        self.session.tell(lambda d: d.saw_target(rows, width, (self.fed_at, over), alone, paused))
        self._waited(over)
        tested = [chain + new[:1] for chain, new in zip(self.chains, self.fresh, strict=True)]
        if self.round.lockstep:  # all rows draft the same number of tokens; those that are finished do not count
            width = min(len(chain) for chain, out in zip(tested, self.round.passive, strict=True) if not out)
            tested = [chain[:width] for chain in tested]
        return self._as_draft(tested), [len(chain) for chain in self.chains]

    @property
    def correct(self) -> Correct | None:
        return self._correct

    def _correct(self, p: Tensor, b: int, node: int) -> Tensor:
        if node < self.copied[b]:  # its q had all its mass on the token that was rejected
            token = to_device([self.chains[b][node][0]], p.device)
            return residual(p[None], torch.nn.functional.one_hot(token, len(p)).to(p))[0]
        found = corrected(p, self.rows[b], self.starts[b] + node, self.randomness, self._question)
        if found is None:
            self.context.stats.uncorrected_tokens += 1
        return p if found is None else found

    def _question(self, row: int, column: int, tokens: Tensor | None) -> Tensor | None:
        return self.session.ask(lambda worker: worker.question(row, column, tokens))

    def settle(self, verdict: Verdict) -> None:
        """Rows that passed, and those whose correction was foreseen, wait for what is being drafted behind them."""
        began = now()
        passed: list[int] = []
        corrections: list[tuple[int, int, int]] = []
        for b, row in enumerate(verdict.rows):
            tests = len(self.chains[b]) + bool(self.fresh[b])
            n, tokens = verdict.accepted[b], verdict.tokens[b]
            if verdict.stopped[b]:
                continue
            if self.fresh[b] and n == tests:
                passed.append(row)
            elif self.copied[b] <= n < tests:  # nobody drafts for corrections of copies
                corrections.append((row, self.starts[b] + len(tokens) - 1, tokens[-1]))
        if self.round.lockstep and corrections and passed:  # rows in lockstep go on together or not at all
            passed = []
        self.carried = self.session.ask(lambda d: d.settle(passed, corrections)) or {}
        self._waited(began)

    def _as_draft(self, chains: list[Chain]) -> Draft:
        draft = as_draft(chains, self.context)
        draft.lengths = [0 if out else n for n, out in zip(draft.lengths, self.round.passive, strict=True)]
        return draft

    def _waited(self, since: float) -> None:
        """Time in which the target stood still for the draft."""
        seconds = now() - since
        self.session.tell(lambda d: d.timeline.add_wait(seconds))
