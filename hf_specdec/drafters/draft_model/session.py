"""`DraftModelSession`: one forward of a small model per drafted token (Leviathan 2023, Algorithm 1)."""

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...protocol import Draft, DraftContext, DraftSession, Sequences, Verdict
from ...transfer import to_device, to_host, waits
from .model import ModelOverCache
from .window import WindowTuner

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DraftModelSession(DraftSession):
    """Drafts with a model over its own cache."""

    def __init__(
        self, context: DraftContext, model: "PreTrainedModel", window: int | str, tuner: WindowTuner | None = None
    ) -> None:
        super().__init__(context)
        self.fixed_window, self.tuner = window, tuner
        self.rounds = self.rested = 0
        """all, and those in which drafting would not have paid"""
        self.rows = list(range(context.prompt_ids.shape[0]))
        self.model = ModelOverCache(model, context.prompt_ids, context.prompt_mask, context.lockstep)
        context.stats.draft_calls += 1

    def window(self) -> int:
        """γ of the next round."""
        return self.tuner.choose() if self.tuner is not None else int(self.fixed_window)

    def shortened(
        self, step: int, logits: Tensor, tokens: Tensor, sequences: Sequences, lengths: list[int]
    ) -> list[int]:
        """Asked once token `step` (from 0) is drawn: how many tokens each row drafts in all. Stop rules add to it.

        Token `step` itself stays: a rule that dropped a token after seeing it would change the output's distribution.
        """
        # On an accelerator, to wait for every token would cost more than to draft past the end once per text.
        return lengths if waits(tokens.device) else self.until_eos(step, to_host(tokens), lengths)

    def until_eos(self, step: int, tokens: list[int], lengths: list[int]) -> list[int]:
        """Nothing behind an EOS is ever kept."""
        eos = self.context.eos_token_ids
        return [min(most, step + 1) if token in eos else most for token, most in zip(tokens, lengths, strict=True)]

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self._follow_rows(sequences)
        room = self.model.context_limit - max(sequences.lengths)
        gamma = self.window()
        self.rounds, self.rested = self.rounds + 1, self.rested + (gamma == 0)
        width = min(gamma, max(budget), room)
        if width < 1:
            return Draft.from_lists([[]] * len(self.rows), self.context.device)
        began = time.perf_counter()
        lengths = [min(width, most) for most in budget]
        # Rows in lockstep advance by their shortest draft, so nobody drafts past it.
        longest = min if self.context.lockstep else max
        active = [b for b, most in enumerate(budget) if most > 0]
        ids = _with_room(sequences, width)
        self.context.stats.draft_calls += 1
        logits = self.model.catch_up(ids, sequences.lengths)
        drafted: list[Tensor] = []
        drawn_from: list[Tensor] = []
        for i in range(width):
            tokens, q = self.context.pick(ids, [n + i for n in sequences.lengths], sequences.rows, logits)
            drafted.append(tokens)
            if q is not None:
                drawn_from.append(q)
            if i + 1 < width:
                lengths = self.shortened(i, logits, tokens, sequences, lengths)
            if i + 1 >= longest(lengths[b] for b in active):
                break
            write_tokens(ids, tokens, [n + i for n in sequences.lengths])
            self.context.stats.draft_calls += 1
            logits = self.model.feed(tokens[:, None])
        if self.tuner is not None:
            self.tuner.observe_draft((time.perf_counter() - began) / len(drafted))
        lengths = [min(k, len(drafted)) for k in lengths]
        return Draft(torch.stack(drafted, 1), lengths, q=torch.stack(drawn_from, 1) if drawn_from else None)

    def observe(self, verdict: Verdict) -> None:
        if self.tuner is not None:
            self.tuner.observe_verify(verdict.width, verdict.seconds)
            self.tuner.observe_acceptance(verdict.drafted, verdict.accepted)
        if verdict.rows == self.rows:  # otherwise nothing was drafted in this round
            self.model.accept(verdict.accepted, verdict.stopped)

    def close(self) -> None:
        if self.tuner is not None and self.rested:
            when = f"in {self.rested} of {self.rounds} rounds"
            self.context.stats.notes.append(f"drafting was stopped {when}, as {self.tuner.why_not()}")

    def _follow_rows(self, sequences: Sequences) -> None:
        """Rows that stopped leave this cache too; drafts that were never judged are forgotten."""
        self.model.roll_back()
        if sequences.rows != self.rows:
            self.model.select([self.rows.index(row) for row in sequences.rows])
            self.rows = list(sequences.rows)


def write_tokens(ids: Tensor, tokens: Tensor, columns: list[int]) -> None:
    """Put one token [B] into each row of ids [B, capacity]."""
    if len(set(columns)) == 1:
        ids[:, columns[0]] = tokens
    else:
        ids.scatter_(1, to_device(columns, ids.device)[:, None], tokens[:, None])


def _with_room(sequences: Sequences, width: int) -> Tensor:
    """The sequences' ids with columns to write the draft to."""
    missing = max(sequences.lengths) + width - sequences.ids.shape[1]
    return sequences.ids if missing <= 0 else torch.nn.functional.pad(sequences.ids, (0, missing))
