"""What DISCO is compared with: stop rules to play over records, and the same ones as drafters for the clock."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.budget import Acceptance, Account, Evidence, steps_that_pay
from hf_specdec.drafters.disco import DiscoDrafter, StopClassifier
from hf_specdec.drafters.disco.classifier import Chance
from hf_specdec.drafters.draft_model import DraftModelDrafter, DraftModelSession, Step
from hf_specdec.protocol import DraftContext, DraftSession, Sequences, Verdict
from hf_specdec.train.disco.simulation import Costs, Rule, Values

DRAWN = Evidence.of("drawn")
LONGEST = 32
"""tokens that any rule drafts at most"""
HF_LONGEST = 20
"""transformers' default with its confidence threshold"""


@dataclass
class Static:
    """γ tokens per round."""

    gamma: int

    def goes_on(self, seen: list[float]) -> bool:
        return len(seen) < self.gamma


@dataclass
class Heuristic:
    """transformers' schedule: two more tokens after a draft that was accepted whole, else one less (Gante 2023)."""

    gamma: int = 5

    def goes_on(self, seen: list[float]) -> bool:
        return len(seen) < self.gamma

    def observe(self, seen: list[float], accepted: int) -> None:
        self.gamma = self.gamma + 2 if accepted == len(seen) else max(1, self.gamma - 1)


@dataclass
class Perplexity:
    """Goes on while the perplexity of the draft so far is at most `limit` (Mamou 2024, Appendix G)."""

    limit: float

    def goes_on(self, seen: list[float]) -> bool:
        return math.exp(-sum(math.log(max(value, 1e-9)) for value in seen) / len(seen)) <= self.limit


@dataclass
class Threshold:
    """Stops where the last value falls below τ: transformers' confidence criterion."""

    tau: float

    def goes_on(self, seen: list[float]) -> bool:
        return seen[-1] >= self.tau


class TopProbability(StopClassifier):
    """In the classifier's place: the draft's own largest probability."""

    def __init__(self) -> None:
        super().__init__(k=1, hidden=1)

    def reader(self, do_sample: bool) -> Chance:
        return lambda reading, position, proposed: reading.top[:, 0].tolist()


class PerplexityDrafter(DiscoDrafter):
    """Drafts until the perplexity rule says stop."""

    def __init__(self, draft_model: PreTrainedModel, limit: float, longest: int) -> None:
        super().__init__(draft_model, TopProbability(), rule="draft", max_draft_tokens=longest, lookup=False)
        self.limit = limit

    def rule(self, do_sample: bool) -> Any:
        return Perplexity(self.limit)


class OracleDrafter(DraftModelDrafter):
    """Knows one greedy text, and drafts in each round exactly the tokens that will be accepted."""

    def __init__(self, draft_model: PreTrainedModel, accepted: list[bool]) -> None:
        """
        Args:
            accepted: [N] whether the draft agrees with the target at each new position.
        """
        super().__init__(draft_model)
        self.accepted = accepted

    def start(self, context: DraftContext) -> DraftSession:
        return DraftModelSession(context, self.draft, Foretold(self.accepted, context.prompt_ids.shape[1]))


class Foretold:
    """The rule of one row's chain that ends where the target will disagree."""

    weighs = True

    def __init__(self, accepted: list[bool], prompt: int) -> None:
        self.accepted, self.prompt = accepted, prompt

    def begin(self, sequences: Sequences, *_: Any) -> int:
        start = sequences.lengths[0] - self.prompt
        return next((i for i, fine in enumerate(self.accepted[start:]) if not fine), len(self.accepted))

    def lengths(self, i: int, step: Step, lengths: list[int]) -> list[int]:
        return lengths

    def observe(self, verdict: Verdict) -> None:
        """It knows."""

    def notes(self) -> list[str]:
        return []


@dataclass
class Recalibrated:
    """DISCO's whole-draft rule with log-odds that shift with what the target accepted so far in this text.

    Lossless, as it learns from earlier rounds only; the saved weights stay as they are.
    """

    tau: float
    rate: float
    shift: float = 0.0

    def goes_on(self, seen: list[float]) -> bool:
        return math.prod(map(self._chance, seen)) >= self.tau

    def observe(self, seen: list[float], accepted: int) -> None:
        for i, chance in enumerate(seen[: accepted + 1]):
            self.shift += self.rate * ((i < accepted) - self._chance(chance))

    def _chance(self, chance: float) -> float:
        odds = chance / max(1 - chance, 1e-9)
        return 1 / (1 + math.exp(-self.shift) / max(odds, 1e-9))


class Budgeted:
    """DISCO's rule "budget": drafts on while that promises most tokens per second, or not at all."""

    def __init__(self, acceptance: Acceptance, costs: Costs) -> None:
        """
        Args:
            acceptance: of the values that it reads, kept from text to text.
        """
        self.acceptance, self.costs, self.account, self.looked = acceptance, costs, Account(), False
        self.price = (costs.verify(2) + costs.draft) / costs.verify(1) - 1

    def begins(self) -> bool:
        if self._pays([]):
            self.looked = False
            return True
        self.account.wait()
        self.looked = not self.account.missing(self.price)
        return self.looked

    def goes_on(self, seen: list[float]) -> bool:
        return self._pays(seen)

    def observe(self, seen: list[float], accepted: int) -> None:
        for i, chance in enumerate(seen[: accepted + 1]):
            self.acceptance.observe(DRAWN, i < accepted)
            self.acceptance.observe(DRAWN.at(chance), i < accepted)
        if self.looked:
            self.account.charge(self.price - accepted)

    def _pays(self, seen: list[float]) -> bool:
        kept = list(accumulate((self.acceptance.calibrated(DRAWN.at(chance)) for chance in seen), mul))
        alpha, step = self.acceptance.chance(DRAWN, 0.6), self.costs.draft
        onward = [kept[-1] if kept else 1.0]
        return steps_that_pay([kept], onward, [alpha], self.costs.verify, step, len(seen) * step, enough=1) > 0


@dataclass
class Chosen:
    """A method with its free numbers set on validation."""

    name: str
    choice: str
    values: list[Values]
    make: Callable[[], Rule]
    longest: int = LONGEST
    asks: bool = False
    """whether it pays for asking the classifier"""
