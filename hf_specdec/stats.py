"""`SpeculationStats`: what a run accepted, what it cost, and what it gained."""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .theory import best_window, line_through, tokens_per_second

ENOUGH_ROUNDS = 8
"""verifications, before another window is advised"""
WORTH_SAYING = 1.05
"""times as fast as the window that was set"""
LONGEST_ADVISED = 16
"""tokens per draft"""


@dataclass
class SpeculationStats:
    """Counts and times of one `generate` call; `a + b` sums two runs.

    A *row step* is one row taking part in one verification. With B rows a target call is up to B row steps.
    """

    target_calls: int = 0
    """Forwards of the target, the prefill included."""
    draft_calls: int = 0
    """Forwards of the draft model (0 for drafters without one)."""
    row_steps: int = 0
    """Verifications, counted per row."""
    emitted_tokens: int = 0
    """New tokens kept, the prefill's first one included, padding not."""
    drafted_per_position: Counter[int] = field(default_factory=Counter)
    """How often the i-th draft token (from 0) of a row step was sent to the target."""
    accepted_per_position: Counter[int] = field(default_factory=Counter)
    """How often it was accepted."""
    rejections: int = 0
    """Row steps that ended at a rejected token: one of the target's own stands in its place."""
    acceptance_sum: float = 0.0
    """Sum of min(1, p/q), which is β in the mean (Theorem 3.5), over the drafted tokens that Algorithm 1 tests, where q
    is known. Under block verification those are the ones that it would have tested."""
    acceptance_count: int = 0
    """How many positions those were."""
    sources: Counter[str] = field(default_factory=Counter)
    """Row steps by where the draft came from, for drafters that choose between several."""
    prefill_seconds: float = 0.0
    """In the prompt's forward."""
    draft_seconds: float = 0.0
    """In which the target waited for drafts."""
    verify_seconds: float = 0.0
    """In the verification forwards."""
    total_seconds: float = 0.0
    """From the call's beginning to its end."""
    verify_widths: Counter[int] = field(default_factory=Counter)
    """How many verification forwards had each width (tokens per row)."""
    seconds_by_width: dict[int, float] = field(default_factory=dict)
    """Seconds in the verification forwards of each width."""
    plain_steps: int = 0
    """Forwards that plain decoding makes for the same text, after the prompt's."""
    window: int = 0
    """γ, where it was set to a number; 0 where the drafter chooses it, has none, or runs of several are summed."""
    held_bytes: int = 0
    """Of static buffers and recorded forwards that are kept for later calls, all models' together; `release` lets go of
    one model's. In sums of several the largest."""
    mode: str = ""
    """How the rows ran: `lockstep`, `staggered`, `ragged` or `plain`; in sums of several joined by `+`."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know: why drafting was stopped, why the drafter was dropped, why the call ran plainly."""

    @property
    def drafted_tokens(self) -> int:
        """Draft tokens sent to the target: vLLM's `spec_decode_num_draft_tokens`."""
        return self.drafted_per_position.total()

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens kept: vLLM's `spec_decode_num_accepted_tokens`."""
        return self.accepted_per_position.total()

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per row step, the target's own (bonus or correction) token included; plain decoding has 1.

        vLLM's figure of this name, but that it leaves out row steps without a draft: its `spec_decode_num_drafts` is
        `drafted_per_position[0]`.
        """
        return 1 + self.accepted_tokens / max(self.row_steps, 1)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens, as vLLM's."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of row steps that drafted position i in which it was accepted (all earlier ones were, too).

        vLLM divides its `spec_decode_num_accepted_tokens_per_pos`, which is `accepted_per_position`, by all drafts: the
        same where all are equally long.
        """
        return [self.accepted_per_position[i] / n for i, n in sorted(self.drafted_per_position.items())]

    @property
    def alpha(self) -> float | None:
        """α: the mean of β over tested positions (Corollary 3.6), or tested-and-accepted over tested without q."""
        if self.acceptance_count:
            return self.acceptance_sum / self.acceptance_count
        tested = self.accepted_tokens + self.rejections
        return self.accepted_tokens / tested if tested else None

    @property
    def other_seconds(self) -> float:
        """Time outside prefill, drafting and the verification forwards."""
        told = self.prefill_seconds + self.draft_seconds + self.verify_seconds
        return max(0.0, self.total_seconds - told)  # a round that goes on has told its forward already

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows over the whole call's time, the prefill included."""
        return self.emitted_tokens / self.total_seconds if self.total_seconds > 0 else 0.0

    @property
    def plain_step_seconds(self) -> float | None:
        """T(1), the time of a target forward over one token per row; None where no forward was timed.

        The mean of this call's own forwards of width 1, where there were any (rounds without a draft). Else it lies on
        the line through the widths that were measured, and is no less than the narrowest one's time per token. Where
        there was one width only, that width's time stands for it, which is an upper bound (`gain_is_bound`).
        """
        seconds = {width: self.seconds_by_width[width] / n for width, n in self._timed.items()}
        if not seconds:
            return None
        narrowest = min(seconds)
        return max(self._verify_time()(1), seconds[narrowest] / narrowest) if narrowest > 1 else seconds[1]

    @property
    def estimated_gain(self) -> float | None:
        """Estimated speed-up over plain decoding; None where the call's forwards do not tell (it was decoded plainly).

        (prefill + `plain_steps` · T(1)) over the time that the call took, with T(1) of `plain_step_seconds`. Plain
        decoding's own work between its forwards is not counted, nor that its forwards may take longer than this
        package's (`target/grouped.py`): where forwards are short, or texts long, the true gain is higher. Where
        drafting goes on beside the target on the same cores (PEARL), forwards are slower than plain decoding's: the
        true gain is lower. `hf-specdec bench` measures instead.
        """
        step = self.plain_step_seconds
        if step is None or not self.total_seconds > 0:
            return None
        return (self.prefill_seconds + self.plain_steps * step) / self.total_seconds

    @property
    def gain_is_bound(self) -> bool:
        """Whether `estimated_gain` is an upper bound: all verifications were equally wide, and wider than one token."""
        return len(self._timed) == 1 and 1 not in self._timed

    @property
    def better_window(self) -> int | None:
        """γ that promises at least 5% more tokens per second than the `window` that was set; 0: not to draft.

        By E(γ) / (T(γ + 1) + γ · T_draft) from this run's α and times. None where no window was set, where the one
        that was is fine, and where there is too little to go by: few rounds, several sources of drafts, or several
        rows that advance together. A longer window is advised only where verifications of several widths were timed.
        """
        drafted = sum((width - 1) * n for width, n in self._timed.items())
        rounds = sum(self._timed.values())
        together = any(way in self.mode for way in ("lockstep", "staggered")) and self.row_steps > rounds
        if not self.window or self.alpha is None or rounds < ENOUGH_ROUNDS or not drafted or self.sources or together:
            return None
        alpha, draft, verify = min(self.alpha, 1.0), self.draft_seconds / drafted, self._verify_time()
        largest = LONGEST_ADVISED if len(self._timed) > 1 else min(self.window, LONGEST_ADVISED)
        best = best_window(alpha, verify, draft, largest)
        speeds = [tokens_per_second(alpha, gamma, verify, draft) for gamma in (best, self.window)]
        return best if speeds[0] > WORTH_SAYING * speeds[1] else None

    @property
    def _timed(self) -> dict[int, int]:
        """Forwards by width, of those that were timed."""
        return {width: n for width, n in self.verify_widths.items() if n and self.seconds_by_width.get(width, 0.0) > 0}

    def _verify_time(self) -> Callable[[int], float]:
        timed = self._timed
        return line_through({width: self.seconds_by_width[width] / n for width, n in timed.items()}, timed)

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        if not isinstance(other, SpeculationStats):
            return NotImplemented
        joined: dict[str, Any] = {
            "mode": "+".join(_once(self.mode.split("+") + other.mode.split("+"))),
            "notes": _once(self.notes + other.notes),
            "window": self.window if self.window == other.window else 0,
            "held_bytes": max(self.held_bytes, other.held_bytes),
            "seconds_by_width": {
                width: self.seconds_by_width.get(width, 0.0) + other.seconds_by_width.get(width, 0.0)
                for width in sorted(self.seconds_by_width | other.seconds_by_width)
            },
        }
        summed = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name not in joined}
        return SpeculationStats(**summed, **joined)

    def __radd__(self, other: int) -> "SpeculationStats":
        return self if other == 0 else NotImplemented  # so that sum() works

    def to_dict(self) -> dict[str, Any]:
        """Fields and derived figures as plain JSON values."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        counters = {name: dict(value) for name, value in plain.items() if isinstance(value, dict)}
        derived = {
            name: getattr(self, name)
            for name in (
                "drafted_tokens",
                "accepted_tokens",
                "mean_acceptance_length",
                "draft_acceptance_rate",
                "acceptance_per_position",
                "alpha",
                "other_seconds",
                "tokens_per_second",
                "plain_step_seconds",
                "estimated_gain",
                "gain_is_bound",
                "better_window",
            )
        }
        return plain | counters | {"notes": list(self.notes)} | derived

    def summary(self, gain: float | None = None, measured: bool = False) -> str:
        """The first line of `str()`: the gain, what makes it, and what would make it larger.

        Args:
            gain: where more is known than these figures tell; None for `estimated_gain`.
            measured: whether it was measured beside plain decoding, and not estimated.
        """
        gain, better = self.estimated_gain if gain is None else gain, self.better_window
        if gain is None:
            return f"{self.tokens_per_second:.1f} tokens per second" + ", decoded plainly" * (self.mode == "plain")
        several = self.row_steps > self.verify_widths.total()
        parts = [f"{self.mean_acceptance_length:.1f} tokens per call" + " and row" * several]
        parts.append(f"acceptance rate {self.alpha:.0%}" if self.alpha is not None else "nothing was drafted")
        if better is not None:
            parts.append(f"try num_draft_tokens={better}" if better else "drafting costs more than it gains here")
        said = f"{gain:.2f}x" if measured else f"{'at most ' * self.gain_is_bound}{gain:.1f}x estimated"
        return f"{said}: {'; '.join(parts)}"

    def __str__(self) -> str:
        alpha = "-" if self.alpha is None else f"{self.alpha:.3f}"
        positions = " ".join(f"{rate:.2f}" for rate in self.acceptance_per_position) or "-"
        rows = [
            ("mode", self.mode),
            ("emitted tokens", str(self.emitted_tokens)),
            ("target calls", str(self.target_calls)),
            ("draft calls", str(self.draft_calls)),
            ("tokens per call", f"{self.mean_acceptance_length:.2f}"),
            ("drafted / accepted tokens", f"{self.drafted_tokens} / {self.accepted_tokens}"),
            ("acceptance rate (alpha)", alpha),
            ("accepted of drafted", f"{self.draft_acceptance_rate:.3f}"),
            ("accepted by position", positions),
            ("seconds prefill / draft", f"{self.prefill_seconds:.3f} / {self.draft_seconds:.3f}"),
            ("seconds verify / other", f"{self.verify_seconds:.3f} / {self.other_seconds:.3f}"),
            ("tokens per second", f"{self.tokens_per_second:.1f}"),
        ]
        if self.sources:
            rows.append(("drafts by source", ", ".join(f"{name} {n}" for name, n in self.sources.most_common())))
        return "\n".join([self.summary(), *self.notes, "", *(f"{name:<26} {value}" for name, value in rows)])


def _once(words: list[str]) -> list[str]:
    """Each word that is not empty, where it came first."""
    return list(dict.fromkeys(filter(None, words)))


def text_length(text: Sequence[int], ends: Container[int], padding: int | None = None) -> int:
    """Tokens up to the first that ends a text, with it; of one that nothing ends those before the padding."""
    if end := next((i for i, token in enumerate(text, 1) if token in ends), 0):
        return end
    return max((i for i, token in enumerate(text, 1) if token != padding), default=0)
