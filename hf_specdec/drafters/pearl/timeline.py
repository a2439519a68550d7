"""When each model was busy: Figure 3 of a real run."""

from dataclasses import dataclass, field

Spans = list[tuple[float, float]]
"""(began, ended) by `clock.now`"""


@dataclass
class Timeline:
    """One `generate` call, its decoding rounds (the prompt's prefill is left out)."""

    target: Spans = field(default_factory=list)
    """the target's forwards"""
    draft: Spans = field(default_factory=list)
    """draft steps whose token arrived"""
    waited: float = 0.0
    """seconds that the target stood still for the draft"""
    tests: list[tuple[int, int]] = field(default_factory=list)
    """per round, draft tokens tested and passed, summed over its rows"""
    corrections: list[tuple[int, int]] = field(default_factory=list)
    """per round, rows that failed a test, and those of them whose correction had been drafted for"""

    def seconds(self) -> float:
        """From the first forward to the last."""
        spans = self.target + self.draft
        return max(end for _, end in spans) - min(start for start, _ in spans) if spans else 0.0

    def utilisation(self) -> dict[str, float]:
        """Busy share of each model, and the share of time in which the target waited for the draft."""
        seconds = self.seconds() or 1.0
        return {
            "target": sum(end - start for start, end in self.target) / seconds,
            "draft": sum(end - start for start, end in self.draft) / seconds,
            "waited": self.waited / seconds,
        }

    def mean_accepted_run(self) -> float | None:
        """Draft tokens accepted in a row, from one rejection to the next, however many rounds that takes (Table 4).

        With one α for all tokens it is α / (1 − α) in the mean. None where none was rejected.
        """
        rejected = sum(rows for rows, _ in self.corrections)
        return sum(passed for _, passed in self.tests) / rejected if rejected else None

    def text(self, width: int = 100) -> str:
        """Two lines of blocks for a terminal: what each model did, from left to right."""
        seconds, start = self.seconds() or 1.0, min((s for s, _ in self.target + self.draft), default=0.0)

        def line(spans: Spans) -> str:
            busy = [0.0] * width
            for began, ended in spans:
                for i in range(width):
                    left, right = start + seconds * i / width, start + seconds * (i + 1) / width
                    busy[i] += max(0.0, min(ended, right) - max(began, left)) * width / seconds
            return "".join(" ░▒▓█"[min(4, round(4 * share))] for share in busy)

        use, run = self.utilisation(), self.mean_accepted_run()
        in_a_row = "" if run is None else f"; {run:.1f} draft tokens accepted in a row"
        return (
            f"target {line(self.target)} {use['target']:.0%} busy\n"
            f"draft  {line(self.draft)} {use['draft']:.0%} busy\n"
            f"{1000 * seconds:.0f} ms, {len(self.tests)} rounds; the target waited for {use['waited']:.0%} of it"
            f"{in_a_row}"
        )
