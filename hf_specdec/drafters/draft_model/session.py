"""`DraftModelSession`: a chain of a draft model's tokens, as long as a rule says (Leviathan 2023, Algorithm 1)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...session import DraftSession
from ...transfer import to_host
from .rules import StopRule
from .steps import Step, Steps


class DraftModelSession(DraftSession):
    """Drafts one chain per row, or one with other candidates beside each of its tokens."""

    weighs = True

    def __init__(self, context: DraftContext, model: Steps, rule: StopRule, candidates: int = 1) -> None:
        """
        Args:
            rule: how far rows draft.
            candidates: k, what the model gives for each place.
        """
        super().__init__(context)
        self.model, self.rule, self.candidates = model, rule, candidates
        self.weighs, self.features = rule.weighs, model.features

    def observe_prompt(self, verdict: Verdict) -> None:
        self.model.observe_prompt(verdict)

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        most = min(max(room), self.model.room(sequences))
        steps = min(self.rule.begin(sequences, room, most, self.model), most)
        if steps < 1:
            return Draft.from_lists([[]] * len(room), self.context.device)
        return draft_chains(self.model, sequences, room, steps, None if self.rule.planned else self.rule.lengths)

    @property
    def drafts_early(self) -> bool:  # type: ignore[override]
        return self.rule.planned and self.model.drafts_early

    def draft_early(self, n: Tensor, last: Tensor) -> None:
        self.model.draft_early(n, last)

    def observe(self, verdict: Verdict) -> None:
        self.model.observe(verdict, kept_of_chain(verdict, self.candidates))
        self.rule.observe(verdict)

    def close(self) -> None:
        self.context.stats.notes += self.rule.notes()


Lengths = Callable[[int, Step, list[int]], list[int]]
"""Asked once token i (from 0) of each row is drafted: how many tokens rows draft in all, of [B] until now. Token i
stays: dropping a token after having seen it would change the output's distribution."""


def draft_chains(model: Steps, sequences: Sequences, room: list[int], steps: int, rule: Lengths | None) -> Draft:
    """Chains of at most `steps` tokens. None is longer than its row's room, or goes on behind an EOS.

    Args:
        rule: None where all steps are made.
    """
    context = model.context
    lengths = [min(steps, most) for most in room]
    # Rows in lockstep advance by their shortest draft, so nobody drafts past it.
    longest = min if context.lockstep else max
    active = [b for b, most in enumerate(room) if most > 0]
    model.begin(sequences, steps, steps if model.blind and rule is None else 0)
    drafted: list[Step] = []
    for i in range(steps):
        step = model.step()
        drafted.append(step)
        if not model.blind:  # there, to wait for every token would cost more than to draft past the end once per text
            ends = [token in context.eos_token_ids for token in to_host(step.tokens[:, 0])]
            lengths = [min(n, i + 1) if end else n for n, end in zip(lengths, ends, strict=True)]
        lengths = lengths if rule is None else rule(i, step, lengths)
        if i + 1 >= longest(lengths[b] for b in active):
            break
    model.end()
    lengths = [min(n, len(drafted)) for n in lengths]
    tokens = torch.stack([step.tokens for step in drafted], 1)
    if tokens.shape[2] > 1:
        return with_candidates(tokens[..., 0], tokens[..., 1:], lengths)
    q = [step.q for step in drafted if step.q is not None]
    return Draft(tokens[..., 0], lengths, q=torch.stack(q, 1) if q else None)


def kept_of_chain(verdict: Verdict, candidates: int) -> list[int]:
    """[B] accepted tokens that the draft went on from: of a position's candidates the first one."""
    if candidates == 1:
        return verdict.accepted
    return [sum(node % candidates == 0 for node in path) for path in verdict.paths]


def candidates_of(context: DraftContext, wanted: int) -> int:
    """Tokens tried at each position. What is drawn at random stays alone: its q is what it is tested by."""
    return wanted if context.trees and not context.do_sample else 1


def with_candidates(drafted: Tensor, beside: Tensor, lengths: Sequence[int]) -> Draft:
    """A tree of a chain [B, γ] and, as its leaves, other candidates [B, γ, k - 1] for each of its positions."""
    tokens = torch.cat([drafted[..., None], beside], dim=2).flatten(1)
    k = beside.shape[2] + 1
    parents = [(node // k - 1) * k if node >= k else -1 for node in range(tokens.shape[1])]
    return Draft(tokens, [k * n for n in lengths], [parents] * len(lengths))
