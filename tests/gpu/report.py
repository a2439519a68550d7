"""From `rows.jsonl` a page that says first what is wrong, then all figures; and the same as JSON.

python tests/gpu/report.py gpu-report
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from steps import Row, read

REFERENCES = ("plain, static cache", "plain, captured")
"""what gains are over: the first one that was timed"""
WIDE, FLAT = 16, 1.5
"""tokens of a verification, and times what one costs that it may cost at one row, where weights are what takes time"""
BESIDE = 0.2
"""share of a round that may pass beside its forwards"""
BUSY = 0.6
"""share of the time in which a device that decodes plainly should be at work, at 8 B"""
MEMORY = 1.5
"""times plain decoding's peak"""
Cell = dict[str, list[Row]]
"""timings by method"""


def write(out: Path) -> None:
    rows = read(out)
    (out / "report.json").write_text(json.dumps(to_json(rows), indent=1))
    (out / "report.md").write_text(page(rows))


def to_json(rows: dict[str, list[Row]]) -> Row:
    return {"wrong": wrong(rows), "slow": slow(rows), "summary": summaries(rows["timing"])} | rows


# ------------------------------------------------------------------ timings, summed up


def cells(timings: Iterable[Row]) -> dict[tuple[str, int, float], Cell]:
    """By target, rows and temperature; then by method."""
    found: dict[tuple[str, int, float], Cell] = defaultdict(lambda: defaultdict(list))
    for row in timings:
        found[row["size"], row["rows"], row["temperature"]][row["method"]].append(row)
    return found


def ms_per_token(row: Row) -> float:
    return float(1000 * row["seconds"] / row["tokens"] * row["rows"])


def is_part(texts: list[list[int]], whole: list[list[int]]) -> bool:
    return all(text == longer[: len(text)] for text, longer in zip(texts, whole, strict=True))


def summary(cell: Cell, method: str) -> Row:
    """Gains are paired by prompt; an interval is the least and the most of them."""
    rows = cell[method]
    reference = {row["prompt"]: row for name in reversed(REFERENCES) for row in cell.get(name, ())}
    gains = [ms_per_token(reference[r["prompt"]]) / ms_per_token(r) for r in rows if r["prompt"] in reference]
    same = [is_part(r["text"], reference[r["prompt"]]["text"]) for r in rows if r["prompt"] in reference]
    rounds = sum(row.get("rounds", 0) for row in rows)

    def per_round(name: str) -> float | None:
        return 1000 * sum(row[name] for row in rows) / rounds if rounds and name in rows[0] else None

    beside, target, draft = (per_round(f"{part}_seconds") for part in ("beside", "target", "draft"))
    return {
        "prompts": len(rows),
        "ms_per_token": 1000 * sum(r["seconds"] for r in rows) / sum(r["tokens"] for r in rows) * rows[0]["rows"],
        "gain": median(gains) if gains else None,
        "least_gain": min(gains, default=None),
        "most_gain": max(gains, default=None),
        "tokens_per_call": sum(r["tokens"] for r in rows) / rows[0]["rows"] / (rounds + len(rows)) if rounds else None,
        "target_ms": target,
        "draft_ms": draft,
        "beside_ms": beside,
        "peak_bytes": max(r["peak_bytes"] for r in rows),
        "same_texts": sum(same),
        "notes": sorted({note for r in rows for note in [*(r.get("notes") or []), *r["warned"]]}),
    }


def summaries(timings: list[Row]) -> list[Row]:
    return [
        {"size": size, "rows": rows, "temperature": temperature, "method": method} | summary(cell, method)
        for (size, rows, temperature), cell in cells(timings).items()
        for method in cell
    ]


# ------------------------------------------------------------------ what is wrong


def wrong(rows: dict[str, list[Row]]) -> list[str]:
    """What a reader should look at first, the gravest first."""
    ended = {r["step"] for r in rows["step"]}
    said = [f"TEST FAILED: {r['test']}: {first_line(r['why'])}" for r in rows["test"] if r["outcome"] == "failed"]
    said += [f"STEP {r['outcome'].upper()}: {r['step']}, see log.txt" for r in rows["step"] if r["outcome"] != "passed"]
    said += [f"STEP BROKE OFF: {r['step']}, see log.txt" for r in rows["begun"] if r["step"] not in ended]
    said += [f"COULD NOT BE TIMED: {where(r)}: {first_line(r['why'])}" for r in rows["failed"]]
    said += [f"WRONG TEXT, no near tie: {where(r)}, prompt {r['prompt']}" for r in rows["parted"] if not r["near_tie"]]
    said += [
        f"A DRAFTER FAILED: {where(s)}: {n}" for s in summaries(rows["timing"]) for n in s["notes"] if "dropped" in n
    ]
    said += [
        f"waits for the device: {r['drafter']}, {r['rows']} rows, {'sampled' if r['sampled'] else 'greedy'}: "
        f"{r['waits']:.1f} a round where {r['allowed']:.1f} are allowed; at {', '.join(r['places'])}"
        for r in rows["waits"]
        if r["over"]
    ]
    return said


def slow(rows: dict[str, list[Row]]) -> list[str]:
    """Figures of time and memory that are not what they should be; those of a dry run are not judged."""
    if is_dry(rows):
        return []
    said = dear(rows) + [f"not compiled: {where(r)}" for r in rows["compiled"] if not r["compiled"]]
    for (size, batch, temperature), cell in cells(rows["timing"]).items():
        here = f"{size}, {batch} rows, T={temperature:g}"
        gains = {method: found["gain"] for method in cell if (found := summary(cell, method))["gain"]}
        ours = {method: gain for method, gain in gains.items() if not method.startswith("plain")}
        if not ours:
            continue
        if max(ours.values()) < 1:
            said.append(f"none of ours gains: {here}: the best {max(ours.values()):.2f}x")
        losing = [
            f"{method} at {gain:.2f}x" for method, gain in ours.items() if gain < 0.95 * gains.get(REFERENCES[1], 0)
        ]
        said += [f"costs time: {here}: {', '.join(losing)}"] if losing else []
        overlapping = max((gain for method, gain in ours.items() if method.startswith("pearl")), default=None)
        serial = ours.get("draft_model, captured", 0)
        if overlapping is not None and overlapping < serial:
            said.append(f"PEARL does not overlap: {here}: {overlapping:.2f}x, and {serial:.2f}x without it")
        said += [f"time beside the forwards: {here}: {line}" for line in map(beside, ours, [cell] * len(ours)) if line]
    for size, times in by_width(rows).items():
        if {1, WIDE} <= set(times) and times[WIDE] > FLAT * times[1]:
            said.append(f"wide forwards are dear: {size}: {WIDE} tokens cost {times[WIDE] / times[1]:.1f} times one's")
    said += [
        f"the device idles: {r['size']}, {r['method']}: at work in {busy(r):.0%} of the time"
        for r in rows["launches"]
        if busy(r) < BUSY
    ]
    return said


def beside(method: str, cell: Cell) -> str:
    """What to say of the time of its rounds that is no forward's; nothing where that is little."""
    s = summary(cell, method)
    if s["beside_ms"] is None:
        return ""
    whole = s["beside_ms"] + s["target_ms"] + (0 if method.startswith("pearl") else s["draft_ms"])
    return f"{method}: {s['beside_ms']:.1f} of {whole:.1f} ms a round" * (s["beside_ms"] > BESIDE * whole)


def by_width(rows: dict[str, list[Row]]) -> dict[str, dict[int, float]]:
    """Seconds of the target's replays at one row, by size and width; of a width's several steps the fastest."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for r in rows["replay"]:
        if r["model"] == "target" and r["rows"] == 1 and isinstance(r["width"], int):
            times = found[r["size"]]
            times[r["width"]] = min(r["seconds"], times.get(r["width"], r["seconds"]))
    return found


def busy(row: Row) -> float:
    return float(row["busy_seconds"] / row["seconds"])


def dear(rows: dict[str, list[Row]]) -> list[str]:
    plain = {(r["size"], r["rows"]): r["most_bytes"] for r in rows["memory"] if r["method"] in REFERENCES}
    times = [(r, r["most_bytes"] / max(1, plain.get((r["size"], r["rows"]), 1 << 60))) for r in rows["memory"]]
    return [f"memory: {where(r)}: {share:.1f} times plain's" for r, share in times if share > MEMORY]


def where(row: Row) -> str:
    known = [str(row["size"])] if "size" in row else []
    known += [f"{row['rows']} rows"] if "rows" in row else []
    known += [f"T={row['temperature']:g}"] if "temperature" in row else []
    return ", ".join([*known, row["method"]] if "method" in row else known)


def first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:300]


# ------------------------------------------------------------------ the page


def page(rows: dict[str, list[Row]]) -> str:
    parts = (heading, replays, times, by_kind, rounds, memory, tests, waits, notes)
    return "\n\n".join(filter(None, (part(rows) for part in parts))) + "\n"


def is_dry(rows: dict[str, list[Row]]) -> bool:
    return not rows["machine"] or rows["machine"][0]["device_type"] != "cuda"


def heading(rows: dict[str, list[Row]]) -> str:
    machine = rows["machine"][0] if rows["machine"] else {}
    versions = machine.get("versions", {})
    outcomes = Counter(r["outcome"] for r in rows["test"])
    facts = [
        f"driver {machine['driver']}" if machine.get("driver") else None,
        f"CUDA {machine['cuda']}" if machine.get("cuda") else None,
        *(f"{name} {versions[name]}" for name in ("torch", "transformers", "triton") if versions.get(name)),
        f"commit {machine.get('git_revision')}",
    ]
    lines = [
        f"# {machine.get('device', 'unknown device')}, {machine.get('time', '')[:10]}",
        ", ".join(filter(None, facts)) + ".",
        "**A dry run on a CPU: its times mean nothing, its texts do.**" if is_dry(rows) else None,
        f"Tests: {', '.join(f'{n} {what}' for what, n in outcomes.items()) or 'none'}. "
        f"Cells timed: {len(cells(rows['timing']))}. Steps: "
        + ", ".join(f"{r['step']} {r['seconds']:.0f} s" for r in rows["step"])
        + ".",
        "## What is wrong",
        listed(wrong(rows)),
        "## What is slow",
        "A dry run's times are not judged." if is_dry(rows) else listed(slow(rows)),
    ]
    left_out = [r["what"] for r in rows["skipped"]]
    if left_out:
        lines += ["## Left out, as the time was over", "\n".join(f"- {line}" for line in left_out)]
    return "\n\n".join(filter(None, lines))


def listed(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) or "Nothing that this page would notice."


def tests(rows: dict[str, list[Row]]) -> str:
    by_file: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    for row in rows["test"]:
        file = row["test"].split("::")[0]
        by_file[file][row["outcome"]] += 1
        seconds[file] += row["seconds"]
    lines = [[file, n["passed"], n["failed"], n["skipped"], f"{seconds[file]:.0f}"] for file, n in by_file.items()]
    skipped = [f"- skipped: {r['test']}: {first_line(r['why'])}" for r in rows["test"] if r["outcome"] == "skipped"]
    parts = ["## Tests", table(["file", "passed", "failed", "skipped", "seconds"], lines), "\n".join(skipped)]
    return "\n\n".join(filter(None, parts)) if lines else ""


def times(rows: dict[str, list[Row]]) -> str:
    parts = ["## Times"] if rows["timing"] else []
    parted = Counter((r["size"], r["rows"], r["temperature"], r["method"]) for r in rows["parted"] if r["near_tie"])
    for (size, batch, temperature), cell in cells(rows["timing"]).items():
        lines = []
        for method, s in ((method, summary(cell, method)) for method in cell):
            ties = parted[size, batch, temperature, method]
            lines.append(
                [
                    method,
                    f"{s['ms_per_token']:.2f}",
                    shown(s["gain"]),
                    f"{shown(s['least_gain'])} to {shown(s['most_gain'])}",
                    s["prompts"],
                    *(shown(s[name]) for name in ("tokens_per_call", "target_ms", "draft_ms", "beside_ms")),
                    f"{s['peak_bytes'] / 2**30:.2f}",
                    f"{s['same_texts']} ({ties} near ties)" if ties else s["same_texts"],
                ]
            )
        parts.append(f"### {size}: {batch} {'row' if batch == 1 else 'rows'}, T={temperature:g}")
        head = ["method", "ms per token and row", "times compiled", "least to most", "prompts", "tokens per call"]
        head += ["target ms per round", "draft ms", "beside ms", "peak GiB", "same texts"]
        parts.append(table(head, lines))
    return "\n\n".join(parts)


def by_kind(rows: dict[str, list[Row]]) -> str:
    """Milliseconds per token at one row, greedy, by what was asked."""
    parts = []
    for (size, batch, temperature), cell in cells(rows["timing"]).items():
        kinds = list(dict.fromkeys(row["asked"] for found in cell.values() for row in found))
        if batch > 1 or temperature or len(kinds) < 2:
            continue
        lines = []
        for method, found in cell.items():
            times = [[ms_per_token(row) for row in found if row["asked"] == kind] for kind in kinds]
            lines.append([method, *(shown(median(each) if each else None) for each in times)])
        parts += [f"### {size}: ms per token by kind of prompt", table(["method", *kinds], lines)]
    return "\n\n".join(parts)


def replays(rows: dict[str, list[Row]]) -> str:
    lines = [
        [
            r["size"],
            r["model"],
            r["step"],
            r["slots"],
            *(f"{1000 * r[name]:.2f}" for name in ("seconds", "seconds_behind", "busy_seconds")),
            f"{r['kernels']:.0f}",
            named(r["attention"][:1]),
            named(r["dearest"][:4]),
        ]
        for r in rows["replay"]
    ]
    head = [
        "target",
        "model",
        "step",
        "slots",
        "ms",
        "ms behind",
        "ms in kernels",
        "kernels",
        "attention",
        "dearest, ms",
    ]
    return "## Recorded steps\n\n" + table(head, lines) if lines else ""


def rounds(rows: dict[str, list[Row]]) -> str:
    lines = [
        [
            r["size"],
            r["method"],
            r["calls"],
            *(f"{r[kind]:.1f}" for kind in ("operations", "launches", "copies", "waits", "kernels")),
            f"{busy(r):.0%}",
            named(r["dearest"][:4]),
        ]
        for r in rows["launches"]
    ]
    head = [
        "target",
        "method",
        "calls",
        "operations a call",
        "launches",
        "copies",
        "waits",
        "kernels",
        "at work",
        "dearest, ms",
    ]
    return "## What a call of the target launches\n\n" + table(head, lines) if lines else ""


def named(kernels: list[tuple[str, float, float]]) -> str:
    return ", ".join(f"{count:.0f} `{name[:60]}` {1000 * seconds:.2f}" for name, count, seconds in kernels) or "-"


def waits(rows: dict[str, list[Row]]) -> str:
    lines = [
        [
            r["drafter"],
            r["rows"],
            "sampled" if r["sampled"] else "greedy",
            r["rounds"],
            f"{r['waits']:.2f}",
            shown(r["allowed"]),
            f"{r['of_transformers']:.2f}",
            ", ".join(f"{place} {n}" for place, n in list(r["places"].items())[:3]),
        ]
        for r in rows["waits"]
    ]
    head = ["drafter", "rows", "how", "rounds", "waits a round", "allowed", "in transformers", "where"]
    return "## Waits for the device\n\n" + table(head, lines) if lines else ""


def memory(rows: dict[str, list[Row]]) -> str:
    lines = [
        [r["size"], r["rows"], r["method"], *(f"{r[f'{part}_bytes'] / 2**30:.2f}" for part in ("most", "held"))]
        for r in rows["memory"]
    ]
    head = ["target", "rows", "method", "most GiB", "held GiB"]
    return "## Memory of a call\n\n" + table(head, lines) if lines else ""


def notes(rows: dict[str, list[Row]]) -> str:
    said = [f"- {where(r)}: compiled in {r['warming_seconds']:.0f} s, its first two calls" for r in rows["compiled"]]
    said += [f"- {where(s)}: {note}" for s in summaries(rows["timing"]) for note in s["notes"]]
    return "## What the drafters said\n\n" + "\n".join(said) if said else ""


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def table(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    if not lines:
        return ""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [head, rule, *lines])


if __name__ == "__main__":
    write(Path(sys.argv[1]))
