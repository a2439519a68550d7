"""`StreamingSession`: the streams of the last accepted token are the next tree."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...budget import (
    DRAFTED,
    MOST_NODES,
    Controller,
    Drafted,
    Evidence,
    Experience,
    Tree,
    are_chains,
    nodes_that_pay,
)
from ...clock import now
from ...protocol import Draft, DraftContext, Runner, Sequences, Verdict
from ...session import DraftSession
from ...transfer import to_device, to_host, waits
from ..prompt_lookup import Copies, PromptLookupConfig
from ..sources import Recycled, Sources
from ..trees import Node, draft_of, likeliest_nodes, onward_from, tested_behind
from .config import StreamingConfig
from .late import LateStreams, OwnLayers
from .runner import StreamRunner
from .streams import Streams
from .tree import joined, level_by_level
from .upper import Upper

BRANCHES = 3
"""Copies of earlier text that join the streams' tree."""
SUCCESSORS = 4
"""Recycled candidates that are remembered behind each token."""
CONTINUED = 8
"""Nodes of the streams after which other sources are asked."""


@dataclass
class Counts:
    """What became of a call's rounds and nodes."""

    rounds: int = 0
    rested: int = 0
    """rounds in which no tree promised to pay"""
    drafted: int = 0
    pruned: int = 0
    """nodes that were pruned in mid-forward"""


@dataclass
class LastDraft:
    """What was drafted, until the target has judged it."""

    nodes: Sequence[Sequence[Node | None]] = ()
    """[rows][nodes] of the streams; None for what others say"""
    trees: Sequence[Tree] = ()
    """[rows] with what joined them; empty where the nodes were chosen before their tokens were seen"""
    logits: Tensor | None = None
    """[rows, γ, K] of the streams"""
    offered: Sequence[Tree] = ()
    """[rows] of `trees`, what the other sources offer right behind the text"""


class StreamingSession(DraftSession):
    """Drafts a tree of each stream's likeliest tokens, those of stream j after those of stream j - 1. Copies of what
    followed the same words before, and what the target found likely there, may join it."""

    def __init__(
        self,
        context: DraftContext,
        config: StreamingConfig,
        streams: Streams,
        upper: Upper,
        experience: Experience,
        own: OwnLayers | None = None,
    ) -> None:
        """
        Args:
            own: what streams run through behind the verdict; None for streams that join the target's forwards.
        """
        super().__init__(context)
        self.config, self.streams, self.upper, self.own = config, streams, upper, own
        self.acceptance = experience.acceptance
        self.control = Controller(context, experience, candidates=config.num_candidates, longest=config.num_streams)
        """asked whether the streams' own pass pays: a draft of γ steps that are made at once"""
        if own is not None and config.num_nodes == "auto" and context.trees:
            self.weighs = True
        self.guesses = config.shares(context.do_sample)
        self.evidence = [
            [Evidence.of(f"stream {j}", rank) for rank in range(config.num_candidates)]
            for j in range(config.num_streams)
        ]
        """[γ][k] for a candidate, whatever chance its stream gives it"""
        self.drafted = [Evidence.of(DRAFTED, rank) for rank in range(config.num_candidates)]
        """[k] for one of any stream, by which the controller knows them"""
        self.slots_per_token = 1 + streams.gamma if own is None else 1
        self._runner: StreamRunner | LateStreams | None = None
        self.rows: list[int] = []
        self.ends: Tensor | None = None
        """[rows, γ, H] the streams of the last token of each row that the target has read; [rows, H] what they begin
        with where they have not run yet"""
        self.counts = Counts()
        self.rested = False
        """whether the last round's nodes, chosen before their tokens were seen, were none"""
        self.last = LastDraft()
        self.sources = self._sources(context)
        self.likeliest = self.sources.likeliest

    def _sources(self, context: DraftContext) -> Sources:
        """What joins the streams' tokens. On accelerators nothing is recycled: each round would wait for what the
        streams say."""
        if not (self.config.copies and context.trees):
            return Sources(self.config.drafter_type)
        copies = Copies(context, PromptLookupConfig(num_branches=BRANCHES), self.acceptance)
        recycled = None if waits(context.device) else Recycled(context, self.acceptance, SUCCESSORS)
        return Sources(self.config.drafter_type, copies, recycled=recycled)

    def runner(self, runner: Runner) -> Runner:
        if self.own is None:
            self._runner = StreamRunner(runner, self.streams, self.upper, self.config.prune_below)
        else:
            self._runner = LateStreams(runner, self.upper, self.own)
        return self._runner

    def observe_prompt(self, verdict: Verdict) -> None:
        self.sources.observe_prompt(verdict)
        self._look(verdict)

    def observe(self, verdict: Verdict) -> None:
        tested = None if verdict.nodes is None else [set(row) for row in to_host(verdict.nodes)]
        counts, last, self.last = self.counts, self.last, LastDraft()  # in a round without room nothing is proposed
        if tested is not None and verdict.draft is not None:
            for nodes, length in zip(tested, verdict.draft.lengths, strict=True):
                counts.pruned += length - sum(0 <= node < length for node in nodes)
        counts.drafted += sum(verdict.draft.lengths) if verdict.draft is not None else 0
        if last.trees:
            self.acceptance.observe_trees(last.trees, verdict.tokens)
            counts.rested += not any(verdict.drafted)
            told = zip(last.offered, verdict.tokens, verdict.accepted, strict=True)
            self.control.observe([n - len(tree.along(text[:n])) for tree, text, n in told], verdict)
        else:
            self._observe_unseen(verdict, last.nodes, tested)
        self.sources.observe(verdict)
        self._look(verdict)

    def _observe_unseen(
        self, verdict: Verdict, drafted: Sequence[Sequence[Node | None]], tested: Sequence[set[int]] | None
    ) -> None:
        """Behind every accepted node, which of the nodes that were verified there was right. Where a pruned node ended
        the row, none was verified behind it."""
        for b, nodes in enumerate(drafted):
            if verdict.draft is None or verdict.stopped[b]:
                continue
            path, kept = verdict.paths[b], nodes[: verdict.draft.lengths[b]]
            steps: list[tuple[int, int | None]] = list(zip([-1, *path], [*path, None], strict=True))
            if path and tested is not None and path[-1] not in tested[b]:
                steps.pop()
            for node, right in tested_behind(kept, steps):
                self.acceptance.observe(self.evidence[node.place][node.rank], right)

    def _look(self, verdict: Verdict) -> None:
        """Keep the streams at the node from which the target chose each row's last token, where that has any."""
        self.ends = None
        if self._runner is None:
            return
        self._runner.rides = False  # until a draft is asked for
        if (states := self._runner.states) is None:
            return
        found: list[tuple[int, int]] = []
        for b, (path, tokens) in enumerate(zip(verdict.paths or [[]] * len(verdict.rows), verdict.tokens, strict=True)):
            decided, at = path[: len(tokens) - 1], self._runner.at[b]
            fed = decided[-1] + 1 if decided else 0
            found += [(b, at.index(fed))] if fed in at else []
        if found:
            index = to_device(found, states.device)
            self.ends = states[index[:, 0], index[:, 1]]
            self.rows = [verdict.rows[b] for b, _ in found]

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        self.counts.rounds += 1
        offered = [Tree() for _ in room]
        self.sources.join(offered, sequences, room)
        told = any(map(len, offered))
        # Elsewhere to look at what streams say would be to wait for it.
        looks = told or (self.context.trees and not waits(self.context.device))
        nodes = [] if looks else self._unseen(len(room))
        if self._runner is not None:
            self._runner.rides = self._are_read(sequences, looks or bool(nodes))
        late = self.own is not None and self.ends is not None
        if late and looks and not self._pays(offered, sequences.rows, room):
            self.ends = None
        began = now()
        ends, foretold = self._ends_of(sequences.rows, room)
        if not told and (ends is None or not (looks or nodes)):
            self.counts.rested += 1
            rest = Draft.from_lists([[]] * len(room), self.context.device)
            return replace(rest, sources=[self.sources.drawn] * len(room))
        logits = None if ends is None else self.streams.head(self.upper, ends)
        if self.own is not None and logits is not None:
            seconds = now() - began
            self.control.cost.observe(self.streams.gamma, seconds, seconds)
        if looks or logits is None:
            return self._looked_at(logits, offered, sequences.rows, foretold)
        k = max(node.rank for node in nodes) + 1
        best = self.streams.named(logits.topk(k).indices).flatten(1)  # [rows, γ k]
        tokens = best[:, to_device([k * node.place + node.rank for node in nodes], best.device)]
        parents = [node.parent for node in nodes]
        self.last = LastDraft([nodes] * len(room), logits=logits)
        lengths = [len(nodes) if most else 0 for most in foretold]
        above = None if are_chains([parents]) else [parents] * len(room)
        return Draft(tokens, lengths, above, sources=[self.sources.drawn] * len(room))

    def _pays(self, offered: Sequence[Tree], rows: Sequence[int], room: list[int]) -> bool:
        """Whether the streams' own pass promises more than what the other sources offer alone."""
        if self.config.num_nodes != "auto":
            return True
        trees = [tree for tree, most in zip(offered, room, strict=True) if most > 0]
        chances = [[chance for _, chance in tree.ranked()] for tree in trees]
        onward = [onward_from(tree, -1) for tree in trees]
        gamma = min(self.streams.gamma, max(room))
        return self.control.plan(Drafted(rows, chances, onward), gamma, gamma) > 0

    def _are_read(self, sequences: Sequences, drafts: bool) -> bool:
        """Whether a next draft may read the streams of this round's forward.

        None does where the texts are full after this round. Where drafts rest unseen, the first rest is often a round
        that is timed; behind the second no draft is expected, and a draft that does come waits a round for streams.
        """
        rested, self.rested = self.rested, not drafts
        left = self.context.max_length - 1 - min(sequences.lengths)  # room of the emptiest row
        return left > 1 and (drafts or not rested)

    def _ends_of(self, rows: list[int], room: list[int]) -> tuple[Tensor | None, list[int]]:
        """[rows, γ, H] the streams behind each row's last token, and the room that they may fill: 0 in a row without
        streams, such as a new one before its first forward. None where no row has any."""
        if self.ends is None:
            return None, [0] * len(room)
        if rows != self.rows:
            known = {row: place for place, row in enumerate(self.rows)}
            room = [most if row in known else 0 for row, most in zip(rows, room, strict=True)]
            places = [known.get(row, 0) for row in rows]
            self.ends, self.rows = self.ends[to_device(places, self.ends.device)], list(rows)
        if self._runner is not None and any(room):
            self.ends = self._runner.streams_at(self.ends)
        return self.ends, room

    def _unseen(self, rows: int) -> list[Node]:
        """The nodes of each row, chosen before it is known what they say, in order of depth."""
        config, k = self.config, self.config.num_candidates if self.context.trees else 1
        chances = [
            [self.acceptance.chance(*known) for known in zip(evidence[:k], guesses, strict=False)]
            for evidence, guesses in zip(self.evidence, self.guesses, strict=True)
        ]
        likeliest = likeliest_nodes(chances, MOST_NODES)
        count = config.num_nodes
        if count == "auto":
            survival = [[chance for chance, _ in likeliest]] * rows
            count = nodes_that_pay(survival, rows, self.context.cost, advance=self.context.advance)
        return level_by_level([node for _, node in likeliest[:count]])

    def _looked_at(self, logits: Tensor | None, offered: list[Tree], rows: Sequence[int], room: list[int]) -> Draft:
        """A tree per row from its streams' probabilities in this round, joined by the other sources; of these alone
        where there are no streams.

        Args:
            room: [rows] that the streams may fill.
        """
        named: list[list[list[float]]] = [[] for _ in room]
        estimates = named
        if logits is not None:
            best = logits.float().softmax(-1).topk(self.config.num_candidates)
            named, estimates = to_host(torch.stack([self.streams.named(best.indices).float(), best.values]))
        trees: list[Tree] = []
        foretold: list[list[Node]] = []
        for tokens, chances, others, row, limit in zip(named, estimates, offered, rows, room, strict=True):
            tree, nodes = self._foretold(tokens, chances) if limit else (Tree(), [])
            tree.merge(others)
            for node in range(min(CONTINUED, len(nodes))):
                self.sources.join_behind(tree, node, row, limit)
            trees.append(tree)
            foretold.append(nodes)
        fixed = self.config.num_nodes
        most = MOST_NODES if fixed == "auto" else int(fixed)
        draft, ordered = draft_of(trees, [tree.ranked()[:most] for tree in trees], self.context.device)
        draft.sources = self.sources.named(trees, ordered)
        self.last = LastDraft(
            [
                [mine[node] if node < len(mine) else None for node in nodes]
                for mine, nodes in zip(foretold, ordered, strict=True)
            ],
            trees,
            logits,
            offered,
        )
        return draft if fixed == "auto" else replace(draft, survival=None)

    def _foretold(
        self, tokens: Sequence[Sequence[float]], estimates: Sequence[Sequence[float]]
    ) -> tuple[Tree, list[Node]]:
        """The likeliest nodes of a row; each candidate's chance is how often such estimates have come true."""
        seen = [[Evidence.of(f"stream {j}").at(estimate) for estimate in row] for j, row in enumerate(estimates)]
        chances = [[self.acceptance.calibrated(each) for each in row] for row in seen]
        likeliest = likeliest_nodes(chances, MOST_NODES)
        evidence = [list(zip(*all_of, self.drafted, strict=True)) for all_of in zip(seen, self.evidence, strict=True)]
        return joined(likeliest, tokens, evidence), [node for _, node in likeliest]

    def estimates(self, row: int) -> Sequence[float | None]:
        """The chance that its stream gave each node's token; None for others' tokens."""
        if not self.last.nodes or self.last.logits is None:
            return []
        likeliest = self.last.logits[row].float().softmax(-1).topk(self.config.num_candidates).values.tolist()
        return [None if node is None else likeliest[node.place][node.rank] for node in self.last.nodes[row]]

    def close(self) -> None:
        self.sources.close()
        notes, counts = self.context.stats.notes, self.counts
        if counts.pruned:
            notes.append(f"{counts.pruned} of {counts.drafted} drafted tokens were pruned in the middle of the forward")
        if counts.rested:
            notes.append(
                f"nothing was drafted in {counts.rested} of {counts.rounds} rounds, as no draft was likely to pay"
            )
