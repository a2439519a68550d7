"""What each source of drafts is worth: accepted tokens and time, measured while it runs."""

from math import prod

from ...theory import expected_tokens
from ..draft_model.window import WindowTuner
from ..prompt_lookup.rates import MEMORY, CopyRates


class Meter(CopyRates):
    """Acceptance of lookups by match length, acceptance of the draft model, and the time of every part of a round."""

    def __init__(self, max_match: int) -> None:
        super().__init__(max_match)
        self.model = WindowTuner(memory=MEMORY)
        """α and time per draft token of the draft model; verification times by width, whatever was drafted."""
        self.window = 1
        """Tokens that the draft model drafted last."""

    def observe_draft(self, seconds: float, window: int) -> None:
        """The draft model drafted `window` tokens in this time."""
        self.window = max(1, window)
        self.model.observe_draft(seconds / self.window)

    def lookup_pays(
        self, matches: list[int], lengths: list[int], nodes: list[int], lockstep: bool, candidates: int = 1
    ) -> bool:
        """Whether copying promises more tokens per second than the draft model.

        Args:
            matches: [B] length of each row's match.
            lengths: [B] tokens to copy after it, in the likeliest branch.
            nodes: [B] tokens in all branches, which the verification is charged for.
            lockstep: all rows advance by the shortest acceptance.
            candidates: tokens that the draft model tries at each position.
        """
        if not any(lengths):
            return False
        if self.model.draft_seconds is None or not self.model.verify_seconds:
            return False  # the draft model has never been measured
        alpha, rescue = self.model.alpha, self.model.rescue if candidates > 1 else 0.0
        verify_seconds = self.model.verify_time()

        def rate(
            alphas: list[float], gammas: list[int], widths: list[int], draft_seconds: float, rescue: float = 0.0
        ) -> float:
            if lockstep:
                alphas, gammas, widths = [prod(alphas)], [min(gammas)], [min(widths)]
            tokens = sum(expected_tokens(a, g, rescue) for a, g in zip(alphas, gammas, strict=True))
            return tokens / (verify_seconds(max(widths) + 1) + draft_seconds)

        copying = rate([self.alpha(match) for match in matches], lengths, nodes, 0.0)
        rows, gamma = len(matches), self.window
        seconds = gamma * self.model.draft_seconds
        return copying > rate([alpha] * rows, [gamma] * rows, [candidates * gamma] * rows, seconds, rescue)
