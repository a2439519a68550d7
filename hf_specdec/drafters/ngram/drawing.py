"""`NGramSession`, `DrawingSession`: chains that an n-gram model draws, of a fixed length or as long as they pay."""

import numpy as np
import torch
from torch import Tensor

from ...budget import Controller, Drafted
from ...clock import now
from ...protocol import Draft, DraftContext, DraftSession, Sequences, Verdict
from ...transfer import to_device
from .model import NGramModel


class NGramSession(DraftSession):
    """Draws γ tokens per round, each through the call's processors."""

    def __init__(self, context: DraftContext, model: NGramModel, gamma: int) -> None:
        super().__init__(context)
        self.model, self.gamma = model, gamma
        self.pick = context.pick.on(torch.device("cpu"))
        self.prompt = context.prompt_ids.cpu()

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        """Drawn on the host, where the model is: nobody waits for a device between two tokens."""
        context = self.context
        room = [min(self.gamma, most) for most in budget]
        width = max(room, default=0)
        drafts: list[list[int]] = [[] for _ in room]
        ids = self._on_host(sequences, width)
        drawn_from: list[Tensor] = []
        for i in range(width):
            alive = [b for b, most in enumerate(room) if i < most and context.eos_token_ids.isdisjoint(drafts[b][-1:])]
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
    """As many tokens as promise most per second: γ is chosen before they are drawn."""

    weighs = True

    def __init__(self, context: DraftContext, model: NGramModel, control: Controller) -> None:
        """
        Args:
            control: chooses γ.
        """
        super().__init__(context, model, control.longest)
        self.control = control

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        active = [b for b, room in enumerate(budget) if room > 0]
        here = Drafted(sequences.rows, [[]] * len(active), [1.0] * len(active))
        self.gamma = self.control.plan(here, max(budget), enough=self.control.longest)
        began = now()
        draft = super().propose(sequences, budget)
        if steps := draft.tokens.shape[1]:
            seconds = now() - began
            self.control.cost.observe(steps, seconds / steps, seconds)
        return draft

    def observe(self, verdict: Verdict) -> None:
        self.control.observe_chains(verdict)
