"""`Counts`: what a server has answered, under the names of vLLM's metrics, which dashboards read."""

from collections import Counter
from threading import Lock

from ..stats import SpeculationStats

METRICS = {
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "New tokens.",
    "request_success": "Requests that have ended, by the reason why.",
    "spec_decode_num_drafts": "Verifications of a draft, counted per row.",
    "spec_decode_num_draft_tokens": "Draft tokens sent to the target.",
    "spec_decode_num_accepted_tokens": "Draft tokens kept.",
    "spec_decode_num_accepted_tokens_per_pos": "Draft tokens kept, by their position in the draft.",
}
"""names without prefix and suffix, and what they count"""
REASONS = ("stop", "length", "abort", "error")
"""why requests end, in vLLM's words"""
BY_POSITION, BY_REASON = "spec_decode_num_accepted_tokens_per_pos", "request_success"
"""metrics that have a sample for each"""


class Counts:
    """Of all requests that have ended. Threads may add to them at the same time."""

    def __init__(self) -> None:
        plain = [(name, "") for name in METRICS if name not in (BY_POSITION, BY_REASON)]
        self._samples = Counter(dict.fromkeys(plain + [(BY_REASON, _label(reason)) for reason in REASONS], 0))
        """by metric and label"""
        self._lock = Lock()

    def add(self, reason: str, prompt_tokens: int, stats: SpeculationStats) -> None:
        """A request has ended.

        Args:
            reason: one of `REASONS`.
        """
        new = {
            ("prompt_tokens", ""): prompt_tokens,
            ("generation_tokens", ""): stats.emitted_tokens,
            (BY_REASON, _label(reason)): 1,
            ("spec_decode_num_drafts", ""): stats.drafted_per_position[0],  # every draft has a first token
            ("spec_decode_num_draft_tokens", ""): stats.drafted_tokens,
            ("spec_decode_num_accepted_tokens", ""): stats.accepted_tokens,
        }
        by_position = {(BY_POSITION, f',position="{i}"'): n for i, n in sorted(stats.accepted_per_position.items())}
        with self._lock:
            self._samples.update(new | by_position)

    def exposition(self, model_name: str) -> str:
        """All of them in Prometheus' text format."""
        for mark, escaped in (("\\", r"\\"), ('"', r"\""), ("\n", r"\n")):
            model_name = model_name.replace(mark, escaped)
        with self._lock:
            samples = list(self._samples.items())
        lines = []
        for metric, meaning in METRICS.items():
            name = f"vllm:{metric}_total"
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} counter"]
            labels = f'engine="0",model_name="{model_name}"'
            lines += [f"{name}{{{labels}{own}}} {value}" for (of, own), value in samples if of == metric]
        return "\n".join(lines) + "\n"


def _label(reason: str) -> str:
    return f',finished_reason="{reason}"'
