"""Sessions over an n-gram model: `NGramSession` draws chains of a fixed length, `DrawingSession` as long as they pay,
and `NGramTrees` grows trees of likely tokens for greedy decoding."""

from heapq import heappop, heappush

import numpy as np
import torch
from torch import Tensor

from ...budget import Acceptance, Controller, Drafted, Evidence, Tree
from ...clock import now
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...session import DraftSession
from ...transfer import to_device
from ..trees import TreeSession
from .model import NGramModel

SUCCESSORS = 4
"""Children of a node."""
EXPANDED = 12
"""Nodes that get children in a round."""
LEAST = 0.03
"""Nodes that are reached with a smaller chance get no children."""


class NGramSession(DraftSession):
    """Draws γ tokens per round, each through the call's processors."""

    def __init__(self, context: DraftContext, model: NGramModel, gamma: int) -> None:
        super().__init__(context)
        self.model, self.gamma = model, gamma
        self.pick = context.pick.on(torch.device("cpu"))
        self.prompt = context.prompt_ids.cpu()

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        """Draw on the host, where the table is, so that nothing waits for a device between two tokens."""
        context = self.context
        limit = [min(self.gamma, most) for most in room]
        width = max(limit, default=0)
        drafts: list[list[int]] = [[] for _ in limit]
        ids = self._on_host(sequences, width)
        drawn_from: list[Tensor] = []
        for i in range(width):
            alive = [b for b, most in enumerate(limit) if i < most and context.eos_token_ids.isdisjoint(drafts[b][-1:])]
            if not alive:
                break
            lengths = [sequences.lengths[b] + i for b in alive]
            probs = np.stack([self._next_probs(sequences.tokens[b], drafts[b]) for b in alive])
            tokens, q = self.pick(
                ids[alive], lengths, [sequences.rows[b] for b in alive], torch.from_numpy(probs).log()
            )
            ids[alive, lengths] = tokens
            for b, token in zip(alive, tokens.tolist(), strict=True):
                drafts[b].append(token)
            if q is not None:
                none = torch.zeros(len(limit), q.shape[1], device="cpu")
                drawn_from.append(none.index_copy(0, torch.tensor(alive, device="cpu"), q))
        draft = Draft.from_lists(drafts, context.device)
        if drawn_from:
            draft.q = to_device(torch.stack(drawn_from, 1), context.device, torch.float32)
        return draft

    def _on_host(self, sequences: Sequences, width: int) -> Tensor:
        """The ids [B, columns] on the host, left-padded as on the device, with room for a draft."""
        ids = torch.zeros(
            len(sequences.rows), max(sequences.lengths, default=0) + width, dtype=torch.long, device="cpu"
        )
        for b, (row, length) in enumerate(zip(sequences.rows, sequences.lengths, strict=True)):
            padding = length - len(sequences.tokens[b])
            if padding:
                ids[b, :padding] = self.prompt[row, :padding]
            ids[b, padding:length] = torch.tensor(sequences.tokens[b], device="cpu")
        return ids

    def _next_probs(self, tokens: list[int], drafted: list[int]) -> np.ndarray:
        return self.model.next_probs(tokens[-self.model.order :] + drafted)


class DrawingSession(NGramSession):
    """Draws as many tokens as promise most tokens per second; γ is chosen before they are drawn."""

    weighs = True

    def __init__(self, context: DraftContext, model: NGramModel, control: Controller) -> None:
        """
        Args:
            control: chooses γ.
        """
        super().__init__(context, model, control.longest)
        self.control = control

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        active = [b for b, most in enumerate(room) if most > 0]
        here = Drafted(sequences.rows, [[]] * len(active), [1.0] * len(active))
        self.gamma = self.control.plan(here, max(room), enough=self.control.longest)
        began = now()
        draft = super().propose(sequences, room)
        if steps := draft.tokens.shape[1]:
            seconds = now() - began
            self.control.cost.observe(steps, seconds / steps, seconds)
        return draft

    def observe(self, verdict: Verdict) -> None:
        self.control.observe_chains(verdict)


class NGramTrees(TreeSession):
    """Greedy trees, in which the likeliest node gets children first. A token's chance is the model's, corrected by how
    often such chances came true."""

    def __init__(self, context: DraftContext, model: NGramModel, acceptance: Acceptance) -> None:
        super().__init__(context, acceptance)
        self.model, self.successors = model, SUCCESSORS if context.trees else 1

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        for tree, tokens, most in zip(self.begin(len(room)), sequences.tokens, room, strict=True):
            self._grow(tree, tokens[-self.model.order :], most)
        return self.draft()

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
            for rank, (token, said) in enumerate(self.model.likeliest(text + path, self.successors)):
                evidence = Evidence.of("n-gram", min(rank, 1)).at(said)
                right = self.acceptance.calibrated(evidence)
                child = tree.add(node, token, right, evidence)
                if here * right <= -LEAST and token not in self.context.eos_token_ids:
                    heappush(places, (here * right, child))
