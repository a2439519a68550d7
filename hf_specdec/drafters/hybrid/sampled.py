"""`SampledHybridSession`: copies, and what the draft model draws."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...budget import LOOK_STEPS, Acceptance, DraftCost, Tree, Window, fastest, most_per_second, why_rested
from ...budget.window import FIRST, WINDOWS
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...transfer import to_host, waits
from ..draft_model import DraftModelSession, Translated
from ..draft_model.base import columns_for
from ..tree_session import TreeSession
from .config import HybridConfig
from .sources import DRAWN, Sources, named

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MOST_COPIES = 16
"""beside the draws of a row: each has a q, over the whole vocabulary"""


class SampledHybridSession(TreeSession):
    """Tokens that are drawn at random are tested by the q that they were drawn from: they are accepted more often than
    the likeliest ones would be. A round draws a chain, where that promises more per second than copies do, and copies
    that pay join it: a token that nobody drew is one from a q with all its mass on it."""

    def __init__(
        self,
        context: DraftContext,
        config: HybridConfig,
        model: "PreTrainedModel | Translated",
        acceptance: Acceptance,
        cost: DraftCost,
        draws: Window,
        sources: Sources,
    ) -> None:
        """
        Args:
            draws: how often draws have been accepted.
            sources: of what is copied.
        """
        super().__init__(context, acceptance, sources)
        self.weighs = True  # what is drawn must not depend on a clock
        self.config, self.draft_cost, self.draws, self.sources = config, cost, draws, sources
        self.rounds = self.rested = 0
        """all, and those in which nothing promised to pay"""
        self._model = model
        self._limit = columns_for(context, model)
        self._drawing: DraftModelSession | None = None
        self._drawn: list[int] = []
        """[B] draws of each row, which are the first of its nodes; empty where none were drawn"""
        self._price = 0.0
        """of this round's look, as `DraftCost.asked` has it"""
        self._copied = 0
        """nodes of a row that would have been verified in this round without draws"""

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self.rounds += 1
        self.sources.join(self.begin(len(budget)), sequences, budget)
        limit = self._limit if self._drawing is None else min(self._limit, self._drawing.model.context_limit)
        gamma = self._window(budget) if max(sequences.lengths) < limit else 0
        if gamma == 0:
            if self._drawing is not None:
                self._drawing.seconds = 0.0  # what it is to read next is more than usual
            draft = self.draft()
            draft.sources = named(self.trees, self.ordered)
            return draft
        if self._drawing is None:  # and reads the prompt in this round
            self._drawing = DraftModelSession(self.context, self._model, gamma, self.draws, self.draft_cost)
        self._drawing.fixed_window = gamma
        draft = self._drawing.propose(sequences, budget)
        draft.sources = [DRAWN if length else "none" for length in draft.lengths]
        self._drawn = list(draft.lengths)
        free = self.context.trees and not waits(self.context.device)  # to look at what was drawn
        return self._joined(draft, sequences.rows, budget) if free and draft.q is not None else draft

    def _joined(self, drawn: Draft, rows: Sequence[int], budget: list[int]) -> Draft:
        """The draws, all of them, and behind them and beside them the copies that pay."""
        assert drawn.q is not None
        chains = [tokens[:n] for tokens, n in zip(to_host(drawn.tokens), drawn.lengths, strict=True)]
        self.trees = [self._behind(*of_row) for of_row in zip(chains, self.trees, rows, budget, strict=True)]
        ranked = [_draws_first(tree, chain) for tree, chain in zip(self.trees, chains, strict=True)]
        most = max(drawn.lengths) + MOST_COPIES
        offered = [[chance for _, chance in row[:most]] for row in ranked]
        cost, advance = self.context.cost, self.context.advance
        count = most_per_second(offered, cost.round(len(budget)), advance=advance)[0] if cost.known else 0
        nodes = [[node for node, _ in row[: max(count, n)]] for row, n in zip(ranked, drawn.lengths, strict=True)]
        if all(len(mine) == n for mine, n in zip(nodes, drawn.lengths, strict=True)):
            return drawn
        cut = [tree.cut(mine) for tree, mine in zip(self.trees, nodes, strict=True)]
        draft = Draft.from_trees(cut, drawn.tokens.device)
        rows_of_q = (*draft.tokens.shape, drawn.q.shape[2])
        draft.q = drawn.q.new_zeros(rows_of_q).scatter_(2, draft.tokens[..., None], 1.0)
        for b, n in enumerate(drawn.lengths):
            draft.q[b, :n] = drawn.q[b, :n]
        others = named(self.trees, [mine[n:] for mine, n in zip(nodes, drawn.lengths, strict=True)])
        for mine, other in zip(drawn.sources, others, strict=True):
            draft.sources.append("+".join(name for name in (mine, other) if name != "none") or "none")
        return draft

    def _behind(self, chain: Sequence[int], copied: Tree, row: int, room: int) -> Tree:
        """A row's draws as a tree, with what followed earlier behind each of them, and what could be copied without."""
        tree, node = Tree(), -1
        for token in chain:
            node = tree.add(node, token, self.draws.first if node < 0 else self.draws.behind)
            if token not in self.context.eos_token_ids:
                self.sources.join_behind(tree, node, row, room)
        tree.merge(copied)
        return tree

    def _window(self, budget: list[int]) -> int:
        """γ of a chain of draws, where that promises more than the copies at hand; else 0."""
        cost, fixed, step = self.context.cost, self.config.num_draft_tokens, self.draft_cost.step
        if step is None or not cost.known:
            return FIRST if fixed == "auto" else int(fixed)
        if fixed == "auto" and cost.tried(len(budget)) == 0:
            return 0
        active = [b for b, room in enumerate(budget) if room > 0]
        seconds, advance = cost.round(len(budget)), self.context.advance
        speed = self.draws.speed(seconds, self.draft_cost, len(active), advance)
        gamma = fastest([speed(n) for n in WINDOWS]) if fixed == "auto" else int(fixed)
        chances = [[chance for _, chance in self.ranked(b)] for b in active]
        self._copied, copying = most_per_second(chances, seconds, advance=advance)
        pays = gamma > 0 and speed(gamma) > copying
        look = LOOK_STEPS if fixed == "auto" else gamma
        price = self.draft_cost.asked(pays, cost, len(budget), steps=look)
        self._price = price or 0.0
        return 0 if price is None else gamma if pays else look

    def estimates(self, row: int) -> Sequence[float | None]:
        return [] if self._drawn else super().estimates(row)

    def observe(self, verdict: Verdict) -> None:
        if self._drawing is not None and self._drawn:
            of_draws = self._of_draws(verdict)
            self._drawing.observe(of_draws)
            gained = [0] * len(verdict.rows) if self._copied else of_draws.accepted
            self.draft_cost.kept(gained, self._price, self.context.cost, self.context.advance)
        self.rested += not self._drawn and not any(verdict.drafted)
        super().observe(verdict)
        self._drawn = []

    def _of_draws(self, verdict: Verdict) -> Verdict:
        """What became of the draws alone: where a row's path leaves them one was rejected."""
        drafted = [min(n, depth) for n, depth in zip(self._drawn, verdict.drafted, strict=True)]
        accepted = [
            next((i for i, node in enumerate([*path[:n], -1]) if node != i), n)
            for path, n in zip(verdict.paths, drafted, strict=True)
        ]
        return replace(verdict, drafted=drafted, accepted=accepted)

    def close(self) -> None:
        super().close()
        c = self.draft_cost.c(self.context.cost, self.context.rows)
        self.context.stats.notes += why_rested(self.rested, self.rounds, c, self.draws.alpha)


def _draws_first(tree: Tree, chain: Sequence[int]) -> list[tuple[int, float]]:
    """A row's nodes with their chances to survive: the draws, then all others, the likeliest first."""
    survival, draws = tree.survival(), tree.along(chain)
    others = [found for found in tree.ranked() if found[0] not in draws]
    return [(node, survival[node]) for node in draws] + others
