"""`ChainSession`: a chain of a model's tokens per row, as long as a rule says (Leviathan 2023, Algorithm 1)."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..budget import Acceptance, Tree
from ..protocol import Draft, DraftContext, Sequences, Verdict
from ..transfer import moved, to_host, waits
from .rules import Planned, StopRule
from .sources import Source
from .steps import Several, Step, Steps
from .trees import Growth, TreeSession

MOST_COPIES = 16
"""beside the draws of a row: those that are verified have a q, too, over the whole vocabulary"""


class ChainSession(TreeSession):
    """Tokens that are drawn at random are tested by the q that they were drawn from: they are accepted more often than
    the likeliest ones would be. Other candidates may stand beside each token of a greedy chain.

    Where there are sources, too, a round draws a chain where that promises more per second than they do, and what they
    propose joins it where that pays: a token that nobody drew is one from a q with all its mass on it. Such draws are
    tested one by one.
    """

    steps: Steps  # type: ignore[assignment]

    def __init__(
        self,
        context: DraftContext,
        steps: Steps,
        rule: StopRule,
        candidates: int = 1,
        acceptance: Acceptance | None = None,
        sources: Sequence[Source] = (),
    ) -> None:
        """
        Args:
            rule: how far rows draft. What sources propose joins draws where it is `Planned`, else rounds without draws.
            candidates: k, what the model gives for each place.
            acceptance: how often tokens of the sources were right; None without any.
            sources: as of `TreeSession`.
        """
        super().__init__(context, acceptance or Acceptance(), sources, steps)
        self.rule, self.candidates, self.weighs = rule, candidates, rule.weighs
        self.copied: list[Tree] = []
        """[B] what could be copied in this round without draws"""
        self.draws: list[int] = []
        """[B] draws of each row, which are the first nodes of its draft; empty where none were drawn"""

    # ------------------------------------------------------------------ a round

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        self.begin(sequences, room)
        self.copied, self.draws = self.trees, []
        most = min(max(room), self.steps.room(sequences))
        planned = min(self.rule.begin(self.said(self.steps, sequences), room, most), most)
        if planned < 1:
            return self.draft()
        draft = draft_chains(self.steps, sequences, room, planned, None if self.rule.planned else self.rule.lengths)
        self.draws = list(draft.lengths)
        if not self.sources:
            return draft
        draft.sources = [self.drawn if length else "none" for length in draft.lengths]
        free = self.rule.planned and self.context.trees and not waits(self.context.device)  # to look at what was drawn
        return self._joined(draft) if free and draft.q is not None else draft

    def _joined(self, drawn: Draft) -> Draft:
        """The draws, all of them, and behind them and beside them the copies that pay."""
        assert drawn.q is not None
        chains = [tokens[:n] for tokens, n in zip(to_host(drawn.tokens), drawn.lengths, strict=True)]
        for each, chain in zip(self.grown, chains, strict=True):
            self._put_before(each, chain)
        most, k = max(drawn.lengths) + MOST_COPIES, drawn.q.shape[1]
        ranked = [_draws_first(tree, chain)[:most] for tree, chain in zip(self.trees, chains, strict=True)]
        nodes = [[node for node, _ in row] for row in ranked]
        cut = [tree.cut(mine) for tree, mine in zip(self.trees, nodes, strict=True)]
        draft = Draft.from_trees(cut)
        # A tree, even where it is a chain: how draws are tested must not depend on what was drawn.
        width = draft.tokens.shape[1]
        draft.parents = [[*parents, *[-1] * (width - len(parents))] for _, parents in cut]
        draft.survival, draft.least = [[chance for _, chance in row] for row in ranked], drawn.lengths
        draft.q = drawn.q.new_zeros(drawn.q.shape).scatter_(2, moved(draft.tokens[:, :k, None], drawn.q.device), 1.0)
        for b, n in enumerate(drawn.lengths):
            draft.q[b, :n] = drawn.q[b, :n]
        others = self.named([mine[n:] for mine, n in zip(nodes, drawn.lengths, strict=True)])
        for mine, other in zip(drawn.sources, others, strict=True):
            draft.sources.append("+".join(name for name in (mine, other) if name != "none") or "none")
        return draft

    def _put_before(self, each: Growth, chain: Sequence[int]) -> None:
        """A row's draws as a tree, with what followed earlier behind each of them, and what could be copied without."""
        assert isinstance(self.rule, Planned)
        copied, each.tree, node = each.tree, Tree(), -1
        for i, token in enumerate(chain):
            node = each.tree.add(node, token, self.rule.control.alpha())
            if token not in self.context.eos_token_ids:
                self.ask_behind(each, node, chain[: i + 1])
        each.tree.merge(copied)

    @property
    def drafts_early(self) -> bool:  # type: ignore[override]
        return self.rule.planned and not self.sources and self.steps.drafts_early

    def draft_early(self, n: Tensor, last: Tensor) -> None:
        self.steps.draft_early(n, last)

    # ------------------------------------------------------------------ what became of it

    def observe(self, verdict: Verdict) -> None:
        draws = self._of_draws(verdict)
        self.steps.observe(draws, draws.accepted if self.candidates == 1 else kept_of_chain(verdict, self.candidates))
        told = zip(self.copied, draws.accepted, verdict.tokens, strict=bool(self.copied))
        kept = [max(0, n - len(copied.along(text))) for copied, n, text in told] or draws.accepted
        self.rule.observe(draws, kept)
        super().observe(verdict)
        self.copied, self.draws = [], []

    def _of_draws(self, verdict: Verdict) -> Verdict:
        """What became of the draws alone: where a row's path leaves them one was rejected."""
        if not self.sources:
            return verdict
        drawn = self.draws or [0] * len(verdict.rows)
        drafted = [min(n, depth) for n, depth in zip(drawn, verdict.drafted, strict=True)]
        accepted = [
            next(i for i, node in enumerate([*path[:n], -1]) if node != i)
            for path, n in zip(verdict.paths or [[]] * len(drafted), drafted, strict=True)
        ]
        return replace(verdict, drafted=drafted, accepted=accepted)

    def close(self) -> None:
        super().close()
        self.context.stats.notes += [*self.steps.notes(), *self.rule.notes()]


Lengths = Callable[[int, Step, list[int]], list[int]]
"""Asked once token i (from 0) of each row is drafted: how many tokens rows draft in all, of [B] until now. Token i
stays: dropping a token after having seen it would change the output's distribution."""


def draft_chains(model: Steps, sequences: Sequences, room: list[int], steps: int, rule: Lengths | None) -> Draft:
    """Chains of at most `steps` tokens. None is longer than its row's room, or, where tokens are looked at, goes on
    behind an EOS.

    Args:
        rule: None where all steps are made.
    """
    context = model.context
    lengths = [min(steps, most) for most in room]
    # Rows in lockstep advance by their shortest draft, so nobody drafts past it.
    longest = min if context.lockstep else max
    active = [b for b, most in enumerate(room) if most > 0]
    # To wait for every token would cost more than to draft past the end once per text.
    unseen = model.blind and rule is None
    model.begin(sequences, steps, steps if unseen else 0)
    drafted = list[Step]()
    while not unseen and len(drafted) < longest(lengths[b] for b in active):
        step = model.step()
        drafted.append(step)
        if not model.blind:
            ends = [token in context.eos_token_ids for token in to_host(step.tokens[:, 0])]
            lengths = [min(n, len(drafted)) if end else n for n, end in zip(lengths, ends, strict=True)]
        lengths = lengths if rule is None else rule(len(drafted) - 1, step, lengths)
    made = model.several(longest(lengths[b] for b in active)) if unseen else Several.of(drafted)
    model.end()
    lengths = [min(n, made.tokens.shape[1]) for n in lengths]
    if made.tokens.shape[2] > 1:
        return with_candidates(made.tokens[..., 0], made.tokens[..., 1:], lengths)
    return Draft(made.tokens[..., 0], lengths, q=made.q)


def kept_of_chain(verdict: Verdict, candidates: int) -> list[int]:
    """[B] accepted tokens that the draft went on from: of a position's candidates the first one."""
    return [sum(node % candidates == 0 for node in path) for path in verdict.paths]


def candidates_of(context: DraftContext, wanted: int) -> int:
    """Tokens tried at each position. What is drawn at random stays alone: its q is what it is tested by."""
    return wanted if context.trees and not context.do_sample else 1


def with_candidates(drafted: Tensor, beside: Tensor, lengths: Sequence[int]) -> Draft:
    """A tree of a chain [B, γ] and, as its leaves, other candidates [B, γ, k - 1] for each of its positions."""
    tokens = torch.cat([drafted[..., None], beside], dim=2).flatten(1)
    k = beside.shape[2] + 1
    parents = [(node // k - 1) * k if node >= k else -1 for node in range(tokens.shape[1])]
    return Draft(tokens, [k * n for n in lengths], [parents] * len(lengths))


def _draws_first(tree: Tree, chain: Sequence[int]) -> list[tuple[int, float]]:
    """A row's nodes with their chances to survive: the draws, then all others, the likeliest first."""
    survival, draws = tree.survival(), tree.along(chain)
    others = [found for found in tree.ranked() if found[0] not in draws]
    return [(node, survival[node]) for node in draws] + others
