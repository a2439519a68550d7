"""`StreamingSession`: the streams of the last accepted token are the next tree."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...protocol import Draft, DraftContext, DraftSession, Runner, Sequences, Verdict
from ...transfer import to_device
from .config import StreamingConfig
from .runner import StreamRunner
from .streams import Streams
from .tuner import TreeTuner
from .upper import Upper


class StreamingSession(DraftSession):
    """Drafts each stream's likeliest tokens as a tree: those of stream j behind those of stream j - 1."""

    def __init__(
        self, context: DraftContext, config: StreamingConfig, streams: Streams, upper: Upper, tuner: TreeTuner
    ) -> None:
        super().__init__(context)
        self.config, self.streams, self.upper, self.tuner = config, streams, upper, tuner
        self._runner: StreamRunner | None = None
        self.rows: list[int] = []
        self.ends: Tensor | None = None
        """[rows, γ, H] the streams of each row's last token that was fed"""

    def runner(self, runner: Runner) -> Runner:
        self._runner = StreamRunner(runner, self.streams, self.upper, self.config.prune_below)
        return self._runner

    def observe_prompt(self, verdict: Verdict) -> None:
        self._look(verdict)

    def observe(self, verdict: Verdict) -> None:
        self.tuner.observe(verdict)
        self._look(verdict)

    def _look(self, verdict: Verdict) -> None:
        """Remember the streams at the place that decided each row's last token."""
        if self._runner is None or (states := self._runner.states) is None:
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
        nodes = self.tuner.tree(max(budget, default=0), self.context.trees)
        if self.ends is None or not nodes:
            return Draft.from_lists([[]] * len(budget), self.context.device)
        if sequences.rows != self.rows:
            index = to_device([self.rows.index(row) for row in sequences.rows], self.ends.device)
            self.ends, self.rows = self.ends[index], list(sequences.rows)
        logits = self.streams.head(self.upper, self.ends)
        k = max(node.rank for node in nodes) + 1
        best = self.streams.named(logits.topk(k).indices)  # [rows, γ, k]
        tokens = best.flatten(1)[:, to_device([k * node.stream + node.rank for node in nodes], best.device)]
        parents = [node.parent for node in nodes]
        lengths = [_within(nodes, most) for most in budget]
        chain = parents == list(range(-1, len(parents) - 1))
        return Draft(tokens, lengths, None if chain else [parents] * len(lengths))

    def close(self) -> None:
        if (runner := self._runner) is not None and runner.pruned:
            self.context.stats.notes.append(
                f"{runner.pruned} of {runner.fed} drafted tokens were pruned in mid-forward"
            )
        self.tuner.note(self.context.stats)


def _within(nodes: Sequence, depth: int) -> int:
    """How many of the nodes, in order of depth, lie no deeper."""
    return sum(node.stream < depth for node in nodes)
