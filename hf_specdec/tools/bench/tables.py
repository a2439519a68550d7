"""A run's figures as they are shown: in the terminal, in Markdown and in HTML."""

from collections.abc import Iterable
from typing import Any

from ...hub.measured import method_name

DIFFERENCES = ("method", "prompt", "new token", "plain's / its own", "gap", "rounding", "near-tie")
"""gap: plain's logit of its own token less that of the other; rounding: one rounding step of the dtype there"""
COLUMNS = (
    "method",
    "tok/s",
    "speed-up",
    "over hf-assisted",
    "tokens/call",
    "accepted",
    "α",
    "c",
    "theory",
    "draft / verify / other",
    "beside forwards",
    "peak memory",
    "same text",
)
NARROW = ("method", "tok/s", "speed-up", "tokens/call", "α", "c", "same text")
"""what a terminal has room for"""
COLUMN_HELP = {
    "tok/s": "new tokens per second of the whole call, prefill included",
    "speed-up": "tok/s divided by plain decoding's, with the 95% bootstrap interval over prompts",
    "over hf-assisted": "tok/s divided by that of transformers' own assisted generation",
    "tokens/call": "mean acceptance length: tokens per verification, the target's own included",
    "accepted": "share of the drafted tokens that were accepted",
    "α": "acceptance rate, the mean of β = Σ min(p, q)",
    "c": "mean time of a draft step divided by that of a step of plain decoding",
    "theory": "speed-up that Theorem 3.8 predicts from α, c and the mean window",
    "draft / verify / other": "decoding time in percent: forwards of the draft, of the target, the rest",
    "beside forwards": "milliseconds of a round outside all forwards",
    "peak memory": "peak memory of a call, weights included: the GPU's, or the process's where there is no GPU",
    "same text": "prompts whose tokens are exactly plain decoding's; in brackets, those that differ at a near tie",
}


def figures(run: dict[str, Any]) -> dict[str, str]:
    """One row, by `COLUMNS`."""
    rival = run["ratios"].get("hf-assisted")
    return {
        "method": run["name"],
        "tok/s": f"{run['tokens_per_second']:.1f}",
        "speed-up": _ratio(run["speedup"], run["speedup_interval"]),
        "over hf-assisted": _ratio(rival["ratio"], rival["interval"]) if rival else "-",
        "tokens/call": f"{run['mean_acceptance_length']:.2f}",
        "accepted": _percent(run["draft_acceptance_rate"]),
        "α": _number(run["alpha"]),
        "c": _number(run["c"]) if run["draft_calls"] else "-",
        "theory": _number(run["predicted_speedup"]),
        "draft / verify / other": _time_split(run),
        "beside forwards": _beside(run),
        "peak memory": f"{run['peak_memory_bytes'] / 2**20:.0f} MiB" if run["peak_memory_bytes"] else "-",
        "same text": same_text(run),
    }


def title_of(run: dict[str, Any]) -> str:
    """What a run was measured on."""
    return f"{run['dataset']}, batch {run['batch_size']}, T={run['temperature']:g}"


def overview(cells: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Speed-ups of all methods (rows, after a header) on all data (columns)."""
    names = dict.fromkeys(run["name"] for runs in cells.values() for run in runs)
    speedups = {(title, run["name"]): f"{run['speedup']:.2f}" for title, runs in cells.items() for run in runs}
    return [["speed-up", *cells], *([name, *(speedups.get((title, name), "-") for title in cells)] for name in names)]


def _ratio(value: float, interval: list[float] | None) -> str:
    return f"{value:.2f}" + (f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else "")


def _time_split(run: dict[str, Any]) -> str:
    if not run["decode_seconds"] > 0:
        return "-"
    parts = (run[f"{part}_seconds"] / run["decode_seconds"] for part in ("draft", "verify", "overhead"))
    return " / ".join(f"{100 * part:.0f}" for part in parts)


def _beside(run: dict[str, Any]) -> str:
    rounds = run["target_calls"] - run["prompts"]  # one forward of each reads its prompt
    return f"{1e3 * run['overhead_seconds'] / rounds:.2f} ms" if rounds > 0 else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def same_text(run: dict[str, Any]) -> str:
    """How many prompts have exactly plain decoding's tokens, and how many of the others differ at a near tie."""
    if run["identical"] is None:
        return "-"
    if run["identical"]:
        return "all"
    parted = run.get("differences") or []
    if run["batch_size"] > 1 or not parted:  # in batches and in later repetitions the place is not looked up
        return "not all"
    ties = sum(difference["near_tie"] for difference in parted)
    same = run["prompts"] - len({difference["prompt"] for difference in parted})
    return f"{same}/{run['prompts']}" + (f" ({ties} tie{'s' * (ties != 1)})" if ties else "")


def differences(runs: Iterable[dict[str, Any]]) -> list[list[str]]:
    """A row of `DIFFERENCES` for each first place where a text parts from plain decoding's."""
    return [
        [
            method_name(run["name"]),
            f"{run['dataset']} {found['prompt']}" + (f", turn {found['turn'] + 1}" if found.get("turn") else ""),
            str(found["position"]),
            " / ".join(
                "(ended)" if token is None else str(token) for token in (found["plain_token"], found["other_token"])
            ),
            *("-" if found[name] is None else f"{found[name]:.3g}" for name in ("gap", "rounding")),
            "yes" if found["near_tie"] else "no",
        ]
        for run in runs
        for found in run.get("differences") or []
    ]
