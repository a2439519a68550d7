"""What an n-gram model drafts: draws, one place after the other, or the likeliest tokens as nodes of a tree."""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
import torch
from torch import Tensor

from ...budget import Acceptance, DraftCost, Evidence, Tree
from ...clock import now
from ...protocol import DraftContext, Sequences, Verdict
from ..sources import Source
from ..steps import Step, Steps
from .model import NGramModel

SUCCESSORS = 4
"""Children of a node."""
EXPANDED = 12
"""Nodes that get children in a round."""
LEAST = 0.03
"""Nodes that are reached with a smaller chance get no children."""


class NGramSteps(Steps):
    """Draws on the host, where the table is, so that nothing waits for a device between two tokens; each through the
    call's processors."""

    name = "ngram"
    unread = 0

    def __init__(self, context: DraftContext, model: NGramModel, cost: DraftCost) -> None:
        self.context, self.model, self.cost = context, model, cost
        self.pick = context.pick.on(torch.device("cpu"))
        self.prompt = context.prompt_ids.cpu()

    def room(self, sequences: Sequences) -> int:
        return self.context.max_length - min(sequences.lengths)

    def begin(self, sequences: Sequences, steps: int, planned: int = 0) -> None:
        self.steps, self.began, self.sequences = 0, now(), sequences
        self.ids, self.texts = self._on_host(sequences, steps), [list(text) for text in sequences.tokens]

    def _on_host(self, sequences: Sequences, width: int) -> Tensor:
        """The ids [B, columns] on the host, left-padded as on the device, with room for a draft."""
        ids = torch.zeros(len(sequences.rows), max(sequences.lengths) + width, dtype=torch.long, device="cpu")
        for b, (row, length) in enumerate(zip(sequences.rows, sequences.lengths, strict=True)):
            padding = length - len(sequences.tokens[b])
            if padding:
                ids[b, :padding] = self.prompt[row, :padding]
            ids[b, padding:length] = torch.tensor(sequences.tokens[b], device="cpu")
        return ids

    def step(self) -> Step:
        lengths = [length + self.steps for length in self.sequences.lengths]
        probs = np.stack([self.model.next_probs(text[-self.model.order - self.steps :]) for text in self.texts])
        tokens, q = self.pick(self.ids, lengths, self.sequences.rows, torch.from_numpy(probs).log())
        self.ids[range(len(lengths)), lengths] = tokens
        for text, token in zip(self.texts, tokens.tolist(), strict=True):
            text.append(token)
        self.steps += 1
        return Step(tokens[:, None], q=q)

    def end(self) -> None:
        seconds = now() - self.began
        self.cost.observe(self.steps, seconds / self.steps, seconds)

    def observe(self, verdict: Verdict, kept: Sequence[int]) -> None:
        self.steps = 0


class LikelyNGrams(Source):
    """Trees in which the likeliest node gets children first. A token's chance is the model's, corrected by how often
    such chances came true."""

    name, kind = "n-gram", "ngram"

    def __init__(self, context: DraftContext, model: NGramModel, acceptance: Acceptance) -> None:
        self.context, self.model, self.acceptance = context, model, acceptance
        self.successors = SUCCESSORS if context.trees else 1

    def join(self, trees: Sequence[Tree], sequences: Sequences, room: list[int]) -> None:
        for tree, tokens, most in zip(trees, sequences.tokens, room, strict=True):
            self._grow(tree, tokens[-self.model.order :], most)

    def _grow(self, tree: Tree, text: list[int], room: int) -> None:
        """Add what may follow a row's text to its tree, at most `room` deep."""
        places = [(-1.0, -1)]
        """a heap of minus the chance to get to a node, and the node"""
        for _ in range(EXPANDED):
            if not places:
                return
            here, node = heappop(places)
            path = tree.text(node)
            if len(path) == room:
                continue
            likeliest = self.model.likeliest(text + path, self.successors)
            kinds = [Evidence.of(self.name, min(rank, 1)) for rank in range(len(likeliest))]
            judged = self.acceptance.calibrated(kinds, [said for _, said in likeliest])
            for (token, _), (evidence, right) in zip(likeliest, judged, strict=True):
                child = tree.add(node, token, right, evidence)
                if here * right <= -LEAST and token not in self.context.eos_token_ids:
                    heappush(places, (here * right, child))
