"""`StreamingSession`: the streams of the last accepted token are the next tree."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...budget import MOST_NODES, Acceptance, Evidence, Tree, are_chains
from ...protocol import Draft, DraftContext, DraftSession, Runner, Sequences, Verdict
from ...transfer import to_device, to_host, waits
from ..prompt_lookup import Copies, PromptLookupConfig
from ..tree_session import draft_of
from .config import StreamingConfig
from .runner import StreamRunner
from .streams import Streams
from .tree import Node, joined, likeliest_nodes
from .tuner import TreeTuner
from .upper import Upper

BRANCHES = 3
"""copies that join the streams' tree"""
LOOK_AGAIN = 4
"""rounds after which streams are asked again where no tree has paid"""
CONTINUED = 8
"""nodes of the streams that are copied on from"""


class StreamingSession(DraftSession):
    """Drafts each stream's likeliest tokens as a tree, those of stream j behind those of stream j - 1, joined by what
    followed the same words before."""

    def __init__(
        self,
        context: DraftContext,
        config: StreamingConfig,
        streams: Streams,
        upper: Upper,
        tuner: TreeTuner,
        acceptance: Acceptance,
    ) -> None:
        super().__init__(context)
        self.config, self.streams, self.upper, self.tuner = config, streams, upper, tuner
        self.slots_per_token = 1 + streams.gamma
        self._runner: StreamRunner | None = None
        self.rows: list[int] = []
        self.ends: Tensor | None = None
        """[rows, γ, H] the streams of each row's last token that was fed"""
        self._paid = True
        """whether a tree of the streams paid when they were asked last"""
        self.rounds = self.rested = 0
        """all, and those in which no tree promised to pay"""
        self.drafted = self.pruned = 0
        """nodes in all"""
        self._logits: Tensor | None = None
        """[rows, γ, K] of the last draft"""
        self._drafted: list[Sequence[Node | None]] = []
        """[rows][nodes] of the last draft the streams' nodes, None for what is copied"""
        self.by_value = config.tree == "value" and context.trees
        joins = config.copies and self.by_value
        self.copies = Copies(context, PromptLookupConfig(num_branches=BRANCHES), acceptance) if joins else None
        self.acceptance = acceptance
        self._trees: list[Tree] = []
        """[rows] of the last draft, where copies have joined"""

    def runner(self, runner: Runner) -> Runner:
        self._runner = StreamRunner(runner, self.streams, self.upper, self.config.prune_below)
        return self._runner

    def observe_prompt(self, verdict: Verdict) -> None:
        self._look(verdict)

    def observe(self, verdict: Verdict) -> None:
        tested = None if verdict.nodes is None else [set(row) for row in to_host(verdict.nodes)]
        self.tuner.observe(verdict, self._drafted, tested)
        if tested is not None and verdict.draft is not None:
            for nodes, length in zip(tested, verdict.draft.lengths, strict=True):
                self.pruned += length - sum(0 <= node < length for node in nodes)
        self.drafted += sum(verdict.draft.lengths) if verdict.draft is not None else 0
        self.acceptance.observe_trees(self._trees, verdict.tokens)
        if self._trees:
            self._paid = any(verdict.drafted)
            self.rested += not self._paid
        self._drafted, self._trees = [], []  # in a round without room nothing is proposed
        self._look(verdict)

    def _look(self, verdict: Verdict) -> None:
        """Remember the streams at the place that decided each row's last token."""
        self.ends = None
        if self._runner is None:
            return
        self._runner.rides = False  # until a draft is asked for
        if (states := self._runner.states) is None:
            return
        kept, places = self._runner.kept, []
        for b, (path, tokens) in enumerate(zip(verdict.paths or [[]] * len(verdict.rows), verdict.tokens, strict=True)):
            decided = path[: len(tokens) - 1]
            fed = decided[-1] + 1 if decided else 0
            places.append(fed if kept is None else kept[b].index(fed))
        index = to_device(places, states.device)
        self.ends = states[torch.arange(len(places), device=states.device), index]
        self.rows = list(verdict.rows)

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        if self._runner is not None:
            self._runner.rides = True
        nodes = self.tuner.tree(self.context.trees, self.context.cost, len(budget))
        copies = self._copies(sequences, budget)
        free = self.by_value and not waits(self.context.device)  # to look at what streams say
        # Where nothing has paid, to ask the head would cost, too.
        looks = bool(copies) or (free and (self._paid or self.rounds % LOOK_AGAIN == 0))
        self.rounds += 1
        if self.ends is None or not (looks or (nodes and not free)):
            self.rested += 1
            return Draft.from_lists([[]] * len(budget), self.context.device)
        if sequences.rows != self.rows:
            # A new row has no streams before its first forward.
            budget = [room if row in self.rows else 0 for row, room in zip(sequences.rows, budget, strict=True)]
            places = [self.rows.index(row) if row in self.rows else 0 for row in sequences.rows]
            self.ends, self.rows = self.ends[to_device(places, self.ends.device)], list(sequences.rows)
        self._logits = logits = self.streams.head(self.upper, self.ends)
        if looks:
            return self._looked_at(logits, copies or [Tree() for _ in budget], sequences.rows, budget)
        k = max(node.rank for node in nodes) + 1
        best = self.streams.named(logits.topk(k).indices).flatten(1)  # [rows, γ k]
        tokens = best[:, to_device([k * node.stream + node.rank for node in nodes], best.device)]
        parents = [node.parent for node in nodes]
        self._drafted = [nodes] * len(budget)
        lengths = [len(nodes) if room else 0 for room in budget]
        return Draft(tokens, lengths, None if are_chains([parents]) else [parents] * len(budget))

    def _copies(self, sequences: Sequences, budget: list[int]) -> list[Tree]:
        """What rows can copy; empty where there is nothing."""
        trees = [Tree() for _ in budget]
        if self.copies is not None:
            self.copies.join(trees, sequences, budget)
        return trees if any(map(len, trees)) else []

    def _looked_at(self, logits: Tensor, copies: list[Tree], rows: Sequence[int], budget: list[int]) -> Draft:
        """A tree per row, by what its streams say here and now, joined by copies."""
        best = logits.float().softmax(-1).topk(self.config.num_candidates)
        named, estimates = to_host(torch.stack([self.streams.named(best.indices).float(), best.values]))
        self._trees, foretold = [], []
        for tokens, chances, copied, row, room in zip(named, estimates, copies, rows, budget, strict=True):
            tree, nodes = self._foretold(tokens, chances) if room else (Tree(), [])
            if self.copies is not None:
                self._copy_behind(tree, row, room)
                tree.merge(copied)
            self._trees.append(tree)
            foretold.append(nodes)
        fixed = self.config.num_nodes
        most = MOST_NODES if fixed == "auto" else int(fixed)
        draft, ordered = draft_of(self._trees, [tree.ranked()[:most] for tree in self._trees], self.context.device)
        self._drafted = [
            [mine[node] if node < len(mine) else None for node in nodes]
            for mine, nodes in zip(foretold, ordered, strict=True)
        ]
        return draft if fixed == "auto" else replace(draft, survival=None)

    def _foretold(
        self, tokens: Sequence[Sequence[float]], estimates: Sequence[Sequence[float]]
    ) -> tuple[Tree, list[Node]]:
        """The likeliest nodes of a row, each stream's candidates as likely as its estimates have come true."""
        evidence = [[Evidence.of(f"stream {j}").at(estimate) for estimate in row] for j, row in enumerate(estimates)]
        chances = [[self.acceptance.calibrated(each) for each in row] for row in evidence]
        likeliest = likeliest_nodes(chances, MOST_NODES)
        return joined(likeliest, tokens, evidence), [node for _, node in likeliest]

    def _copy_behind(self, tree: Tree, row: int, room: int) -> None:
        """What followed earlier behind the words that streams find likeliest."""
        assert self.copies is not None
        for node in range(min(CONTINUED, len(tree))):
            self.copies.join_behind(tree, node, row, room)

    def estimates(self, row: int) -> Sequence[float | None]:
        """The chance that its stream gave each node's token; none of what is copied."""
        if not self._drafted or self._logits is None:
            return []
        likeliest = self._logits[row].float().softmax(-1).topk(self.config.num_candidates).values.tolist()
        return [None if node is None else likeliest[node.stream][node.rank] for node in self._drafted[row]]

    def close(self) -> None:
        notes = self.context.stats.notes
        if self.pruned:
            notes.append(f"{self.pruned} of {self.drafted} drafted tokens were pruned in the middle of the forward")
        if self.rested:
            notes.append(f"nothing was drafted in {self.rested} of {self.rounds} rounds, as no draft was likely to pay")
