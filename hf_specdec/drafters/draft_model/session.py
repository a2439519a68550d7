"""`DraftModelSession`: one forward of a small model per drafted token (Leviathan 2023, Algorithm 1)."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...budget import DraftCost, Window, why_rested
from ...clock import now
from ...protocol import Draft, DraftContext, DraftSession, Sequences, Verdict
from ...transfer import to_device, to_host, waits
from .over_cache import OverCache
from .translating import Translated, over_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DraftModelSession(DraftSession):
    """Drafts with a model over its own cache."""

    weighs = True

    def __init__(
        self,
        context: DraftContext,
        model: "PreTrainedModel | Translated",
        window: int | str,
        by_itself: Window | None = None,
        cost: DraftCost | None = None,
        candidates: int = 1,
    ) -> None:
        """
        Args:
            window: γ, or "auto", for which the two that follow are needed.
            by_itself: chooses it.
            cost: of this model's steps.
        """
        super().__init__(context)
        self.fixed_window, self.by_itself, self.draft_cost = window, by_itself, cost or DraftCost()
        self.candidates = candidates_of(context, candidates)
        """tokens tried at each position"""
        self.rounds = self.rested = 0
        """all, and those in which drafting would not have paid"""
        self.seconds = 0.0
        """for which the last draft was drafted"""
        self.price = 0.0
        """of this round's look, as `DraftCost.asked` has it"""
        self.rows = list(range(context.prompt_ids.shape[0]))
        self.model = model_over_cache(context, model)

    def window(self) -> int:
        """γ of the next round."""
        if self.by_itself is None or self.fixed_window != "auto":
            return int(self.fixed_window)
        cost, advance = self.context.cost, self.context.advance
        gamma, self.price = self.by_itself.choose(cost, self.draft_cost, len(self.rows), self.candidates, advance)
        return gamma

    def shortened(self, step: int, logits: Tensor, tokens: Tensor, q: Tensor | None, lengths: list[int]) -> list[int]:
        """Asked once token `step` (from 0) is drawn, the last one, too: how many tokens each row drafts in all. Stop
        rules add to it.

        Args:
            q: [B, V] that tokens [B] were drawn from; None where they are the likeliest ones.

        Token `step` itself stays: a rule that dropped a token after seeing it would change the output's distribution.
        """
        # On an accelerator, to wait for every token would cost more than to draft past the end once per text.
        return lengths if waits(tokens.device) else self.until_eos(step, to_host(tokens), lengths)

    def until_eos(self, step: int, tokens: list[int], lengths: list[int]) -> list[int]:
        """Nothing behind an EOS is ever kept."""
        eos = self.context.eos_token_ids
        return [min(most, step + 1) if token in eos else most for token, most in zip(tokens, lengths, strict=True)]

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        usual, self.seconds = self.seconds > 0, 0.0
        # Rows that stopped leave this cache too; drafts that were never judged are forgotten.
        self.model.follow(self.rows, sequences)
        self.rows = list(sequences.rows)
        room = self.model.context_limit - max(sequences.lengths)
        gamma = self.window()
        self.rounds, self.rested = self.rounds + 1, self.rested + (gamma == 0)
        width = min(gamma, max(budget), room)
        if width < 1:
            return Draft.from_lists([[]] * len(self.rows), self.context.device)
        began, first = now(), 0.0
        lengths = [min(width, most) for most in budget]
        # Rows in lockstep advance by their shortest draft, so nobody drafts past it.
        longest = min if self.context.lockstep else max
        active = [b for b, most in enumerate(budget) if most > 0]
        ids = with_room(sequences, width)
        logits = self.model.catch_up(ids, sequences.lengths)
        drafted: list[Tensor] = []
        beside: list[Tensor] = []
        drawn_from: list[Tensor] = []
        for i in range(width):
            columns = [n + i for n in sequences.lengths]
            if self.candidates > 1:
                likeliest, _ = self.context.pick.likeliest(ids, columns, sequences.rows, logits, self.candidates)
                tokens, q = likeliest[:, 0], None
                beside.append(likeliest[:, 1:])
            else:
                tokens, q = self.context.pick(ids, columns, sequences.rows, logits)
            drafted.append(tokens)
            first = first or now() - began
            if q is not None:
                drawn_from.append(q)
            self.seconds = now() - began  # what is said of the last one is no part of a step
            lengths = self.shortened(i, logits, tokens, q, lengths)
            if i + 1 >= longest(lengths[b] for b in active):
                break
            write_tokens(ids, tokens, columns)
            logits = self.model.feed(ids, [n + 1 for n in columns], tokens)
        self.draft_cost.observe_draft(len(drafted), first, self.seconds, usual)
        lengths = [min(k, len(drafted)) for k in lengths]
        if beside:
            return with_candidates(torch.stack(drafted, 1), torch.stack(beside, 1), lengths)
        return Draft(torch.stack(drafted, 1), lengths, q=torch.stack(drawn_from, 1) if drawn_from else None)

    def observe(self, verdict: Verdict) -> None:
        accepted = self._drafted_on(verdict)
        if self.by_itself is not None:
            self.tell(self.by_itself, verdict, accepted)
        self.draft_cost.kept(verdict.accepted, self.price, self.context.cost, self.context.advance)
        if verdict.rows == self.rows:  # otherwise nothing was drafted in this round
            self.model.accept(accepted, verdict.stopped)

    def tell(self, window: Window, verdict: Verdict, accepted: list[int]) -> None:
        """What the verdict says of this draft's acceptance, and how many of each row's tokens it went on from."""
        window.observe(tested(verdict), accepted)
        if self.candidates > 1:
            rows = zip(verdict.drafted, verdict.accepted, accepted, strict=True)
            window.observe_candidates([n > mine for drafted, n, mine in rows if mine < drafted])

    def _drafted_on(self, verdict: Verdict) -> list[int]:
        """[B] accepted tokens that the draft went on from: of a position's candidates the first one."""
        if self.candidates == 1:
            return verdict.accepted
        return [sum(node % self.candidates == 0 for node in path) for path in verdict.paths]

    def close(self) -> None:
        if self.by_itself is not None and self.rested:
            c = self.draft_cost.c(self.context.cost, self.context.rows)
            self.context.stats.notes += why_rested(self.rested, self.rounds, c, self.by_itself.alpha)


def tested(verdict: Verdict) -> list[int]:
    """[B] drafted tokens that may have been tested: where a round ends for another row's sake, nothing is known of what
    is behind its end."""
    return [min(drafted, len(text)) for drafted, text in zip(verdict.drafted, verdict.tokens, strict=True)]


def model_over_cache(context: DraftContext, model: "PreTrainedModel | Translated") -> OverCache:
    """A draft model that has read the call's prompt."""
    bounds = context.most_rows, context.most_tokens
    prompt = context.prompt_ids, context.prompt_mask
    return over_cache(model, *prompt, context.lockstep, *bounds, context.source, context.stats)


def candidates_of(context: DraftContext, wanted: int) -> int:
    """Tokens tried at each position. What is drawn at random stays alone: its q is what it is tested by."""
    return wanted if context.trees and not context.do_sample else 1


def with_candidates(drafted: Tensor, beside: Tensor, lengths: list[int]) -> Draft:
    """A tree of a chain [B, γ] and, as its leaves, other candidates [B, γ, k - 1] for each of its positions."""
    tokens = torch.cat([drafted[..., None], beside], dim=2).flatten(1)
    k = beside.shape[2] + 1
    parents = [(node // k - 1) * k if node >= k else -1 for node in range(tokens.shape[1])]
    return Draft(tokens, [k * n for n in lengths], [parents] * len(lengths))


def write_tokens(ids: Tensor, tokens: Tensor, columns: list[int]) -> None:
    """Put one token [B] into each row of ids [B, capacity]."""
    if len(set(columns)) == 1:
        ids[:, columns[0]] = tokens
    else:
        ids.scatter_(1, to_device(columns, ids.device)[:, None], tokens[:, None])


def with_room(sequences: Sequences, width: int) -> Tensor:
    """The sequences' ids with columns to write the draft to."""
    missing = max(sequences.lengths) + width - sequences.ids.shape[1]
    return sequences.ids if missing <= 0 else torch.nn.functional.pad(sequences.ids, (0, missing))
