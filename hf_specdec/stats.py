"""`SpeculationStats`: what a run accepted and what it cost."""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any


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
    acceptance_sum: float = 0.0
    """Sum of β = Σ min(p, q) (Theorem 3.5) over tested positions, where q is known."""
    acceptance_count: int = 0
    uncorrected_tokens: int = 0
    """Tokens that were drawn from p after a rejection, because who drafted was lost before it could say the rest of q:
    there is no exact draw left then. Only a worker's death in mid-call can bring that about."""
    sources: Counter[str] = field(default_factory=Counter)
    """Row steps by where the draft came from, for drafters that choose between several."""
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0
    verify_widths: Counter[int] = field(default_factory=Counter)
    """How many verification forwards had each width (tokens per row)."""
    mode: str = ""
    """How the rows ran: `lockstep`, `ragged` or `plain`; joined by `+` in sums of different modes."""

    @property
    def drafted_tokens(self) -> int:
        return self.drafted_per_position.total()

    @property
    def accepted_tokens(self) -> int:
        return self.accepted_per_position.total()

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per row step, the target's own (bonus or correction) token included; plain decoding has 1."""
        return 1 + self.accepted_tokens / self.row_steps if self.row_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of row steps that drafted position i in which it was accepted (all earlier ones were, too)."""
        return [self.accepted_per_position[i] / n for i, n in sorted(self.drafted_per_position.items())]

    @property
    def alpha(self) -> float | None:
        """α: the mean of β over tested positions (Corollary 3.6), or tested-and-accepted over tested without q."""
        if self.acceptance_count:
            return self.acceptance_sum / self.acceptance_count
        tested = self.accepted_tokens + self.rejections
        return self.accepted_tokens / tested if tested else None

    @property
    def rejections(self) -> int:
        """Row steps that ended at a rejected token: per position, those that got there less those that passed."""
        reached, previous = 0, self.drafted_per_position[0]
        for i, drafted in sorted(self.drafted_per_position.items()):
            reached += min(previous, drafted) - self.accepted_per_position[i]
            previous = self.accepted_per_position[i]
        return reached

    @property
    def other_seconds(self) -> float:
        """Time outside prefill, drafting and the verification forwards."""
        return self.total_seconds - self.prefill_seconds - self.draft_seconds - self.verify_seconds

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        if not isinstance(other, SpeculationStats):
            return NotImplemented
        summed = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "mode"}
        modes = [part for mode in (self.mode, other.mode) for part in mode.split("+") if part]
        return SpeculationStats(**summed, mode="+".join(dict.fromkeys(modes)))

    def __radd__(self, other: int) -> "SpeculationStats":
        return self if other == 0 else NotImplemented  # so that sum() works

    def to_dict(self) -> dict[str, Any]:
        """Fields and derived figures as plain JSON values."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        counters = {name: dict(value) for name, value in plain.items() if isinstance(value, Counter)}
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
            )
        }
        return plain | counters | derived

    def __str__(self) -> str:
        alpha = "-" if self.alpha is None else f"{self.alpha:.3f}"
        positions = " ".join(f"{rate:.2f}" for rate in self.acceptance_per_position) or "-"
        rows = [
            ("mode", self.mode),
            ("emitted tokens", str(self.emitted_tokens)),
            ("target calls", str(self.target_calls)),
            ("draft calls", str(self.draft_calls)),
            ("drafted / accepted tokens", f"{self.drafted_tokens} / {self.accepted_tokens}"),
            ("mean acceptance length", f"{self.mean_acceptance_length:.2f}"),
            ("draft acceptance rate", f"{self.draft_acceptance_rate:.3f}"),
            ("acceptance per position", positions),
            ("alpha", alpha),
            ("seconds prefill / draft", f"{self.prefill_seconds:.3f} / {self.draft_seconds:.3f}"),
            ("seconds verify / other", f"{self.verify_seconds:.3f} / {self.other_seconds:.3f}"),
        ]
        if self.uncorrected_tokens:
            rows.append(("uncorrected tokens", str(self.uncorrected_tokens)))
        if self.sources:
            rows.append(("drafts by source", ", ".join(f"{name} {n}" for name, n in self.sources.most_common())))
        return "\n".join(f"{name:<26} {value}" for name, value in rows)
