"""Rule "entropy": a bound on the chance of acceptance that needs no training, and λ, which it is held against (AdaEDL,
Agrawal et al. 2024, arXiv:2410.18351)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...protocol import Sequences, Verdict
from ...transfer import to_host
from ..draft_model import Steps
from ..draft_model.rules import tested
from .session import Threshold

STEP = 0.001
"""by which λ moves in a round: (1 − β₂)ε with AdaEDL's β₂ = 0.9, ε = 0.01"""
PAST = 0.5
"""β₁, weight of the past in the acceptance rate r that λ follows"""


def bound(q: Tensor, factor: float) -> Tensor:
    """1 − √(f · H(q)), and 0 where that is below 0.

    A token drawn from q is accepted with chance 1 − TV(p, q) (Leviathan 2023, Theorem 3.5), which is at least
    1 − √(KL/2) by Pinsker's inequality. While p is not known, f · H(q) stands for KL/2.

    Args:
        q: [..., V] the draft's distribution.
        factor: f, 0 or more; AdaEDL calls it γ.

    Returns:
        [...] from 0 to 1.
    """
    entropy = torch.special.entr(q).sum(-1)
    return 1 - (factor * entropy).sqrt().clamp(max=1.0)


class EntropyBound:
    """The bound for each drafted token, from the distribution that it was drawn from."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def begin(self, sequences: Sequences) -> None:
        """It goes by the distribution alone."""

    def of(self, logits: Tensor, tokens: Tensor, q: Tensor | None) -> list[float]:
        """The bound [B] of a round's next tokens. Of likeliest tokens the distribution is the draft's own."""
        return to_host(bound(logits.float().softmax(-1) if q is None else q, self.factor))


@dataclass
class Lambda:
    """λ, moved so that the share α of drafted tokens is accepted (AdaEDL, Algorithm 1)."""

    value: float
    """λ, from 0 to 1"""
    goal: float
    """α, an acceptance rate"""
    rate: float = field(init=False)
    """r, the acceptance rate of late"""

    def __post_init__(self) -> None:
        self.rate = self.goal

    def observe(self, accepted: int, drafted: int, whole: bool) -> None:
        """A round is over.

        Args:
            drafted: tokens, 1 or more.
            whole: whether drafts of the full length were accepted: a lower λ would draft no more.
        """
        self.rate = PAST * self.rate + (1 - PAST) * accepted / drafted
        if self.rate < self.goal:
            self.value = min(1.0, self.value + STEP)
        elif not whole:
            self.value = max(0.0, self.value - STEP)


class Adapted(Threshold):
    """Each row drafts until its last token's bound falls below λ."""

    def __init__(self, estimate: EntropyBound, lam: Lambda, longest: int) -> None:
        """
        Args:
            lam: shared by the calls of a drafter on one target.
        """
        super().__init__(estimate, lam.value, longest)
        self.lam = lam

    def begin(self, sequences: Sequences, room: list[int], most: int, model: Steps) -> int:
        self.tau = self.lam.value
        return super().begin(sequences, room, most, model)

    def observe(self, verdict: Verdict) -> None:
        super().observe(verdict)
        accepted, drafted = sum(verdict.accepted), sum(tested(verdict))
        if drafted:
            self.lam.observe(accepted, drafted, accepted == self.longest * len(verdict.rows))
