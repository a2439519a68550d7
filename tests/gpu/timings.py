"""Milliseconds on one target: plain decoding, transformers' own speculation, and our drafters.

    DEVICE=cuda OUT=gpu-report PYTHONPATH=. python tests/gpu/timings.py 8B --seconds 100

With `--gguf` the target is a real model, made as costly, which answers prompts of the package's sets.

Every result is a line of `OUT/rows.jsonl` as soon as it is known. All methods decode a prompt in turn, prompt after
prompt, until the time is over: an interrupted run has fewer prompts, not fewer methods.
"""

import argparse
import gc
import statistics
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from place import DEVICE, note, synchronize
from subjects import DRAFT, DRY, SIZES, TURNS, Subject, load_pair, load_real, make_costly
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from hf_specdec import warm_up
from hf_specdec.errors import SpeculationWarning
from hf_specdec.target.buffers import slots_for
from hf_specdec.target.grouped import grouped_attention
from hf_specdec.target.inputs import CACHE
from hf_specdec.tools.bench.methods import Method, build_method
from hf_specdec.tools.instruments.audit import Audit
from hf_specdec.tools.instruments.meter import Meter, metered
from hf_specdec.tools.instruments.provenance import peak_memory_bytes, reset_peak_memory
from hf_specdec.tools.loading.sampling import sampling_at

NEW = 8 if DRY else 128
"""tokens of each generation"""
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 32 if DRY else 256
"""tokens in the cache, where widths are timed"""
METHODS = (
    "plain",
    "hf-assisted",
    "hf-prompt-lookup",
    "prompt_lookup",
    "suffix",
    "draft_model",
    "hybrid",
    "pearl:worker=thread",
    "plain, captured",
    "prompt_lookup, captured",
    "draft_model, captured",
    "hybrid, captured",
)
"""after a comma how forwards run, where that is not as usual"""
STATIC = "plain, static cache"
"""which transformers compiles on a GPU"""
CAPTURED = tuple(name for name in METHODS if name.endswith("captured"))
ON_ONE_CARD = (
    "plain",
    "draft_model",
    "pearl:worker=thread",
    "pearl:worker=process",
    "draft_model, captured",
    "pearl:worker=process, captured",
)
"""serial drafting, and drafting beside the target: on a stream of its own, and from a process of its own"""

Cells = Mapping[tuple[int, float], Sequence[str]]
"""by rows and temperature: methods"""
OF_THE_PAIR: Cells = {(rows, temperature): METHODS for rows in (1, 8) for temperature in (0.0, 1.0)}
OF_REAL: Cells = {
    (1, 0.0): ("plain", STATIC, "hf-assisted", "hf-prompt-lookup", "hybrid", *CAPTURED),
    (1, 1.0): ("plain", *CAPTURED),
    (8, 0.0): ("plain", STATIC, *CAPTURED),
}
"""there is time for several prompts, and not for all methods"""
OF_PEARL: Cells = {(1, 0.0): ON_ONE_CARD, (1, 1.0): ON_ONE_CARD}
PROFILED = ("plain", "hybrid", *CAPTURED)


class Clock:
    """How much of this process's time is left."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds

    def left(self) -> float:
        return self.end - time.perf_counter()


# ------------------------------------------------------------------ one generation


@dataclass
class Run:
    """What one call of `generate` took."""

    seconds: float
    """by the wall, from the call to the last token on the host"""
    event_seconds: float | None
    """the same by the device's own events"""
    meter: Meter | None
    text: list[list[int]]
    peak_bytes: int
    warned: list[str]


def generate(target: Any, inputs: dict[str, Tensor], method: Method, meter: bool = True, **options: Any) -> Run:
    reset_peak_memory(DEVICE)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if not DRY else []
    with warnings.catch_warnings(record=True) as caught, method.prepared():
        warnings.simplefilter("always", SpeculationWarning)
        synchronize()
        began = time.perf_counter()
        if events:
            events[0].record()
        with metered(target, method.draft) if meter else _unmetered() as found:
            output = target.generate(**inputs, **options, **method.kwargs)
        if events:
            events[1].record()
        synchronize()
        seconds = time.perf_counter() - began
    by_events = events[0].elapsed_time(events[1]) / 1000 if events else None
    text = output[:, inputs["input_ids"].shape[1] :].tolist()
    warned = [str(w.message) for w in caught if issubclass(w.category, SpeculationWarning)]
    return Run(seconds, by_events, found, text, peak_memory_bytes(DEVICE), warned)


@contextmanager
def _unmetered() -> Iterator[None]:
    yield None


def figures(run: Run, method: Method, plain: Run) -> dict[str, Any]:
    """A row of the report, but for what it is about."""
    tokens = sum(map(len, run.text))
    row: dict[str, Any] = {
        "tokens": tokens,
        "seconds": run.seconds,
        "event_seconds": run.event_seconds,
        "plain_seconds": plain.seconds,
        "plain_tokens": sum(map(len, plain.text)),
        "peak_bytes": run.peak_bytes,
        "warned": run.warned,
    }
    if run.meter is not None:
        steps, drafts = ([f for f in run.meter.of(role) if f.context] for role in ("target", "draft"))
        beside = run.meter.decode_seconds - sum(f.seconds for f in steps)
        if not method.name.startswith("pearl"):  # which drafts meanwhile
            beside -= sum(f.seconds for f in drafts)
        by_width: dict[int, list[float]] = defaultdict(list)
        for step in steps:
            by_width[step.width].append(step.seconds)
        row |= {
            "rounds": len(steps),
            "draft_forwards": len(drafts),
            "target_seconds": sum(f.seconds for f in steps),
            "draft_seconds": sum(f.seconds for f in drafts),
            "prefill_seconds": run.meter.prefill_seconds,
            "beside_seconds": beside,
            "seconds_by_width": {w: [len(each), statistics.fmean(each)] for w, each in sorted(by_width.items())},
        }
    stats = method.drafter.last_stats if method.drafter is not None else None
    if stats is not None:
        row |= {"mode": stats.mode, "alpha": stats.alpha, "notes": stats.notes}
    return row


# ------------------------------------------------------------------ what is measured


def compare(subject: Subject, clock: Clock, cells: Cells = OF_THE_PAIR) -> None:
    """All methods, in rotated order, prompt after prompt; a first pass covers every cell."""
    size, target, draft = subject.size, subject.target, subject.draft
    known = {name: method_of(name, draft) for names in cells.values() for name in names}
    warm: set[tuple[str, int, float, int]] = set()
    last = 0.0
    for turn in range(1 if DRY else TURNS):
        for (rows, temperature), names in cells.items():
            if clock.left() < last:
                note("skipped", what=f"{size}: {rows} rows at T={temperature:g} from prompt {turn} on")
                return
            began = time.perf_counter()
            inputs = subject.prompts(rows, turn)
            slots = slots_for(inputs["input_ids"].shape[1] + NEW)  # recordings are of so many
            options = {"max_new_tokens": NEW} | sampling_at(temperature)
            chosen = [known[name] for name in names if rows == 1 or not known[name].single_row]
            order = [chosen[(turn + i) % len(chosen)] for i in range(len(chosen))]
            runs: dict[str, Run] = {}
            for method in order:
                about = {"size": size, "rows": rows, "temperature": temperature, "method": method.name, "prompt": turn}
                try:
                    key = method.name, rows, temperature, slots * ("captured" in method.name)
                    if key not in warm or method.name == STATIC:
                        ready(target, inputs, method, about, options, first=key not in warm)
                        warm.add(key)
                    torch.manual_seed(turn)
                    runs[method.name] = generate(target, inputs, method, method.name != STATIC, **options)
                except Exception as error:
                    fail(about, error)
            report_turn(size, rows, temperature, turn, inputs, target, chosen, runs, clock)
            last = time.perf_counter() - began


def ready(
    target: Any, inputs: dict[str, Tensor], method: Method, about: dict[str, Any], options: dict[str, Any], first: bool
) -> None:
    """What is not timed: kernels are chosen, forwards recorded or compiled."""
    if method.drafter is not None and "captured" in method.name:
        said = warm_up(target, method.drafter, **inputs, **options, speculation=method.kwargs["speculation"])
        note("recorded", **about, said=said)
    # What is captured or compiled depends on the length; for the rest a few tokens do.
    few = options if ", " in method.name else options | {"max_new_tokens": max(4, NEW // 4)}
    began = time.perf_counter()
    for _ in range(1 + (first and method.name == STATIC)):  # a first run of a compiled forward is a recording
        generate(target, inputs, method, meter=False, **few)
    if first and method.name == STATIC:
        compiles = getattr(target, "_compiled_call", None) is not None
        note("compiled", **about, compiled=compiles, warming_seconds=time.perf_counter() - began)


def method_of(name: str, draft: Any) -> Method:
    """A method, and how its forwards run."""
    spec, _, forwards = name.partition(", ")
    method = build_method(spec, draft)
    if name == STATIC:
        method.name, method.kwargs = name, {"cache_implementation": "static"}
    elif forwards:
        method.name = name
        method.kwargs["speculation"] = {"forwards": forwards}
    return method


def report_turn(
    size: str,
    rows: int,
    temperature: float,
    turn: int,
    inputs: dict[str, Tensor],
    target: Any,
    methods: list[Method],
    runs: dict[str, Run],
    clock: Clock,
) -> None:
    """Beside plain decoding of the same prompts in the same turn."""
    if "plain" not in runs:
        return
    plain = runs["plain"]
    audit = Audit(target, inputs["input_ids"], plain.text[0]) if rows == 1 else None
    for method in methods:
        if method.name not in runs:
            continue
        run = runs[method.name]
        about = {"size": size, "rows": rows, "temperature": temperature, "method": method.name, "prompt": turn}
        row = figures(run, method, plain)
        if temperature == 0:
            row["same_rows"] = sum(a == b for a, b in zip(run.text, plain.text, strict=True))
            if audit is not None and not row["same_rows"] and clock.left() > 0:
                found = audit.difference(run.text[0])
                row["difference"] = asdict(found) | {"near_tie": found.near_tie} if found is not None else None
        note("timing", **about, **row)


@torch.inference_mode()
def widths(subject: Subject, clock: Clock) -> None:
    """A forward by its width, over a cache: how long until its result is there, and until it is launched.

    With transformers' attention, and with this package's, in which heads that share keys stand together.
    """
    size, target = subject.size, subject.target
    for rows in (1, 8):
        ids = subject.prompts(rows, 0)["input_ids"]
        ids = ids.repeat(1, -(-CONTEXT // ids.shape[1]))[:, :CONTEXT]
        cache = DynamicCache(config=target.config)
        target(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        for width in WIDTHS:
            if clock.left() < 0:
                note("skipped", what=f"{size}: forwards of {rows} rows from width {width} on")
                return

            def step(width: int = width, cache: Any = cache, ids: Tensor = ids) -> tuple[float, float]:
                synchronize()
                began = time.perf_counter()
                target(input_ids=ids[:, :width], use_cache=True, **{CACHE: cache})
                launched = time.perf_counter()
                synchronize()
                done = time.perf_counter()
                cache.crop(-width)
                return done - began, launched - began

            stock = median_of(step)
            with grouped_attention():
                ours = median_of(step)
            note(
                "width",
                size=size,
                rows=rows,
                width=width,
                seconds=stock[0],
                launched_seconds=stock[1],
                ours_seconds=ours[0],
            )


def median_of(step: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    step(), step()
    times = [step() for _ in range(3 if DRY else 7)]
    return statistics.median(t for t, _ in times), statistics.median(t for _, t in times)


def launches(subject: Subject, clock: Clock) -> None:
    """What the profiler counts in a generation of one row, and how long the device was at work."""
    size, target, draft, inputs = subject.size, subject.target, subject.draft, subject.prompts(1, 3)
    options = {"max_new_tokens": min(NEW, 32), "do_sample": False}
    activities = [ProfilerActivity.CPU] + ([] if DRY else [ProfilerActivity.CUDA])
    for name in PROFILED:
        if clock.left() < 0:
            note("skipped", what=f"{size}: launches from {name} on")
            return
        method = method_of(name, draft)
        for _ in range(3):  # what is recorded is recorded then
            generate(target, inputs, method, **options)
        with profile(activities=activities) as found:
            run = generate(target, inputs, method, **options)
        assert run.meter is not None
        counts, busy = defaultdict(int), 0.0
        for event in found.key_averages():
            counts[event_kind(event.key)] += event.count
            if "CUDA" in str(event.device_type):
                busy += event.self_device_time_total / 1e6
        calls = len(run.meter.of("target"))
        note(
            "launches",
            size=size,
            method=name,
            calls=calls,
            draft_calls=len(run.meter.of("draft")),
            **{kind: counts[kind] / calls for kind in ("operations", "launches", "copies", "waits")},
            busy=busy / run.seconds if not DRY else None,
        )


def event_kind(name: str) -> str:
    if "LaunchKernel" in name or name == "cudaGraphLaunch":
        return "launches"
    if name.startswith(("cudaMemcpy", "cuMemcpy")):
        return "copies"
    if name.startswith("cuda") and "Synchronize" in name:
        return "waits"
    return "operations" if name.startswith("aten::") else "others"


def fail(about: dict[str, Any], error: Exception) -> None:
    """Said, kept, and the rest goes on; a poisoned device ends this process at the next call."""
    traceback.print_exception(error)
    note("failed", **about, why=f"{type(error).__name__}: {str(error)[:600]}")
    synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--seconds", type=float, default=120.0, help="after which no further cell is begun")
    parser.add_argument("--pearl", action="store_true", help="drafting beside the target on one card alone, at 1 row")
    parser.add_argument("--gguf", help="another target: a GGUF file of SmolLM2, with the cut draft of hub_configs")
    args = parser.parse_args()
    clock = Clock(args.seconds)
    subject = load_real(args.gguf, args.size) if args.gguf else load_pair(args.size)
    if args.pearl:
        make_costly(subject.draft, DRAFT)
        costs = sum(p.numel() for p in subject.draft.parameters())
        subject = replace(subject, size=f"{subject.size}, draft {costs / 1e9:.1g}B")
    target, size = subject.target, subject.size
    parameters = sum(p.numel() for p in target.parameters())
    layers = target.config.num_hidden_layers
    note("target", size=size, parameters=parameters, layers=layers, dtype=str(target.dtype), new_tokens=NEW)
    print(f"{size}: {parameters / 1e9:.3f} B parameters in {layers} layers, {clock.left():.0f} s left", flush=True)
    if args.pearl:  # alone: its workers are processes, which take up memory and time
        compare(subject, clock, OF_PEARL)
        return
    if args.gguf:
        compare(subject, clock, OF_REAL)
        return
    for part in (widths, launches, compare):
        try:
            part(subject, clock)
        except Exception as error:
            fail({"size": size}, error)
        gc.collect()


if __name__ == "__main__":
    main()
