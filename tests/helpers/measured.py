"""A measurement of a benchmark, made up."""

from hf_specdec.tools.bench.results import Measurement


def measurement(method: str, prompt: int, repeat: int, tokens: int, seconds: float, **more) -> Measurement:
    figures = {
        "dataset": "set",
        "batch_size": 1,
        "temperature": 0.0,
        "prefill_seconds": 0.1,
        "draft_seconds": 0.2,
        "verify_seconds": 0.3,
        "target_calls": 10,
        "draft_calls": 0 if method == "plain" else 20,
        "row_steps": 9,
        "drafted_per_position": [] if method == "plain" else [9, 9],
        "accepted_per_position": [] if method == "plain" else [6, 3],
        "acceptance_sum": 0.0 if method == "plain" else 12.0,
        "acceptance_count": 0 if method == "plain" else 15,
        "same_text": True,
        "difference": None,
        "peak_memory_bytes": 1000,
    }
    figures |= {"method": method, "prompt": prompt, "repeat": repeat, "tokens": tokens, "seconds": seconds}
    return Measurement(**figures | more)
