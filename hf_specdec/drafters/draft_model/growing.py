"""`GrowingSession`: a draft's candidates, and what others propose, in one tree per row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...budget import DRAFTED, MOST_NODES, Controller, Drafted, Evidence, Tree, most_per_second
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...transfer import to_host
from ..trees import Joining, TreeSession, likeliest_nodes, onward_from
from .rules import Estimate
from .steps import Steps


class GrowingSession(TreeSession):
    """Greedy. In each round: begin with what others propose; make steps of the draft model while the controller says
    so; of all candidates the engine verifies those that pay."""

    most = MOST_NODES

    def __init__(
        self,
        context: DraftContext,
        model: Steps,
        control: Controller,
        others: Joining | None = None,
        estimate: Estimate | None = None,
    ) -> None:
        """
        Args:
            model: drafts, and tells times to the controller's cost.
            others: whose tokens stand in the same trees.
            estimate: of the draft model's first candidates; None for the chances that it gives them itself.
        """
        super().__init__(context, control.acceptance, others)
        self.control, self.estimate = control, estimate
        self.weighs |= control.fixed is not None  # what was asked for is drafted
        self.model, self.features = model, model.features
        self.drafted: list[list[int]] = []
        """[B] the draft model's chain"""
        self._own: list[set[int]] = []
        """[B] the nodes that nobody else had proposed"""
        self._rows: Sequence[int] = []
        self._active: list[int] = []
        """rows that may draft; others of a lockstep batch are finished"""
        self._left = 1

    def observe_prompt(self, verdict: Verdict) -> None:
        super().observe_prompt(verdict)
        self.model.observe_prompt(verdict)

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        self.begin(len(room))
        self._active, self._rows = [b for b, most in enumerate(room) if most > 0], sequences.rows
        self.drafted, self._own = [[] for _ in room], [set() for _ in room]
        self._left = self.context.max_length - max(sequences.lengths)  # of the longest row: all of them read the prompt
        if self.others is not None:
            self.others.join(self.trees, sequences, room)
        self._draft_on(sequences, room)
        return self.draft()

    # ------------------------------------------------------------------ the draft model

    def _draft_on(self, sequences: Sequences, room: list[int]) -> None:
        """Steps of the draft model, while they promise to pay."""
        model, tips = self.model, [-1 if limit > 0 else None for limit in room]
        most = min(self.control.longest, max(room), model.room(sequences))
        planned = self.control.plan(self._said(tips), most, enough=most if model.blind else 1)
        if planned == 0:
            return
        if model.at_once and self.control.fixed is None:
            planned = most
        if self.estimate is not None:
            self.estimate.begin(sequences)
        model.begin(sequences, most, planned if model.blind and self.estimate is None else 0)
        unread = []
        while model.steps < (planned if model.blind else most):
            tokens, chances = self._step()
            if model.blind:
                unread.append((tokens, chances))
                continue
            tips = self._grow(tips, to_host(tokens), to_host(chances), room)
            if all(tip is None for tip in tips) or not self.control.goes_on(self._said(tips)):
                break
        if unread:
            self._grow_at_once(tips, unread, room)
        model.end()

    def _step(self) -> tuple[Tensor, Tensor]:
        """Candidates [B, k] of one more place, and what is estimated of each."""
        step = self.model.step()
        assert step.chances is not None
        if self.estimate is not None and step.logits is not None:
            step.chances[:, 0] = step.chances.new_tensor(self.estimate.of(step.logits, step.tokens[:, 0], None))
        return step.tokens, step.chances

    def _grow_at_once(
        self, tips: Sequence[int | None], steps: Sequence[tuple[Tensor, Tensor]], room: list[int]
    ) -> None:
        """Read all steps in one transfer, and add them."""
        tokens = torch.stack([tokens for tokens, _ in steps]).float()  # exact for ids below 2^24
        chances = torch.stack([chances for _, chances in steps]).float()
        named, likely = to_host(torch.stack([tokens, chances]))
        named = [[list(map(int, row)) for row in place] for place in named]
        for found in zip(named, likely, strict=True):
            tips = self._grow(tips, *found, room)
        for b in self._active if self.model.independent else ():
            self._grow_aside(b, [place[b] for place in named[: room[b]]], [place[b] for place in likely[: room[b]]])

    def _grow(
        self,
        tips: Sequence[int | None],
        tokens: Sequence[Sequence[int]],
        chances: Sequence[Sequence[float]],
        room: list[int],
    ) -> list[int | None]:
        """Add a step's candidates [B, k] behind each row's last drafted token; None where a row drafts no more."""
        on: list[int | None] = []
        for b, tip in enumerate(tips):
            if tip is None:
                on.append(None)
                continue
            first, agrees = tokens[b][0], self._told(self.trees[b], tip, tokens[b][0])
            node, *_ = [
                self._add(b, tip, token, chance, rank, agrees)
                for rank, (token, chance) in enumerate(zip(tokens[b], chances[b], strict=True))
                if rank == 0 or chance > 0
            ]
            self.drafted[b].append(first)
            ended = first in self.context.eos_token_ids or len(self.drafted[b]) >= room[b]
            on.append(None if ended else node)
            if not ended and self.others is not None:
                self.others.join_behind(self.trees[b], node, self._rows[b], room[b])
        return on

    def _grow_aside(self, b: int, tokens: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]) -> None:
        """Of places whose candidates [γ, k] are the same behind anything, with chances [γ, k], the likeliest paths."""
        tree, ends = self.trees[b], self.context.eos_token_ids
        seen = [[seen_at(rank, chance) for rank, chance in enumerate(row)] for row in chances]
        likely = [
            [self.acceptance.calibrated(here) if chance else 0.0 for here, chance in zip(*place, strict=True)]
            for place in zip(seen, chances, strict=True)
        ]
        found: list[int] = []
        for _, (above, i, rank) in likeliest_nodes(
            likely, MOST_NODES, lambda at: tokens[at.place][at.rank] not in ends
        ):
            parent, token = found[above] if above >= 0 else -1, tokens[i][rank]
            node = tree.at.get((parent, token))
            if node is None:
                node = tree.add(parent, token, likely[i][rank], seen[i][rank])
                self._own[b].add(node)
            found.append(node)

    def _add(self, b: int, tip: int, token: int, chance: float, rank: int, agrees: bool | None) -> int:
        mean = Evidence.of(DRAFTED, rank)
        here = seen_at(rank, chance)._replace(agrees=agrees)
        known = self.trees[b].at.get((tip, token))
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

    # ------------------------------------------------------------------ what the controller and the engine are told

    def _said(self, tips: Sequence[int | None]) -> Drafted:
        """What stands in the trees, whose rows would go on at these nodes; None for those that do not."""
        chances = [[chance for _, chance in self.ranked(b)] for b in self._active]
        onward = [onward_from(self.trees[b], tips[b]) for b in self._active]
        return Drafted(self._rows, chances, onward, self.model.steps, self.model.unread, self._left)

    def draft(self) -> Draft:
        draft = super().draft()
        if self.control.fixed is not None and any(self.drafted):  # what was asked for is verified
            draft.survival = None
        return draft

    def ranked(self, row: int) -> list[tuple[int, float]]:
        """Where a number of tokens was asked for, they come first, and of the others those that pay."""
        likeliest = super().ranked(row)
        if self.control.fixed is None or not (chain := self.trees[row].along(self.drafted[row])):
            return likeliest
        cost, rows = self.context.cost, len(self.trees)
        chances = [[chance for _, chance in likeliest]]
        if (count := cost.tried(rows)) is None or (not count and cost.known):  # behind a chain no round is plain
            count, _ = most_per_second(chances, cost.round(rows), most=cost.most(rows))
        paying = likeliest[:count] if self.context.trees else []
        return [(node, 1.0) for node in chain] + [found for found in paying if found[0] not in chain]

    def observe(self, verdict: Verdict) -> None:
        kept = [0] * len(verdict.rows)
        if any(self.drafted):
            told = zip(self.trees, self._own, verdict.tokens, verdict.accepted, strict=True)
            kept = [len(own.intersection(tree.along(text[:n]))) for tree, own, text, n in told]
            same = zip(self.drafted, verdict.tokens, strict=True)
            self.model.observe(verdict, [agreeing(mine, text[:-1]) for mine, text in same])
        else:
            self.model.observe(verdict, kept)
        self.control.observe(kept, verdict)
        self.drafted = []
        super().observe(verdict)

    def close(self) -> None:
        super().close()
        self.context.stats.notes += self.control.notes()


def seen_at(rank: int, chance: float) -> Evidence:
    """A candidate of this rank, to which the draft model gives such a chance."""
    return Evidence.of(DRAFTED, min(rank, 1)).at(chance)


def agreeing(drafted: Sequence[int], text: Sequence[int]) -> int:
    """Leading tokens of a chain that are part of the text."""
    same = [a == b for a, b in zip(drafted, text, strict=False)]
    return same.index(False) if False in same else len(same)
