"""`SampledHybridSession`: copies, and what a draft model or a head draws."""

from collections.abc import Sequence
from dataclasses import replace

from ...budget import Controller, Drafted, Tree, most_per_second
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...transfer import to_host, waits
from ..draft_model import Steps
from ..draft_model.session import draft_chains
from ..sources import Sources
from ..trees import TreeSession, onward_from

MOST_COPIES = 16
"""beside the draws of a row: each has a q, over the whole vocabulary"""


class SampledHybridSession(TreeSession):
    """Tokens that are drawn at random are tested by the q that they were drawn from: they are accepted more often than
    the likeliest ones would be. A round draws a chain where that promises more per second than copies do, and copies
    that pay join it: a token that nobody drew is one from a q with all its mass on it."""

    def __init__(self, context: DraftContext, model: Steps, control: Controller, sources: Sources) -> None:
        """
        Args:
            sources: of what is copied.
        """
        super().__init__(context, control.acceptance, sources)
        self.weighs = True  # what is drawn must not depend on a clock
        self.control, self.sources = control, sources
        self.model, self.features = model, model.features
        self._copies: list[Tree] = []
        """[B] what could be copied in this round without draws"""
        self._drawn: list[int] = []
        """[B] draws of each row, which are the first of its nodes; empty where none were drawn"""

    def observe_prompt(self, verdict: Verdict) -> None:
        super().observe_prompt(verdict)
        self.model.observe_prompt(verdict)

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        self._copies, self._drawn = self.begin(len(room)), []
        self.sources.join(self.trees, sequences, room)
        active = [b for b, limit in enumerate(room) if limit > 0]
        chances = [[chance for _, chance in self.ranked(b)] for b in active]
        onward = [onward_from(self.trees[b], -1) for b in active]
        left = self.context.max_length - max(sequences.lengths)
        most = min(max(room), self.model.room(sequences))
        here = Drafted(sequences.rows, chances, onward, 0, self.model.unread, left)
        steps = self.control.plan(here, most, enough=most)
        if steps < 1:
            return self.draft()
        draft = draft_chains(self.model, sequences, room, steps, None)
        draft.sources = [self.sources.drawn if length else "none" for length in draft.lengths]
        self._drawn = list(draft.lengths)
        free = self.context.trees and not waits(self.context.device)  # to look at what was drawn
        return self._joined(draft, sequences.rows, room) if free and draft.q is not None else draft

    def _joined(self, drawn: Draft, rows: Sequence[int], room: list[int]) -> Draft:
        """The draws, all of them, and behind them and beside them the copies that pay."""
        assert drawn.q is not None
        chains = [tokens[:n] for tokens, n in zip(to_host(drawn.tokens), drawn.lengths, strict=True)]
        self.trees = [self._behind(*of_row) for of_row in zip(chains, self._copies, rows, room, strict=True)]
        ranked = [_draws_first(tree, chain) for tree, chain in zip(self.trees, chains, strict=True)]
        most = max(drawn.lengths) + MOST_COPIES
        offered = [[chance for _, chance in row[:most]] for row in ranked]
        cost, advance = self.context.cost, self.context.advance
        count = most_per_second(offered, cost.round(len(room)), advance=advance)[0] if cost.known else 0
        nodes = [[node for node, _ in row[: max(count, n)]] for row, n in zip(ranked, drawn.lengths, strict=True)]
        if all(len(mine) == n for mine, n in zip(nodes, drawn.lengths, strict=True)):
            return drawn
        cut = [tree.cut(mine) for tree, mine in zip(self.trees, nodes, strict=True)]
        draft = Draft.from_trees(cut, drawn.tokens.device)
        rows_of_q = (*draft.tokens.shape, drawn.q.shape[2])
        draft.q = drawn.q.new_zeros(rows_of_q).scatter_(2, draft.tokens[..., None], 1.0)
        for b, n in enumerate(drawn.lengths):
            draft.q[b, :n] = drawn.q[b, :n]
        others = self.sources.named(self.trees, [mine[n:] for mine, n in zip(nodes, drawn.lengths, strict=True)])
        for mine, other in zip(drawn.sources, others, strict=True):
            draft.sources.append("+".join(name for name in (mine, other) if name != "none") or "none")
        return draft

    def _behind(self, chain: Sequence[int], copied: Tree, row: int, room: int) -> Tree:
        """A row's draws as a tree, with what followed earlier behind each of them, and what could be copied without."""
        tree, node = Tree(), -1
        for token in chain:
            node = tree.add(node, token, self.control.alpha())
            if token not in self.context.eos_token_ids:
                self.sources.join_behind(tree, node, row, room)
        tree.merge(copied)
        return tree

    def estimates(self, row: int) -> Sequence[float | None]:
        return [] if self._drawn else super().estimates(row)

    def observe(self, verdict: Verdict) -> None:
        draws = self._of_draws(verdict)
        self.model.observe(draws, draws.accepted)
        told = zip(self._copies, draws.accepted, verdict.tokens, strict=bool(self._copies))
        kept = [max(0, n - len(copied.along(text))) for copied, n, text in told] or draws.accepted
        self.control.observe_chains(draws, kept)
        super().observe(verdict)
        self._copies, self._drawn = [], []

    def _of_draws(self, verdict: Verdict) -> Verdict:
        """What became of the draws alone: where a row's path leaves them one was rejected."""
        drawn = self._drawn or [0] * len(verdict.rows)
        drafted = [min(n, depth) for n, depth in zip(drawn, verdict.drafted, strict=True)]
        accepted = [
            next((i for i, node in enumerate([*path[:n], -1]) if node != i), n)
            for path, n in zip(verdict.paths or [[]] * len(drafted), drafted, strict=True)
        ]
        return replace(verdict, drafted=drafted, accepted=accepted)

    def close(self) -> None:
        super().close()
        self.context.stats.notes += self.control.notes()


def _draws_first(tree: Tree, chain: Sequence[int]) -> list[tuple[int, float]]:
    """A row's nodes with their chances to survive: the draws, then all others, the likeliest first."""
    survival, draws = tree.survival(), tree.along(chain)
    others = [found for found in tree.ranked() if found[0] not in draws]
    return [(node, survival[node]) for node in draws] + others
