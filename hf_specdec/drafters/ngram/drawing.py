"""`NGramSession`, `DrawingSession`: chains that an n-gram model draws, of a fixed length or as long as they pay."""

import time

import numpy as np
import torch
from torch import Tensor

from ...budget import DraftCost, Stepwise, Survival
from ...protocol import Draft, DraftContext, DraftSession, Sequences, Verdict
from ...transfer import to_device
from .model import NGramModel

LONGEST = 16
"""tokens that are drawn at most where that is not set"""
UNMEASURED = 3
"""tokens of a round before anything was measured"""


class NGramSession(DraftSession):
    """Draws γ tokens per round, each through the call's processors."""

    def __init__(self, context: DraftContext, model: NGramModel, gamma: int) -> None:
        super().__init__(context)
        self.model, self.gamma = model, gamma
        self.pick = context.pick.on(torch.device("cpu"))
        self.prompt = context.prompt_ids.cpu()

    def goes_on(self, drawn: int, open: list[bool]) -> bool:
        """Whether another token is drawn for the rows [B] that are open, behind so many."""
        return drawn < self.gamma

    def drew(self, row: int, chance: float) -> None:
        """One more token of row `row` of the draft, to which the model gave this chance."""

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        """Drawn on the host, where the model is: nobody waits for a device between two tokens."""
        context = self.context
        room = [min(self.gamma, most) for most in budget]
        width = max(room, default=0)
        drafts: list[list[int]] = [[] for _ in room]
        ids = self._on_host(sequences, width)
        drawn_from: list[Tensor] = []
        for i in range(width):
            open = [
                i < most and context.eos_token_ids.isdisjoint(mine[-1:])
                for most, mine in zip(room, drafts, strict=True)
            ]
            if not any(open) or not self.goes_on(i, open):
                break
            alive = [b for b, is_open in enumerate(open) if is_open]
            lengths = [sequences.lengths[b] + i for b in alive]
            probs = np.stack([self._next_probs(sequences.tokens[b], drafts[b]) for b in alive])
            tokens, q = self.pick(
                ids[alive], lengths, [sequences.rows[b] for b in alive], torch.from_numpy(probs).log()
            )
            ids[alive, lengths] = tokens
            for row, (b, token) in enumerate(zip(alive, tokens.tolist(), strict=True)):
                drafts[b].append(token)
                self.drew(b, float(probs[row, token]) if token < probs.shape[1] else 0.0)
            if q is not None:
                drawn_from.append(torch.zeros(len(room), q.shape[1]).index_copy(0, torch.tensor(alive), q))
        draft = Draft.from_lists(drafts, context.device)
        if drawn_from:
            draft.q = to_device(torch.stack(drawn_from, 1), context.device, torch.float32)
        return draft

    def _on_host(self, sequences: Sequences, width: int) -> Tensor:
        """ids [B, columns] with room for a draft; padding on the left, as on the device."""
        ids = torch.zeros(len(sequences.rows), max(sequences.lengths, default=0) + width, dtype=torch.long)
        for b, (row, length) in enumerate(zip(sequences.rows, sequences.lengths, strict=True)):
            padding = length - len(sequences.tokens[b])
            if padding:
                ids[b, :padding] = self.prompt[row, :padding]
            ids[b, padding:length] = torch.tensor(sequences.tokens[b])
        return ids

    def _next_probs(self, tokens: list[int], drafted: list[int]) -> np.ndarray:
        return self.model.next_probs(tokens[-self.model.order :] + drafted)


class DrawingSession(NGramSession):
    """Draws on while another token promises most tokens per second for the whole batch, or not at all. What is said of
    a token is the chance that the model gave it: token i is verified whatever it is, and bears on what comes behind."""

    weighs = True

    def __init__(self, context: DraftContext, model: NGramModel, survival: Survival, cost: DraftCost) -> None:
        """
        Args:
            survival: how often draws were right, by what the model said of them.
            cost: of a draw.
        """
        super().__init__(context, model, LONGEST)
        self.stepwise, self.draft_cost = Stepwise(survival), cost
        self.said: list[list[float]] = []
        """[B] of each token of the round"""

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self.said = [[] for _ in budget]
        began = time.perf_counter()
        draft = super().propose(sequences, budget)
        if steps := draft.tokens.shape[1]:
            self.draft_cost.observe((time.perf_counter() - began) / steps)
        return draft

    def goes_on(self, drawn: int, open: list[bool]) -> bool:
        cost, step = self.context.cost, self.draft_cost.step
        if step is None or not cost.known:
            return drawn < UNMEASURED
        if not drawn and cost.tried(len(open)) == 0:
            return False
        pays = self.stepwise.pays(self.said, open, cost.round(len(open)), step, self.context.lockstep)
        return pays if drawn else self.draft_cost.asked(pays, cost, len(open))

    def drew(self, row: int, chance: float) -> None:
        self.said[row].append(chance)

    def observe(self, verdict: Verdict) -> None:
        for said, drafted, accepted in zip(self.said, verdict.drafted, verdict.accepted, strict=bool(self.said)):
            self.stepwise.observe(said[:drafted], accepted)
        self.said = []
