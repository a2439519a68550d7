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

Row = dict[str, Any]
ROWS = "rows.jsonl"
WIDE, FLAT = 16, 1.5
"""tokens of a verification, and times what one costs that it may cost at one row, where weights are what takes time"""
BESIDE = 0.2
"""share of a round that may pass beside its forwards"""
BUSY = 0.6
"""share of the time in which a device that decodes plainly should be at work, at 8 B"""
MEMORY = 1.5
"""times plain decoding's peak"""


def read(out: Path) -> dict[str, list[Row]]:
    """Rows by kind. A line that was being written when the run broke off is left out."""
    found: dict[str, list[Row]] = defaultdict(list)
    for line in (out / ROWS).read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row.pop("kind")].append(row)
    return found


def write(out: Path) -> None:
    rows = read(out)
    (out / "report.json").write_text(json.dumps(to_json(rows), indent=1))
    (out / "report.md").write_text(page(rows))


def to_json(rows: dict[str, list[Row]]) -> Row:
    return {"wrong": wrong(rows), "slow": slow(rows), "summary": summaries(rows["timing"])} | rows


# ------------------------------------------------------------------ timings, summed up


def cells(timings: Iterable[Row]) -> dict[tuple[str, int, float], dict[str, list[Row]]]:
    """By target, rows and temperature; then by method."""
    found: dict[tuple[str, int, float], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in timings:
        found[row["size"], row["rows"], row["temperature"]][row["method"]].append(row)
    return found


def summary(rows: list[Row]) -> Row:
    """Of one method in one cell. Ratios, of times per token, are paired by prompt; an interval is the least and the
    most of them."""
    gains = [row["plain_seconds"] / row["plain_tokens"] / (row["seconds"] / row["tokens"]) for row in rows]
    rounds = sum(row.get("rounds", 0) for row in rows)

    def per_round(name: str) -> float | None:
        return 1000 * sum(row[name] for row in rows) / rounds if rounds and name in rows[0] else None

    beside, target, draft = (per_round(f"{part}_seconds") for part in ("beside", "target", "draft"))
    return {
        "prompts": len(rows),
        "ms_per_token": 1000 * sum(r["seconds"] for r in rows) / sum(r["tokens"] for r in rows) * rows[0]["rows"],
        "gain": median(gains),
        "least_gain": min(gains),
        "most_gain": max(gains),
        "tokens_per_call": sum(r["tokens"] for r in rows) / rows[0]["rows"] / (rounds + len(rows)) if rounds else None,
        "target_ms": target,
        "draft_ms": draft,
        "beside_ms": beside,
        "peak_bytes": max(r["peak_bytes"] for r in rows),
        "same_rows": sum(r["same_rows"] for r in rows) if "same_rows" in rows[0] else None,
        "all_rows": sum(r["rows"] for r in rows),
        "near_ties": sum(bool(r.get("difference") and r["difference"]["near_tie"]) for r in rows),
        "parted": sum(bool(r.get("difference") and not r["difference"]["near_tie"]) for r in rows),
        "notes": sorted({note for r in rows for note in [*(r.get("notes") or []), *r["warned"]]}),
    }


def summaries(timings: list[Row]) -> list[Row]:
    return [
        {"size": size, "rows": rows, "temperature": temperature, "method": method} | summary(found)
        for (size, rows, temperature), methods in cells(timings).items()
        for method, found in methods.items()
    ]


# ------------------------------------------------------------------ what is wrong


def wrong(rows: dict[str, list[Row]]) -> list[str]:
    """What a reader should look at first, the gravest first."""
    said = [f"TEST FAILED: {r['test']}: {first_line(r['why'])}" for r in rows["test"] if r["outcome"] == "failed"]
    said += [f"STEP {r['outcome'].upper()}: {r['step']}, see log.txt" for r in rows["step"] if r["outcome"] != "passed"]
    said += [f"COULD NOT BE TIMED: {where(r)}: {first_line(r['why'])}" for r in rows["failed"]]
    said += [f"WRONG TEXT, no near tie: {where(s)}" for s in summaries(rows["timing"]) if s["parted"]]
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
    said, beside = dear(rows), defaultdict(list)
    said += [f"not compiled: {where(r)}" for r in rows["compiled"] if not r["compiled"]]
    known = cells(rows["timing"])
    for (size, batch, temperature), methods in known.items():
        cell = f"{size}, {batch} rows, T={temperature:g}"
        sums = {method: summary(found) for method, found in methods.items()}
        ours = {m: s["gain"] for m, s in sums.items() if not m.startswith(("plain", "hf-"))}
        theirs = {m: s["gain"] for m, s in sums.items() if m.startswith(("plain, ", "hf-"))}
        if ours and max(ours.values()) < 1:
            said.append(f"slower than plain: {cell}: none of ours gains, the best {max(ours.values()):.2f}x")
        losing = [f"{method} at {gain:.2f}x" for method, gain in ours.items() if gain < 0.95 and "8B" in size]
        said += [f"costs time: {cell}: {', '.join(losing)}"] if losing else []
        if ours and theirs and max(theirs.values()) > 1.05 * max(ours.values()):
            best = max(theirs, key=lambda m: theirs[m])
            said.append(
                f"others are faster: {cell}: {best} at {theirs[best]:.2f}x, the best of ours {max(ours.values()):.2f}x"
            )
        beside_target = max((gain for method, gain in ours.items() if method.startswith("pearl")), default=None)
        if "draft" in size and beside_target is not None and beside_target < ours.get("draft_model", 0):
            serial = ours["draft_model"]
            said.append(f"PEARL does not overlap: {cell}: {beside_target:.2f}x, and {serial:.2f}x without it")
        for method, s in sums.items():
            if s["beside_ms"] is None or method.startswith(("plain", "hf-")):
                continue
            whole = s["beside_ms"] + s["target_ms"] + (0 if method.startswith("pearl") else s["draft_ms"])
            if (share := s["beside_ms"] / whole) > BESIDE:
                beside[size].append((share, f"{method}, {batch} rows, T={temperature:g}: {s['beside_ms']:.1f} ms"))
    said += [
        f"time beside the forwards: {size}: {max(found)[0]:.0%} of a round for {max(found)[1]}"
        + (f", and above {BESIDE:.0%} in {len(found) - 1} more" if len(found) > 1 else "")
        for size, found in beside.items()
    ]
    for size, batch in dict.fromkeys((r["size"], r["rows"]) for r in rows["width"]):
        times = {r["width"]: r for r in rows["width"] if (r["size"], r["rows"]) == (size, batch)}
        if batch == 1 and "8B" in size and {1, WIDE} <= set(times):
            ratio = times[WIDE]["seconds"] / times[1]["seconds"]
            if ratio > FLAT:
                said.append(f"wide forwards are dear: {size}: {WIDE} tokens cost {ratio:.1f} times what one costs")
        launched = 1 in times and times[1]["launched_seconds"] > 0.8 * times[1]["seconds"]
        if batch == 1 and launched:
            share = times[1]["launched_seconds"] / times[1]["seconds"]
            said.append(f"bound by launches: {size}: a step is launched in {share:.0%} of its time; capture it")
        worse = [w for w, r in times.items() if r["ours_seconds"] > 1.15 * r["seconds"]]
        if worse:
            said.append(f"our attention is slower than stock: {size}, {batch} rows, at widths {worse}")
    said += [
        f"the device idles: {r['size']}, {r['method']}: at work in {r['busy']:.0%} of the time"
        for r in rows["launches"]
        if r["busy"] is not None and r["busy"] < BUSY and "8B" in r["size"]
    ]
    return said


def dear(rows: dict[str, list[Row]]) -> list[str]:
    return [
        f"memory: {r['drafter']}, {r['rows']} rows: {r['ours_bytes'] / max(1, r['plain_bytes']):.1f} times plain's peak"
        for r in rows["memory"]
        if r["ours_bytes"] > MEMORY * max(r["plain_bytes"], 1 << 24)
    ]


def where(row: Row) -> str:
    known = [str(row["size"])] if "size" in row else []
    known += [f"{row['rows']} rows"] if "rows" in row else []
    known += [f"T={row['temperature']:g}"] if "temperature" in row else []
    return ", ".join([*known, row["method"]] if "method" in row else known)


def first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:300]


# ------------------------------------------------------------------ the page


def page(rows: dict[str, list[Row]]) -> str:
    parts = [heading(rows), tests(rows), times(rows), by_width(rows), launches(rows), waits(rows), memory(rows)]
    return "\n\n".join(filter(None, [*parts, notes(rows)])) + "\n"


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
        f"sources {machine.get('sources')}",
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
    lines += ["## At a glance", glance(rows)] if rows["timing"] else []
    left_out = [r["what"] for r in rows["skipped"]]
    if left_out:
        lines += ["## Left out, as the time was over", "\n".join(f"- {line}" for line in left_out)]
    return "\n\n".join(filter(None, lines))


def listed(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) or "Nothing that this page would notice."


def glance(rows: dict[str, list[Row]]) -> str:
    """How many times as fast as plain decoding, method by method."""
    known = cells(rows["timing"])
    methods = dict.fromkeys(method for found in known.values() for method in found if method != "plain")
    head = ["times plain", *(f"{size}, {batch} × T={temperature:g}" for size, batch, temperature in known)]
    return table(
        head,
        [
            [method, *(f"{summary(found[method])['gain']:.2f}" if method in found else "-" for found in known.values())]
            for method in methods
        ],
    )


def tests(rows: dict[str, list[Row]]) -> str:
    by_file: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    for row in rows["test"]:
        file = row["test"].split("::")[0]
        by_file[file][row["outcome"]] += 1
        seconds[file] += row["seconds"]
    lines = [[file, n["passed"], n["failed"], n["skipped"], f"{seconds[file]:.0f}"] for file, n in by_file.items()]
    skipped = [f"- skipped: {r['test']}: {first_line(r['why'])}" for r in rows["test"] if r["outcome"] == "skipped"]
    ties = [[r["drafter"], r["tokens"], r["prompts"], r["near_ties"], r["other"]] for r in rows["bfloat16"]]
    return "\n\n".join(
        filter(
            None,
            [
                "## Tests" if lines else "",
                table(["file", "passed", "failed", "skipped", "seconds"], lines),
                "\n".join(skipped),
                "Texts that part from plain decoding's in bfloat16:" if ties else "",
                table(["drafter", "tokens", "prompts", "at a near tie", "elsewhere"], ties),
            ],
        )
    )


def times(rows: dict[str, list[Row]]) -> str:
    parts = ["## Times"] if rows["timing"] else []
    targets = {r["size"]: r for r in rows["target"]}
    for (size, batch, temperature), methods in cells(rows["timing"]).items():
        about = targets.get(size)
        what = f", {about['parameters'] / 1e9:.2f} B parameters in {about['layers']} layers" if about else ""
        lines = []
        for method, found in methods.items():
            s = summary(found)
            same = "-" if s["same_rows"] is None else f"{s['same_rows']} of {s['all_rows']}"
            same += f" ({s['near_ties']} near ties)" * bool(s["near_ties"]) + f" **{s['parted']} WRONG**" * bool(
                s["parted"]
            )
            lines.append(
                [
                    method,
                    f"{s['ms_per_token']:.2f}",
                    f"{s['gain']:.2f}",
                    f"{s['least_gain']:.2f} to {s['most_gain']:.2f}",
                    s["prompts"],
                    shown(s["tokens_per_call"]),
                    shown(s["target_ms"]),
                    shown(s["draft_ms"]),
                    shown(s["beside_ms"]),
                    f"{s['peak_bytes'] / 2**30:.2f}",
                    same,
                ]
            )
        parts.append(f"### {size}{what}: {batch} {'row' if batch == 1 else 'rows'}, T={temperature:g}")
        parts.append(
            table(
                [
                    "method",
                    "ms per token and row",
                    "times plain",
                    "least to most",
                    "prompts",
                    "tokens per call",
                    "target ms per round",
                    "draft ms",
                    "beside ms",
                    "peak GiB",
                    "same text",
                ],
                lines,
            )
        )
    return "\n\n".join(parts)


def by_width(rows: dict[str, list[Row]]) -> str:
    parts = ["## A forward by its width"] if rows["width"] else []
    for size, batch in dict.fromkeys((r["size"], r["rows"]) for r in rows["width"]):
        found = {r["width"]: r for r in rows["width"] if (r["size"], r["rows"]) == (size, batch)}
        one = found[min(found)]["seconds"]
        met: dict[int, list[float]] = defaultdict(list)
        for r in rows["timing"]:
            if (r["size"], r["rows"]) == (size, batch) and not r["method"].startswith(("plain", "hf-")):
                for width, (count, seconds) in r.get("seconds_by_width", {}).items():
                    met[int(width)] += [seconds] * count
        lines = [
            [
                width,
                f"{1000 * r['seconds']:.2f}",
                f"{r['seconds'] / one:.2f}",
                f"{1000 * r['launched_seconds']:.2f}",
                f"{1000 * r['ours_seconds']:.2f}",
                f"{1000 * median(met[width]):.2f} ({len(met[width])})" if met[width] else "-",
            ]
            for width, r in found.items()
        ]
        parts.append(f"### {size}, {batch} {'row' if batch == 1 else 'rows'}")
        head = ["width", "ms", "times one token's", "ms to launch", "ms, our attention", "ms in our rounds (count)"]
        parts.append(table(head, lines))
    return "\n\n".join(parts)


def launches(rows: dict[str, list[Row]]) -> str:
    lines = [
        [
            r["size"],
            r["method"],
            r["calls"],
            r["draft_calls"],
            f"{r['operations']:.0f}",
            f"{r['launches']:.0f}",
            f"{r['copies']:.1f}",
            f"{r['waits']:.1f}",
            "-" if r["busy"] is None else f"{r['busy']:.0%}",
        ]
        for r in rows["launches"]
    ]
    head = ["target", "method", "calls", "draft calls", "operations a call", "launches", "copies", "waits", "at work"]
    return "## What a call of the target launches\n\n" + table(head, lines) if lines else ""


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
        [r["drafter"], r["rows"], *(f"{r[f'{part}_bytes'] / 2**20:.1f}" for part in ("plain", "ours", "left"))]
        for r in rows["memory"]
    ]
    head = ["drafter", "rows", "plain MiB", "with it MiB", "left after MiB"]
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
