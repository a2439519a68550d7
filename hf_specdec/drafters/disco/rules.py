"""When to stop: pure functions of the chances that the classifier gave to the tokens drafted in this round."""

import math
from dataclasses import dataclass


@dataclass
class StopRule:
    """Go on while the chance of the last token (Mamou 2024, §3), or of the whole draft so far, is at least τ.

    Over the whole draft this is the choice that yields most tokens per second. With λ tokens per second overall, one
    more draft step of t_draft seconds, and the ΔT_verify by which it widens the verification, pay while

        P(all so far accepted) · a ≥ λ · (t_draft + ΔT_verify),

    where a is the chance of the token still unseen. τ is the right side over the mean a.
    """

    tau: float
    whole_draft: bool

    def goes_on(self, seen: list[float]) -> bool:
        """
        Args:
            seen: C_1 … C_i, the chance that each token drafted so far is accepted if those before it are.
        """
        return (math.prod(seen) if self.whole_draft else seen[-1]) >= self.tau
