"""`TreeSession`: a tree of tokens per row, from sources that need no model and from the steps of one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..budget import MOST_NODES, Acceptance, Candidate, Controller, Drafted, Evidence, Tree
from ..protocol import Draft, DraftContext, Runner, Sequences, Verdict
from ..session import DraftSession
from ..transfer import to_device, to_host
from .nodes import Node, likeliest_nodes, tested_behind
from .sources import Forced, Source, named
from .steps import Several, Step, Steps

MANY = 8
"""Rows of a batch from which on the engine may also pause drafting altogether (`DraftSession.weighs`). Thinking of
tokens for so many rows takes a noticeable part of a round, even where none of them is verified."""
CONTINUED = 8
"""nodes of a product behind which sources are asked"""

Kinds = tuple[Sequence[Sequence[Evidence]], Sequence[Evidence]]
"""Of a place's candidates, what they are counted under whatever their chances are, and what speaks for them beside
those."""


@dataclass
class Growth:
    """What a row drafts in a round."""

    row: int
    """its index in the call"""
    room: int
    """tokens that it may draft, one below the other; 0 where it is finished"""
    tree: Tree
    """all tokens that were thought of"""
    tip: int | None
    """the node behind which the model goes on; None where it drafts no more"""
    chain: list[int] = field(default_factory=list)
    """the model's first candidates, where its steps go on from them"""
    own: set[int] = field(default_factory=set)
    """the model's nodes that nobody else had proposed"""
    offered: list[int] = field(default_factory=list)
    """nodes in the order in which they are verified"""


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
        if context.grammar is not None:
            sources = [*sources, Forced(context.grammar, acceptance, tuple(sources))]
        self.acceptance, self.sources, self.steps, self.control = acceptance, sources, steps, control
        self.fixed = None if control is None else control.fixed
        """steps of each round, where the user has set them"""
        self.seen, self.most = seen, most
        self.weighs = context.rows < MANY or context.most_rows > 0 or self.fixed is not None or not seen
        self.features, self.slots_per_token = ((), 1) if steps is None else (steps.features, steps.slots_per_token)
        self.likeliest = max((source.likeliest for source in sources), default=0)
        self.drawn = "none" if steps is None else steps.name
        """in the statistics, the source of tokens that are no source's"""
        self.several = len(sources) + (steps is not None) > 1
        """whether the statistics count who proposes"""
        self.grown: list[Growth] = []
        """[B] of this round"""
        self.unseen: list[Node] = []
        """of every row, where they were chosen before anybody had seen what they say"""

    @property
    def trees(self) -> list[Tree]:
        """[B] of this round."""
        return [each.tree for each in self.grown]

    @property
    def spent(self) -> float:  # type: ignore[override]
        return 0.0 if self.steps is None else self.steps.cost.of(self.steps.steps)

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
            draft = self._step_on(self.steps, self.control, sequences)
        return self.draft() if draft is None else draft

    def begin(self, sequences: Sequences, room: list[int]) -> None:
        """A round begins, with what sources propose behind each row's text."""
        self.unseen, tips = [], [-1 if most > 0 else None for most in room]
        self.grown = [Growth(*each) for each in zip(sequences.rows, room, [Tree() for _ in room], tips, strict=True)]
        for source in self.sources:
            source.join(self.trees, sequences, room)

    def _step_on(self, steps: Steps, control: Controller, sequences: Sequences) -> Draft | None:
        """Steps of the model, while they promise to pay. A draft, where its nodes were chosen unseen."""
        most = min(max(each.room for each in self.grown), steps.room(sequences))
        most = most if steps.at_once else min(most, control.longest)
        planned = control.plan(self.said(steps, sequences), most, enough=most if steps.blind else 1)
        for each in self.grown:
            each.tip = -1 if each.room > 0 and steps.serves(each.row) else None
        if planned == 0 or not self._drafts_on:
            steps.rest(sequences, wanted=planned > 0)
            return None
        if steps.at_once and control.fixed is None:
            planned = most
        steps.begin(sequences, most, planned if steps.blind else 0)
        if steps.blind:
            several = steps.several(planned)
            steps.end()
            if not (self.seen or any(map(len, self.trees))):
                return self._unseen(several)
            self._grow_at_once(several)
            return None
        while steps.steps < most:
            self._grow_by(steps.step())
            if not self._drafts_on or not control.goes_on(self.said(steps, sequences)):
                break
        steps.end()
        return None

    @property
    def _drafts_on(self) -> bool:
        """Whether the model may go on in any row."""
        return any(each.tip is not None for each in self.grown)

    def said(self, steps: Steps, sequences: Sequences) -> Drafted:
        """What stands in the trees of the rows that may draft, and what may come behind their tips."""
        active = [each for each in self.grown if each.room > 0]
        chances = [[chance for _, chance in self.ranked(each)] for each in active]
        onward = [_onward(each) for each in active]
        left = self.context.max_length - max(sequences.lengths)  # of the longest row: all of them read the prompt
        return Drafted(sequences.rows, chances, onward, steps.steps, steps.unread, left)

    # ------------------------------------------------------------------ nodes of which it is seen what they say

    def _grow_by(self, step: Step) -> None:
        """Add a step's candidates behind each row's tip."""
        assert step.chances is not None
        chances = to_host(step.chances)
        if step.said is not None:
            chances = [[first, *row[1:]] for first, row in zip(step.said, chances, strict=True)]
        kinds = self._kinds(0, step.tokens.shape[1])
        for each, tokens, likely in zip(self.grown, to_host(step.tokens), chances, strict=True):
            self._grow(each, tokens, likely, kinds)

    def _grow_at_once(self, steps: Several) -> None:
        """Read all steps in one transfer, and add them."""
        assert steps.chances is not None
        # Ids below 2^24 are exact.
        named, likely = to_host(torch.stack([steps.tokens.float(), steps.chances.float().to(steps.tokens.device)]))
        whole = self.steps is not None and self.steps.independent
        made, count = steps.tokens.shape[1:]
        kinds = [self._kinds(place, count) for place in range(made if whole else 1)]
        for each, said, told in zip(self.grown, named, likely, strict=True):
            places = [list(map(int, row)) for row in said[: each.room]]
            if whole:
                self._grow_product(each, places, told[: each.room], kinds)
                continue
            for tokens, chances in zip(places, told, strict=False):
                self._grow(each, tokens, chances, kinds[0])

    def _kinds(self, place: int, count: int) -> Kinds:
        """Of so many candidates."""
        assert self.steps is not None
        ranks = range(count)
        return [self.steps.evidence(place, rank) for rank in ranks], [self.steps.said(place, rank) for rank in ranks]

    def _grow(self, each: Growth, tokens: Sequence[int], chances: Sequence[float], kinds: Kinds) -> None:
        """Add candidates [k] behind a row's tip; the first one is the tip from now on, if the row drafts on."""
        if each.tip is None:
            return
        tree, first, candidates = each.tree, tokens[0], list[Candidate]()
        agrees = self._told(tree, each.tip, first)
        unseen, sources = kinds
        judged = self.acceptance.calibrated(sources, chances, agrees)
        for token, chance, evidence, (said, right) in zip(tokens, chances, unseen, judged, strict=True):
            if chance > 0 or token == first:
                candidates.append((token, right, (*evidence, said)))
        each.own.update(tree.add_all(each.tip, candidates))
        each.chain.append(first)
        node = tree.at[each.tip, first]
        ended = first in self.context.eos_token_ids or len(each.chain) >= each.room
        each.tip = None if ended else node
        if not ended:
            self.ask_behind(each, node, each.chain)

    def _grow_product(
        self,
        each: Growth,
        tokens: Sequence[Sequence[int]],
        chances: Sequence[Sequence[float]],
        kinds: Sequence[Kinds],
    ) -> None:
        """Of places whose candidates [γ, k] are the same behind anything, with chances [γ, k], the likeliest paths."""
        if each.tip is None:
            return
        said = [self.acceptance.calibrated(sources, place) for place, (_, sources) in zip(chances, kinds, strict=False)]
        likely = [
            [right * (p > 0) for p, (_, right) in zip(place, judged, strict=True)]
            for place, judged in zip(chances, said, strict=True)
        ]
        found: list[int] = []
        ends = self.context.eos_token_ids
        for _, (above, i, rank) in likeliest_nodes(
            likely, MOST_NODES, lambda at: tokens[at.place][at.rank] not in ends
        ):
            parent, (estimate, right) = found[above] if above >= 0 else -1, said[i][rank]
            candidate = tokens[i][rank], right, (*kinds[i][0][rank], estimate)
            each.own.update(each.tree.add_all(parent, [candidate]))
            found.append(each.tree.at[parent, tokens[i][rank]])
        for node in found[:CONTINUED]:
            if each.tree.tokens[node] not in ends:
                self.ask_behind(each, node, each.tree.text(node))

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

    def ask_behind(self, each: Growth, node: int, path: Sequence[int]) -> None:
        """What sources propose behind a node of a row's tree, whose tokens down to it are `path`."""
        for source in self.sources if len(path) < each.room else ():
            source.join_behind(each.tree, node, path, each.row, each.room - len(path))

    # ------------------------------------------------------------------ nodes that nobody has seen

    def _unseen(self, steps: Several) -> Draft:
        """The likeliest nodes of every row, by how often candidates of such a place and rank were right."""
        assert self.steps is not None
        model, tokens = self.steps, steps.tokens
        made, k = tokens.shape[1:]
        chances = [
            [self.acceptance.chance(model.evidence(place, rank)[-1], model.guess(place, rank)) for rank in range(k)]
            for place in range(made)
        ]
        likeliest = likeliest_nodes(chances, MOST_NODES, lambda node: model.independent or node.rank == 0)
        likeliest = likeliest[: self.most]
        self.unseen = [node for _, node in likeliest]
        index = to_device([node.place * k + node.rank for node in self.unseen], tokens.device)
        # The engine ends a row before the first node that is deeper than it has room for.
        rows, lengths = len(self.grown), [0 if each.tip is None else len(self.unseen) for each in self.grown]
        draft = Draft(tokens.flatten(1)[:, index], lengths)
        draft.parents = None if k == 1 else [[node.parent for node in self.unseen]] * rows
        if self.fixed is None:
            draft.survival = [[chance for chance, _ in likeliest]] * rows
        draft.sources = [self.drawn] * rows if self.several else []
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
                for evidence in self.steps.evidence(node.place, node.rank):
                    self.acceptance.observe(evidence, right)

    # ------------------------------------------------------------------ what is offered

    def ranked(self, each: Growth) -> list[tuple[int, float]]:
        """A row's nodes in the order in which they would be verified, with their chances to survive. Where a number of
        steps was asked for, their chain comes first."""
        tree = each.tree
        likeliest = (tree.ranked() if self.context.trees else tree.chain())[: self.most]
        if self.fixed is None or not (chain := tree.along(each.chain)):
            return likeliest
        survival, beside = tree.survival(), likeliest if self.context.trees else []
        return [(node, survival[node]) for node in chain] + [found for found in beside if found[0] not in chain]

    def draft(self) -> Draft:
        """The trees' nodes as point masses with their chances, of which the engine verifies those that pay."""
        ranked = [self.ranked(each) for each in self.grown]
        for each, found in zip(self.grown, ranked, strict=True):
            each.offered = [node for node, _ in found]
        draft = Draft.from_trees([each.tree.cut(each.offered) for each in self.grown])
        asked_for = [0 if self.fixed is None else len(each.tree.along(each.chain)) for each in self.grown]
        if self.fixed is None or any(asked_for) or not any(each.own for each in self.grown):
            draft.survival, draft.least = [[chance for _, chance in found] for found in ranked], asked_for
        if self.several:
            draft.sources = self.named([each.offered for each in self.grown])
        return draft

    def named(self, nodes: Sequence[Sequence[int]]) -> list[str]:
        """[B] who proposes these nodes of each row's tree, for the statistics."""
        return named(self.trees, nodes, {source.name: source.kind for source in self.sources}, self.drawn)

    # ------------------------------------------------------------------ what became of it

    def observe(self, verdict: Verdict) -> None:
        if self.steps is not None and self.control is not None:
            self._observe_steps(self.steps, self.control, verdict)
        self.acceptance.observe_trees(self.trees, verdict.tokens)
        self.grown, self.unseen = [], []
        for source in self.sources:
            source.observe(verdict)

    def _observe_steps(self, steps: Steps, control: Controller, verdict: Verdict) -> None:
        self._observe_unseen(verdict)
        kept = first = verdict.accepted if self.unseen else [0] * len(verdict.rows)
        if self.grown and not self.unseen:
            told = list(zip(self.grown, verdict.tokens, verdict.accepted, strict=True))
            kept = [len(each.own.intersection(each.tree.along(text[:n]))) for each, text, n in told]
            first = [agreeing(each.chain, text[:-1]) for each, text, _ in told]
        steps.observe(verdict, first)
        control.observe(kept, verdict)

    def close(self) -> None:
        for source in self.sources:
            source.close()
        if self.steps is not None and self.control is not None:
            self.context.stats.notes += [*self.steps.notes(), *self.control.notes()]


def agreeing(drafted: Sequence[int], text: Sequence[int]) -> int:
    """Leading tokens of a chain that are part of the text."""
    same = [a == b for a, b in zip(drafted, text, strict=False)]
    return same.index(False) if False in same else len(same)


def _onward(each: Growth) -> float:
    """The chance to get behind a row's tip, and that nobody says yet what is right there."""
    if each.tip is None:
        return 0.0
    tree, tip = each.tree, each.tip
    told = sum(map(tree.chances.__getitem__, tree.children(tip)))
    here = tree.survival()[tip] if tip >= 0 else 1.0
    return here * max(0.0, 1 - told)
