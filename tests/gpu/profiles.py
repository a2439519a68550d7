"""What the device does, by the names of its kernels: in recorded steps, one by one, and in whole generations."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from generation import CAPTURED, FEW, generate, method_of
from place import synchronize
from steps import note
from subjects import DRY, Subject
from torch.profiler import ProfilerActivity, profile

from hf_specdec.target import splits
from hf_specdec.target.recorded import RecordedSteps
from hf_specdec.target.shelf import shelf_of

WIDTHS = (1, 16, 32, 64)
"""of the forwards that are looked at"""
VARIANTS = 4
"""steps of each width, or of each other kind (a draft's chain, a move of kept entries), those met first"""
SHOWN = 12
"""kernels of each, the dearest"""
ATTENTION = ("flash", "fmha", "attention", "attn", "softmax")
"""parts of the names of its kernels"""


@contextmanager
def replays(subject: Subject, least: int = 0) -> Iterator[None]:
    """Within the block each recorded step of interest is looked at where it is first met, as its input is there then:
    its seconds and its kernels. Timed once more behind that, it says whether what is timed later suffers from it.

    Args:
        least: slots that a step of interest sees.
    """
    run, met = RecordedSteps.run, Counter[Any]()
    models = {"target": subject.target, "draft": subject.draft}

    def looked_at(steps: RecordedSteps, key: Any, step: Callable[[], Any]) -> Any:
        result, kind, seen = run(steps, key, step), key[0][0], key[1]  # a move sees no more than it moves
        found = [(name, kept) for name, model in models.items() for kept in shelf_of(model).kept]
        name, buffers = next((pair for pair in found if pair[1].recorded is steps), ("", None))
        if buffers is None or key not in steps._recorded or (isinstance(kind, int) and kind not in WIDTHS):
            return result
        if seen < least:
            return result
        met[name, key] += 1
        met[name, kind] += met[name, key] == 1
        if met[name, key] == 1 and met[name, kind] <= VARIANTS:
            replay, about = steps._recorded[key][0], {"size": subject.size, "model": name}
            about |= {"rows": buffers.rows, "slots": buffers.slots, "step": str(key), "width": kind}
            note(
                "replay",
                **about,
                seconds=seconds_of(replay),
                **kernels(profiled(replay)),
                seconds_behind=seconds_of(replay),
            )
        return result

    with mock.patch.object(RecordedSteps, "run", looked_at):
        yield


@contextmanager
def unsplit(subject: Subject) -> Iterator[None]:
    """Within the block keys of long texts are not split. What was recorded before is gone, and so is what is in it."""
    forget(subject)
    try:
        with mock.patch.dict(splits.MULTIPROCESSORS, clear=True):
            yield
    finally:
        forget(subject)


def forget(subject: Subject) -> None:
    """All that was recorded."""
    for model in (subject.target, subject.draft):
        shelf_of(model).kept.clear()


def seconds_of(replay: Callable[[], object]) -> float:
    """The median, from the launch until it is done."""
    times = []
    for _ in range(2 if DRY else 12):
        synchronize()
        began = time.perf_counter()
        replay()
        synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def profiled(action: Callable[[], object]) -> list[Any]:
    """What it came to, by name, on the host and on the device."""
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not DRY)) as found:
        action()
        synchronize()
    return list(found.key_averages())


def kernels(events: list[Any], calls: int = 1) -> dict[str, Any]:
    """Per call: how many kernels, in how many seconds, and which took most; on a CPU the operations."""
    events = [event for event in events if DRY or "CUDA" in str(event.device_type)]
    seconds = {e.key: (e.self_cpu_time_total if DRY else e.self_device_time_total) / 1e6 / calls for e in events}
    events.sort(key=lambda event: -seconds[event.key])
    shown = [[event.key[:100], event.count / calls, seconds[event.key]] for event in events]
    attention = [each for each in shown if any(part in each[0].lower() for part in ATTENTION)]
    return {
        "kernels": sum(count for _, count, _ in shown),
        "busy_seconds": sum(seconds.values()),
        "dearest": shown[:SHOWN],
        "attention": attention[:SHOWN],
    }


def rounds(subject: Subject, methods: Sequence[str] = CAPTURED) -> None:
    """What the host launches for a call of the target, and for how much of the time the device is at work, at what."""
    inputs, options = subject.prompts(1, 0), {"max_new_tokens": FEW, "do_sample": False}
    for method in (method_of(name, subject.draft) for name in methods):
        again = partial(generate, subject.target, inputs, method, **options)
        run = [again() for _ in range(2)][-1]
        calls = FEW if run.meter is None else len(run.meter.of("target"))
        events, counts = profiled(again), Counter[str]()
        for event in events:
            counts[event_kind(event.key)] += event.count
        per_call = {kind: counts[kind] / calls for kind in ("operations", "launches", "copies", "waits")}
        about = {"size": subject.size, "method": method.name, "calls": calls, "seconds": run.seconds / calls}
        note("launches", **about, **per_call, **kernels(events, calls))


def event_kind(name: str) -> str:
    if "LaunchKernel" in name or name == "cudaGraphLaunch":
        return "launches"
    if name.startswith(("cudaMemcpy", "cuMemcpy")):
        return "copies"
    if name.startswith("cuda") and "Synchronize" in name:
        return "waits"
    return "operations" if name.startswith("aten::") else "others"
