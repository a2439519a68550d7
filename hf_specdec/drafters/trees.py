"""`TreeSession`: a tree of tokens per row, from sources that need no model and from the steps of one."""

from collections.abc import Sequence

import torch

from ..budget import DRAFTED, MOST_NODES, Acceptance, Controller, Drafted, Evidence, Tree
from ..protocol import Draft, DraftContext, Runner, Sequences, Verdict
from ..session import DraftSession
from ..transfer import to_device, to_host
from .nodes import Node, likeliest_nodes, tested_behind
from .sources import Source, named
from .steps import Step, Steps

MANY = 8
"""Rows of a batch from which on the engine may also pause drafting altogether (`DraftSession.weighs`). Thinking of
tokens for so many rows takes a noticeable part of a round, even where none of them is verified."""
CONTINUED = 8
"""nodes of a product behind which sources are asked"""


class TreeSession(DraftSession):
    """In each round: begin with what sources propose; make steps of the model while the controller says so; offer all
    nodes, the likeliest first, of which the engine verifies those that pay.

    A token that several propose is one node. Every node teaches its chance, verified or not: the text shows whether it
    was right.
    """

    def __init__(
        self,
        context: DraftContext,
        acceptance: Acceptance,
        sources: Sequence[Source] = (),
        steps: Steps | None = None,
        control: Controller | None = None,
        seen: bool = True,
        most: int | None = None,
    ) -> None:
        """
        Args:
            acceptance: how often tokens with the same evidence were right.
            sources: of tokens that join the same trees.
            steps: of a model, which tells times to the controller's cost.
            control: says how many steps are made; None without steps.
            seen: whether it is read what steps say before nodes are chosen. Where that is to wait for an accelerator it
                is done only in rounds in which sources propose something: else a candidate's chance is how often those
                of its rank were right.
            most: nodes that a row offers at most; None for all.
        """
        super().__init__(context)
        self.acceptance, self.sources, self.steps, self.control = acceptance, sources, steps, control
        self.seen, self.most = seen, most
        self.weighs = context.rows < MANY or context.most_rows > 0 or self.fixed is not None or not seen
        self.features, self.slots_per_token = ((), 1) if steps is None else (steps.features, steps.slots_per_token)
        self.likeliest = max((source.likeliest for source in sources), default=0)
        self.drawn = "none" if steps is None else steps.name
        """in the statistics, the source of tokens that are no source's"""
        self.several = len(sources) + (steps is not None) > 1
        """whether the statistics count who proposes"""
        self.active: list[int] = []
        """rows that may draft; others of a lockstep batch are finished"""
        self.trees: list[Tree] = []
        """[B] all tokens of this round"""
        self.ordered: list[list[int]] = []
        """[B] the nodes that each row offers, the likeliest first"""
        self.drafted: list[list[int]] = []
        """[B] the chain of the model's first candidates, where its steps go on from them"""
        self.own: list[set[int]] = []
        """[B] the model's nodes that nobody else had proposed"""
        self.unseen: list[Node] = []
        """of every row, where they were chosen before anybody had seen what they say"""

    @property
    def fixed(self) -> int | None:
        """Steps of each round, where the user has set them."""
        return None if self.control is None else self.control.fixed

    def runner(self, runner: Runner) -> Runner:
        return runner if self.steps is None else self.steps.runner(runner)

    def observe_prompt(self, verdict: Verdict) -> None:
        for source in self.sources:
            source.observe_prompt(verdict)
        if self.steps is not None:
            self.steps.observe_prompt(verdict)

    # ------------------------------------------------------------------ a round

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        self.begin(sequences, room)
        draft = None
        if self.steps is not None and self.control is not None:
            draft = self._step_on(self.steps, self.control, sequences, room)
        return self.draft() if draft is None else draft

    def begin(self, sequences: Sequences, room: list[int]) -> None:
        """A round begins, with what sources propose behind each row's text."""
        self.trees, self.ordered, self.unseen = [Tree() for _ in room], [], []
        self.drafted, self.own = [[] for _ in room], [set() for _ in room]
        self.active = [b for b, limit in enumerate(room) if limit > 0]
        for source in self.sources:
            source.join(self.trees, sequences, room)

    def _step_on(self, steps: Steps, control: Controller, sequences: Sequences, room: list[int]) -> Draft | None:
        """Steps of the model, while they promise to pay. A draft, where its nodes were chosen unseen."""
        tips = [-1 if limit > 0 else None for limit in room]
        most = min(max(room), steps.room(sequences))
        most = most if steps.at_once else min(most, control.longest)
        planned = control.plan(self.said(steps, sequences, tips), most, enough=most if steps.blind else 1)
        served = [limit > 0 and steps.serves(row) for row, limit in zip(sequences.rows, room, strict=True)]
        if planned == 0 or not any(served):
            steps.rest(sequences, wanted=planned > 0)
            return None
        tips = [-1 if here else None for here in served]
        if steps.at_once and control.fixed is None:
            planned = most
        steps.begin(sequences, most, planned if steps.blind else 0)
        if steps.blind:
            several = [steps.step() for _ in range(planned)]
            steps.end()
            if not (self.seen or any(map(len, self.trees))):
                return self._unseen(several, served)
            self._grow_at_once(tips, several, sequences, room)
            return None
        while steps.steps < most:
            step = steps.step()
            assert step.chances is not None
            chances = to_host(step.chances)
            if step.said is not None:
                chances = [[first, *row[1:]] for first, row in zip(step.said, chances, strict=True)]
            tips = self._grow(tips, to_host(step.tokens), chances, sequences, room)
            if all(tip is None for tip in tips) or not control.goes_on(self.said(steps, sequences, tips)):
                break
        steps.end()
        return None

    def said(self, steps: Steps, sequences: Sequences, tips: Sequence[int | None]) -> Drafted:
        """What stands in the trees, whose rows would go on at these nodes; None for those that do not."""
        chances = [[chance for _, chance in self.ranked(b)] for b in self.active]
        onward = [_onward(self.trees[b], tips[b]) for b in self.active]
        left = self.context.max_length - max(sequences.lengths)  # of the longest row: all of them read the prompt
        return Drafted(sequences.rows, chances, onward, steps.steps, steps.unread, left)

    # ------------------------------------------------------------------ nodes of which it is seen what they say

    def _grow_at_once(
        self, tips: Sequence[int | None], steps: Sequence[Step], sequences: Sequences, room: list[int]
    ) -> None:
        """Read all steps in one transfer, and add them."""
        tokens = torch.stack([step.tokens for step in steps]).float()  # exact for ids below 2^24
        chances = torch.stack([step.chances for step in steps if step.chances is not None]).float()
        named, likely = to_host(torch.stack([tokens, chances.to(tokens.device)]))
        named = [[list(map(int, row)) for row in place] for place in named]
        if self.steps is not None and self.steps.independent:
            for b, tip in enumerate(tips):
                if tip is not None:
                    tokens_of, chances_of = ([place[b] for place in told[: room[b]]] for told in (named, likely))
                    self._grow_product(b, tokens_of, chances_of, sequences.rows[b], room[b])
            return
        for found in zip(named, likely, strict=True):
            tips = self._grow(tips, *found, sequences, room)

    def _grow(
        self,
        tips: Sequence[int | None],
        tokens: Sequence[Sequence[int]],
        chances: Sequence[Sequence[float]],
        sequences: Sequences,
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
                self._add(b, tip, token, 0, rank, chance, agrees)
                for rank, (token, chance) in enumerate(zip(tokens[b], chances[b], strict=True))
                if rank == 0 or chance > 0
            ]
            self.drafted[b].append(first)
            ended = first in self.context.eos_token_ids or len(self.drafted[b]) >= room[b]
            on.append(None if ended else node)
            if not ended:
                self.ask_behind(self.trees[b], node, sequences.rows[b], room[b])
        return on

    def _grow_product(
        self, b: int, tokens: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], row: int, room: int
    ) -> None:
        """Of places whose candidates [γ, k] are the same behind anything, with chances [γ, k], the likeliest paths."""
        assert self.steps is not None
        likely = [
            [self._calibrated(place, rank, chance) for rank, chance in enumerate(each)]
            for place, each in enumerate(chances)
        ]
        found: list[int] = []
        ends = self.context.eos_token_ids
        for _, at in likeliest_nodes(likely, MOST_NODES, lambda at: tokens[at.place][at.rank] not in ends):
            parent, token = found[at.parent] if at.parent >= 0 else -1, tokens[at.place][at.rank]
            found.append(self._add(b, parent, token, at.place, at.rank, chances[at.place][at.rank]))
        for node in found[:CONTINUED]:
            if self.trees[b].tokens[node] not in ends:
                self.ask_behind(self.trees[b], node, row, room)

    def _add(
        self, b: int, parent: int, token: int, place: int, rank: int, chance: float, agrees: bool | None = None
    ) -> int:
        """A candidate of the model's, to which it gives such a chance."""
        assert self.steps is not None
        tree, said = self.trees[b], self.steps.said(place, rank, chance)._replace(agrees=agrees)
        evidence = dict.fromkeys([Evidence.of(DRAFTED, rank), self.steps.evidence(place, rank), said])
        here = (parent, token) in tree.at
        node = tree.add(parent, token, self.acceptance.calibrated(said), *evidence)
        if not here:
            self.own[b].add(node)
        return node

    def _calibrated(self, place: int, rank: int, chance: float) -> float:
        assert self.steps is not None
        return self.acceptance.calibrated(self.steps.said(place, rank, chance)) if chance else 0.0

    def _told(self, tree: Tree, tip: int, token: int) -> bool | None:
        """Whether others say the same here; None where they say nothing. From now on they are judged by whether the
        model agrees."""
        others: bool | None = None
        for node in tree.children(tip):
            agrees = tree.tokens[node] == token
            others = agrees or others is True
            evidence, base = tree.evidence[node][0]._replace(agrees=agrees), tree.chances[node]
            tree.evidence[node] = (evidence,)
            tree.chances[node] = self.acceptance.chance(evidence, 1 - 0.3 * (1 - base) if agrees else 0.5 * base)
        return others

    def ask_behind(self, tree: Tree, node: int, row: int, room: int) -> None:
        """What sources propose behind a node of a row's tree."""
        for source in self.sources:
            source.join_behind(tree, node, row, room)

    # ------------------------------------------------------------------ nodes that nobody has seen

    def _unseen(self, steps: Sequence[Step], served: Sequence[bool]) -> Draft:
        """The likeliest nodes of every row, by how often candidates of such a place and rank were right."""
        assert self.steps is not None
        model, tokens = self.steps, torch.stack([step.tokens for step in steps], 1)
        k = tokens.shape[2]
        chances = [
            [self.acceptance.chance(model.evidence(place, rank), model.guess(place, rank)) for rank in range(k)]
            for place in range(len(steps))
        ]
        likeliest = likeliest_nodes(chances, MOST_NODES, lambda node: model.independent or node.rank == 0)
        likeliest = likeliest[: self.most]
        self.unseen = [node for _, node in likeliest]
        index = to_device([node.place * k + node.rank for node in self.unseen], tokens.device)
        # The engine ends a row before the first node that is deeper than it has room for.
        draft = Draft(tokens.flatten(1)[:, index], [len(self.unseen) if here else 0 for here in served])
        draft.parents = None if k == 1 else [[node.parent for node in self.unseen]] * len(served)
        if self.fixed is None:
            draft.survival = [[chance for chance, _ in likeliest]] * len(served)
        draft.sources = [self.drawn] * len(served) if self.several else []
        return draft

    def _observe_unseen(self, verdict: Verdict) -> None:
        """Behind every accepted node, which of the nodes that were verified there was right. Where a node without
        logits ended the row, nothing was verified behind it."""
        assert self.steps is not None
        looked = None if verdict.nodes is None else [set(row) for row in to_host(verdict.nodes)]
        for b, path in enumerate(verdict.paths if self.unseen and verdict.draft is not None else ()):
            if verdict.stopped[b] or verdict.draft is None or not (length := verdict.draft.lengths[b]):
                continue
            accepted = list(zip([-1, *path], [*path, None], strict=True))
            if looked is not None and path and path[-1] not in looked[b]:
                accepted.pop()
            for node, right in tested_behind(self.unseen[:length], accepted):
                for evidence in {self.steps.evidence(node.place, node.rank), Evidence.of(DRAFTED, node.rank)}:
                    self.acceptance.observe(evidence, right)

    # ------------------------------------------------------------------ what is offered

    def ranked(self, row: int) -> list[tuple[int, float]]:
        """A row's nodes in the order in which they would be verified, with their chances to survive. Where a number of
        steps was asked for, their chain comes first."""
        tree = self.trees[row]
        likeliest = (tree.ranked() if self.context.trees else tree.chain())[: self.most]
        if not (chain := self._asked_for(row)):
            return likeliest
        survival, beside = tree.survival(), likeliest if self.context.trees else []
        return [(node, survival[node]) for node in chain] + [found for found in beside if found[0] not in chain]

    def _asked_for(self, row: int) -> list[int]:
        """The nodes of a row that are verified whether they pay or not."""
        return [] if self.fixed is None else self.trees[row].along(self.drafted[row])

    def draft(self) -> Draft:
        """The trees' nodes as point masses with their chances, of which the engine verifies those that pay."""
        ranked = [self.ranked(b) for b in range(len(self.trees))]
        self.ordered = [[node for node, _ in row] for row in ranked]
        cut = [tree.cut(nodes) for tree, nodes in zip(self.trees, self.ordered, strict=True)]
        draft = Draft.from_trees(cut, self.context.device)
        if self.fixed is None or any(self.drafted) or not any(self.own):
            draft.survival = [[chance for _, chance in row] for row in ranked]
            draft.least = [len(self._asked_for(b)) for b in range(len(ranked))]
        if self.several:
            draft.sources = self.named(self.ordered)
        return draft

    def named(self, nodes: Sequence[Sequence[int]]) -> list[str]:
        """[B] who proposes these nodes of each row's tree, for the statistics."""
        return named(self.trees, nodes, {source.name: source.kind for source in self.sources}, self.drawn)

    # ------------------------------------------------------------------ what became of it

    def observe(self, verdict: Verdict) -> None:
        if self.steps is not None and self.control is not None:
            self._observe_unseen(verdict)
            told = zip(self.trees, self.own, verdict.tokens, verdict.accepted, strict=bool(self.trees))
            kept = [len(own.intersection(tree.along(text[:n]))) for tree, own, text, n in told]
            kept = verdict.accepted if self.unseen else kept or [0] * len(verdict.rows)
            same = zip(self.drafted, verdict.tokens, strict=bool(self.drafted))
            self.steps.observe(verdict, [agreeing(mine, text[:-1]) for mine, text in same] or kept)
            self.control.observe(kept, verdict)
        self.acceptance.observe_trees(self.trees, verdict.tokens)
        self.trees, self.ordered, self.drafted, self.own, self.unseen = [], [], [], [], []
        for source in self.sources:
            source.observe(verdict)

    def close(self) -> None:
        for source in self.sources:
            source.close()
        if self.steps is not None and self.control is not None:
            self.context.stats.notes += [*self.steps.notes(), *self.control.notes()]


def agreeing(drafted: Sequence[int], text: Sequence[int]) -> int:
    """Leading tokens of a chain that are part of the text."""
    same = [a == b for a, b in zip(drafted, text, strict=False)]
    return same.index(False) if False in same else len(same)


def _onward(tree: Tree, tip: int | None) -> float:
    """The chance to get behind this node, and that nobody says yet what is right there; 0 for no node."""
    if tip is None:
        return 0.0
    told = sum(tree.chances[node] for node in tree.children(tip))
    here = tree.survival()[tip] if tip >= 0 else 1.0
    return here * max(0.0, 1 - told)
