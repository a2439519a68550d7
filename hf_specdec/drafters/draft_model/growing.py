"""`GrowingSession`: a draft model that drafts step by step, as long as the next step promises to pay."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...budget import (
    LOOK_STEPS,
    MOST_NODES,
    Acceptance,
    DraftCost,
    Evidence,
    Rest,
    Tree,
    most_per_second,
    steps_that_pay,
    why_rested,
)
from ...clock import now
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...target.devices import input_device
from ...transfer import to_host, waits
from ..tree_session import Joining, TreeSession
from .base import columns_for
from .chain import Chain
from .model import check_room
from .session import candidates_of
from .translating import Translated, model_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DRAFTED = "drafted"
"""the draft model as a source; it goes on from its candidate of rank 0"""
GUESS = 0.6
"""how often a candidate is right where those before it are wrong"""
LONGEST = 16
"""steps of the draft model in one round"""
UNMEASURED = 4
"""steps in a round before anything was measured, where so much is verified"""


class GrowingSession(TreeSession):
    """Greedy. In each round: begin with what others have to say; draft step by step while the next steps promise to
    pay; of all candidates the engine verifies those that do."""

    most = MOST_NODES

    def __init__(
        self,
        context: DraftContext,
        model: "PreTrainedModel | Translated",
        window: int | str,
        candidates: int,
        acceptance: Acceptance,
        cost: DraftCost,
        others: Joining | None = None,
        chain: Chain | None = None,
        longest: int = LONGEST,
    ) -> None:
        """
        Args:
            window: steps of every round in which it is asked, or "auto".
            candidates: tokens thought of at each position.
            cost: of this model's steps.
            others: whose tokens stand in the same trees.
            chain: of the model, where estimates are others than the chances that it gives.
            longest: steps of a round at most, where they are not set.
        """
        super().__init__(context, acceptance, others)
        self.fixed = None if window == "auto" else int(window)
        self.weighs |= self.fixed is not None  # what was asked for is drafted
        self.candidates = candidates_of(context, candidates)
        self.draft_cost, self._rest = cost, Rest(cost)
        self._model = model
        self._chain = chain
        """one that is not given is made, and reads the prompt, when it is asked first"""
        self.longest = longest
        self._limit = columns_for(context, model)  # what fills them is left to the others
        if others is None and not context.most_rows:
            check_room(context.prompt_mask, self._limit)
        self.drafted: list[list[int]] = []
        """[B] the draft model's chain"""
        self._own: list[set[int]] = []
        """[B] the nodes that nobody else had proposed"""
        self._price = 0.0
        """of this round's look, as `DraftCost.asked` has it"""
        self.steps = 0
        """of it, in this round"""
        self.rounds = self.rested = 0
        """all, and those in which nothing promised to pay"""
        self._declined = False
        self._left = 1  # tokens of the longest row to go: the prompt is read for all of them
        self._active: list[int] = []  # rows that may draft; others of a lockstep batch are finished
        self._rows: list[int] = []

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self.begin(len(budget))
        self.rounds += 1
        self._active, self._rows = [b for b, room in enumerate(budget) if room > 0], sequences.rows
        self.drafted, self._own, self.steps = [[] for _ in budget], [set() for _ in budget], 0
        self._left = max(self.context.max_length - max(sequences.lengths), 1)
        if self.others is not None:
            self.others.join(self.trees, sequences, budget)
        self._declined = self._draft_on(sequences, budget)
        return self.draft()

    # ------------------------------------------------------------------ the draft model

    def _draft_on(self, sequences: Sequences, budget: list[int]) -> bool:
        """Steps of the draft model, while they promise to pay; true where none does."""
        before, rows = self.draft_cost.unasked, len(budget)
        alone = self.fixed is None and not any(map(len, self.trees))  # what others thought of is another matter
        if alone and self._rest.goes_on(sequences.rows):
            return True
        limit = self._limit if self._chain is None else min(self._limit, self._chain.model.context_limit)
        most = min(self.fixed or self.longest, max(budget), limit - max(sequences.lengths))
        if most < 1 or (self.fixed is None and self.context.cost.tried(rows) == 0):
            return False  # nothing will be verified
        tips: list[int | None] = [-1 if room > 0 else None for room in budget]
        # To look at every token of an accelerator would cost more than to draft too many.
        blind = waits(input_device(model_of(self._model)))
        planned = self._steps_that_pay(tips, enough=most if blind else 1)
        looks = not planned
        look = most if self.fixed else min(most, LOOK_STEPS)
        price = self.draft_cost.asked(planned > 0, self.context.cost, rows, self._unread(), look)
        if price is None:
            if alone:
                self._rest.begin(sequences.rows)
            return True
        self._price, least = price, look if looks or self.fixed else 1
        planned = min(most, max(planned, least))
        opened = self._chain is None  # and reads the prompt in this round
        if self._chain is None:
            began = now()
            self._chain = Chain(self.context, self._model, self.candidates)
            self.draft_cost.observe_reading(now() - began, self.context.prompt_ids.numel())
        unread = []
        began = caught_up = now()
        opened |= self._chain.begin(sequences, most)
        for step in range(1, most + 1):
            found = self._chain.step()
            self.steps = step
            if blind:
                unread.append(found)
                if step == planned:
                    break
                continue
            tips = self._grow(tips, to_host(found[0]), to_host(found[1]), budget)
            if step == 1:
                caught_up = now()
            if all(tip is None for tip in tips) or (step >= least and not self._steps_that_pay(tips, enough=1)):
                break
        if unread:
            self._grow_at_once(tips, unread, budget)
        seconds, usual = now() - began, not opened and not before
        if not blind:
            self.draft_cost.observe_draft(self.steps, caught_up - began, seconds, usual)
        elif usual or seconds / self.steps < (self.draft_cost.step or 0.0):
            self.draft_cost.observe(seconds / self.steps)
        if looks and before:  # and read what was accepted since the last one
            self.draft_cost.observe_look(seconds)
        return False

    def _grow_at_once(
        self, tips: Sequence[int | None], steps: Sequence[tuple[Tensor, Tensor]], budget: list[int]
    ) -> None:
        """Read all steps in one transfer, and add them."""
        tokens = torch.stack([tokens for tokens, _ in steps]).float()  # exact for ids below 2^24
        chances = torch.stack([chances for _, chances in steps]).float()
        for mine, likely in zip(*to_host(torch.stack([tokens, chances])), strict=True):
            tips = self._grow(tips, [list(map(int, row)) for row in mine], likely, budget)

    def _grow(
        self,
        tips: Sequence[int | None],
        tokens: Sequence[Sequence[int]],
        chances: Sequence[Sequence[float]],
        budget: list[int],
    ) -> list[int | None]:
        """Add a step's candidates [B, k] behind each row's last drafted token; None where a row drafts no more."""
        on: list[int | None] = []
        for b, tip in enumerate(tips):
            if tip is None:
                on.append(None)
                continue
            first, said = tokens[b][0], self._told(self.trees[b], tip, tokens[b][0])
            node, *_ = [
                self._add(b, tip, token, chance, rank, said)
                for rank, (token, chance) in enumerate(zip(tokens[b], chances[b], strict=True))
                if rank == 0 or chance > 0
            ]
            self.drafted[b].append(first)
            ended = first in self.context.eos_token_ids or len(self.drafted[b]) >= budget[b]
            on.append(None if ended else node)
            if not ended and self.others is not None:
                self.others.join_behind(self.trees[b], node, self._rows[b], budget[b])
        return on

    def _add(self, b: int, tip: int, token: int, chance: float, rank: int, agrees: bool | None) -> int:
        mean = Evidence.of(DRAFTED, rank)
        here = Evidence.of(DRAFTED, min(rank, 1))._replace(agrees=agrees).at(chance)
        known = self.trees[b].at(tip, token)
        node = self.trees[b].add(tip, token, self.acceptance.calibrated(here), mean, here)
        if known is None:
            self._own[b].add(node)
        return node

    def _told(self, tree: Tree, tip: int, token: int) -> bool | None:
        """Whether others say the same here; None where they say nothing. From now on they are judged by whether the
        draft model agrees."""
        others: bool | None = None
        for node in tree.children(tip):
            agrees = tree.tokens[node] == token
            others = agrees or others is True
            evidence, base = tree.evidence[node][0]._replace(agrees=agrees), tree.chances[node]
            tree.evidence[node] = (evidence,)
            tree.chances[node] = self.acceptance.chance(evidence, 1 - 0.3 * (1 - base) if agrees else 0.5 * base)
        return others

    # ------------------------------------------------------------------ the decision

    def _steps_that_pay(self, tips: Sequence[int | None], enough: int) -> int:
        """How many more steps of the draft model promise most tokens per second; 0 where none pays.

        Args:
            tips: [B] where rows would go on; None for those that do not.
            enough: no more are counted.
        """
        cost, step = self.context.cost, self.draft_cost.step
        if step is None or not cost.known:
            wide = cost.tried(len(self.trees)) or UNMEASURED
            return max(0, min(UNMEASURED, max(LOOK_STEPS, wide)) - self.steps)
        onward = [self._onward(self.trees[b], tips[b]) for b in self._active]
        likely = [[self._alpha(rank) for rank in range(self.candidates)]] * len(self._active)
        chances = [[chance for _, chance in self.ranked(b)] for b in self._active]
        spent, opening = self.steps * step, 0.0 if self.steps else self.draft_cost.opening + self._unread() / self._left
        seconds, advance = cost.round(len(self.trees)), self.context.advance
        return steps_that_pay(chances, onward, likely, seconds, step, spent, advance, opening, enough)

    def _unread(self) -> float:
        """Seconds that the draft model takes to read the prompt; 0 once it has, or where it is asked in any case."""
        read = self._chain is not None or self.fixed is not None
        return 0.0 if read else self.draft_cost.reading * self.context.prompt_ids.numel()

    def _alpha(self, rank: int = 0) -> float:
        """How often the draft model is right with its likeliest token, or with one of the next."""
        return self.acceptance.chance(Evidence.of(DRAFTED, rank), GUESS * (1 - GUESS) ** rank)

    def _onward(self, tree: Tree, tip: int | None) -> float:
        """The chance to get behind this token, and that nobody says yet what is right there."""
        if tip is None:
            return 0.0
        survival = tree.survival()
        told = sum(tree.chances[node] for node in tree.children(tip))
        here = survival[tip] if tip >= 0 else 1.0
        return here * max(0.0, 1 - told)

    def draft(self) -> Draft:
        draft = super().draft()
        if self.fixed is not None and any(self.drafted):  # what was asked for is verified
            draft.survival = None
        return draft

    def ranked(self, row: int) -> list[tuple[int, float]]:
        """Where a number of tokens was asked for, they come first, and of the others those that pay."""
        likeliest = super().ranked(row)
        if self.fixed is None or not (chain := self.trees[row].along(self.drafted[row])):
            return likeliest
        cost, rows = self.context.cost, len(self.trees)
        if (count := cost.tried(rows)) is None or (not count and cost.known):  # behind a chain no round is plain
            count, _ = most_per_second([[chance for _, chance in likeliest]], cost.round(rows), most=cost.most(rows))
        paying = likeliest[:count] if self.context.trees else []
        return [(node, 1.0) for node in chain] + [found for found in paying if found[0] not in chain]

    def observe(self, verdict: Verdict) -> None:
        if self._chain is not None and self.steps:
            self._chain.observe(verdict, self.drafted)
            told = zip(self.trees, self._own, verdict.tokens, verdict.accepted, strict=True)
            gained = [len(own.intersection(tree.along(text[:n]))) for tree, own, text, n in told]
            self.draft_cost.kept(gained, self._price, self.context.cost, self.context.advance)
        super().observe(verdict)
        self.rested += self._declined and not any(verdict.drafted)
        self.steps, self._declined = 0, False

    def close(self) -> None:
        super().close()
        c = self.draft_cost.c(self.context.cost, self.context.rows)
        self.context.stats.notes += why_rested(self.rested, self.rounds, c, self._alpha())
