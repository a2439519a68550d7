"""The steps that are timed, on one target and in this order, within so many seconds; `run.py` starts them. Each figure
is kept as soon as it is known. What was begun before, in a process that broke off, is not begun again."""

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from generation import CAPTURED, FEW, NEW, PLAIN, STATIC, Run, figures, generate, method_of
from place import DEVICE, synchronize
from profiles import forget, replays, rounds, unsplit
from report import write
from steps import chosen, note, read
from subjects import DRAFT, DRY, TURNS, Subject, load, make_costly
from torch import Tensor
from traced import traced

from hf_specdec import warm_up
from hf_specdec.target.buffers import slots_for
from hf_specdec.tools.bench.method import Method
from hf_specdec.tools.instruments.audit import Audit
from hf_specdec.tools.instruments.provenance import provenance
from hf_specdec.tools.loading.sampling import sampling_at

MANY = 2 if DRY else 8
"""rows"""
CONTEXTS = (32,) if DRY else (4096, 16384)
"""tokens before the text"""
BESIDE = (PLAIN, "draft_model, captured", "pearl:worker=thread, captured", "pearl:worker=process, captured")
"""serial drafting, and drafting beside the target: on a stream of its own, and from a process of its own"""
PACKAGES = ("accelerate", "tokenizers", "triton", "gguf", "kernels", "flash-attn")


class Over(BaseException):
    """A step has come to its limit."""


@dataclass(frozen=True)
class Cell:
    """Methods side by side, prompt after prompt: an interrupted one has fewer prompts, not fewer methods."""

    methods: Sequence[str]
    rows: int = 1
    temperature: float = 0.0
    new: int = NEW
    turns: int = 1
    context: int = 0
    """tokens of the one prompt; 0 for those that the subject is asked"""

    def compare(self, subject: Subject) -> None:
        """Time them in rotated order. What is chosen, recorded or compiled first is not timed."""
        methods, warm = [method_of(name, subject.draft) for name in self.methods], set[tuple[str, int]]()
        options: dict[str, Any] = {"max_new_tokens": self.new} | sampling_at(self.temperature)
        for turn in range(1 if DRY else self.turns):
            inputs = subject.context(self.context) if self.context else subject.prompts(self.rows, turn)
            about = {"size": subject.size, "rows": self.rows, "temperature": self.temperature, "prompt": turn}
            about |= {"asked": subject.asked[turn].kind, "prompt_tokens": inputs["input_ids"].shape[1]}
            runs: dict[str, Run] = {}
            for method in [methods[(turn + i) % len(methods)] for i in range(len(methods))]:
                about["method"] = method.name
                try:
                    # Recordings are of so many slots; what was compiled for the longest prompt does for all.
                    key = method.name, slots_for(inputs["input_ids"].shape[1] + self.new) * ("captured" in method.name)
                    if key not in warm:
                        warm.add(key)
                        ready(subject.target, inputs, method, about, options)
                    torch.manual_seed(turn)
                    run = runs[method.name] = generate(subject.target, inputs, method, **options)
                    note("timing", **about, **figures(run, method))
                except Exception as error:
                    fail(about, error)
            if self.rows == 1 and not self.temperature:
                audit(subject, inputs, runs, about)


def ready(
    target: Any, inputs: dict[str, Tensor], method: Method, about: dict[str, Any], options: dict[str, Any]
) -> None:
    """What is not timed: kernels are chosen, forwards recorded or compiled."""
    if method.drafter is not None and "speculation" in method.kwargs:
        said = warm_up(target, method.drafter, **inputs, **options, speculation=method.kwargs["speculation"])
        note("recorded", **about, said=said)
    began = time.perf_counter()
    for _ in range(2 if method.name == STATIC else 1):  # a first run of a compiled forward is a recording
        generate(target, inputs, method, meter=False, **options)
    if method.name == STATIC:
        compiles = getattr(target, "_compiled_call", None) is not None
        note("compiled", **about, compiled=compiles, warming_seconds=time.perf_counter() - began)


def audit(subject: Subject, inputs: dict[str, Tensor], runs: dict[str, Run], about: dict[str, Any]) -> None:
    """Where a text parts from plain decoding's."""
    name = next((name for name in (STATIC, PLAIN) if name in runs), None)
    if name is None:
        return
    plain = runs[name].text[0]
    known = Audit(subject.target, inputs["input_ids"], plain, **method_of(name, None).kwargs)
    for name, run in runs.items():
        if run.text[0] != plain and (found := known.difference(run.text[0])) is not None:
            note("parted", **about | {"method": name}, **asdict(found), near_tie=found.near_tie)


# ------------------------------------------------------------------ the steps


def recorded_steps(subject: Subject) -> None:
    """The forwards, and a draft's chain."""
    record(subject, subject.prompts(1, 0), max(NEW, 64))


def record(subject: Subject, inputs: dict[str, Tensor], new: int, least: int = 0) -> None:
    """
    Args:
        least: slots that a step sees which is looked at.
    """
    options = method_of("hybrid, captured", subject.draft).kwargs | inputs
    with replays(subject, least):
        warm_up(subject.target, options.pop("assistant_model"), **options, max_new_tokens=new, do_sample=False)


def compiled_forward(subject: Subject) -> None:
    options = {"max_new_tokens": NEW, "do_sample": False}
    about = {"size": subject.size, "method": STATIC}
    ready(subject.target, subject.prompts(1, 0), method_of(STATIC, subject.draft), about, options)
    rounds(subject, [STATIC])


def many_rows(subject: Subject) -> None:
    """And what each method takes of the device's memory: during a call, and kept for the next one."""
    Cell([*CAPTURED, STATIC], rows=MANY, turns=2).compare(subject)
    inputs, options = subject.prompts(MANY, 0), {"max_new_tokens": NEW, "do_sample": False}
    for name in (STATIC, "hybrid, captured"):
        forget(subject)
        for model in (subject.target, subject.draft):
            vars(model).pop("_cache", None)  # transformers' static one
        before, method = taken(), method_of(name, subject.draft)
        about = {"size": subject.size, "rows": MANY, "method": name}
        ready(subject.target, inputs, method, about, options)
        most = 0 if DRY else torch.cuda.max_memory_reserved()
        note("memory", **about, most_bytes=most - before, held_bytes=taken() - before)


def taken() -> int:
    """Bytes of the device that this process does not give back."""
    gc.collect()
    if DRY:
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


def long_contexts(subject: Subject) -> None:
    """Of prompts that repeat themselves, as far as models are allowed to look; then the steps where keys are whole."""
    for model in (subject.target, subject.draft):
        model.config.max_position_embeddings = 2 * max(CONTEXTS)
    behind = {tokens: replace(subject, size=f"{subject.size}, behind {tokens} tokens") for tokens in CONTEXTS}
    for tokens, here in behind.items():
        record(here, here.context(tokens), FEW, tokens)
        Cell([PLAIN, "hybrid, captured"], new=FEW, context=tokens).compare(here)
    for tokens, here in behind.items():
        here = replace(here, size=f"{here.size}, keys not split")
        with unsplit(here), replays(here, tokens):
            for name in (PLAIN, "prompt_lookup, captured"):  # of one token, and of the widths that copies come to
                options = {"max_new_tokens": FEW, "do_sample": False}
                generate(here.target, here.context(tokens), method_of(name, None), meter=False, **options)


def one_text(subject: Subject) -> None:
    """What it costs that all forwards round alike: it could be the default where that is hardly anything."""
    Cell(
        [f"{name}, {forwards}" for name in ("plain", "hybrid") for forwards in ("captured", "bitwise")], turns=2
    ).compare(replace(subject, size=f"{subject.size}, one text"))


def beside(subject: Subject) -> None:
    """PEARL on one card, by a draft model that takes time: what takes hardly any gains nothing there."""
    make_costly(subject.draft, DRAFT)
    Cell(BESIDE[: 3 if DRY else None], turns=2).compare(replace(subject, size=f"{subject.size}, draft 0.5B"))


class Step(NamedTuple):
    most: float
    """seconds"""
    play: Callable[[Subject], None]


STEPS: dict[str, Step] = {
    "recorded steps": Step(60, recorded_steps),
    "the compiled forward": Step(100, compiled_forward),
    "twelve prompts": Step(150, Cell([STATIC, *CAPTURED], turns=TURNS).compare),
    "eager, once": Step(15, Cell(["plain"], new=FEW).compare),
    "rounds": Step(40, rounds),
    "temperature 1": Step(40, Cell([STATIC, *CAPTURED], temperature=1.0, turns=4).compare),
    "eight rows": Step(100, many_rows),
    "one text": Step(40, one_text),
    "long contexts": Step(50, long_contexts),
    "PEARL": Step(50, beside),
}


def play(name: str, step: Step, subject: Subject, left: float) -> None:
    """A step within its limits, and the report anew."""
    if left < 5:
        note("skipped", what=name)
        return
    note("begun", step=name)
    began, outcome = time.perf_counter(), "passed"
    signal.setitimer(signal.ITIMER_REAL, min(step.most, left))
    try:
        step.play(subject)
    except Over:
        outcome = "ended at its limit"
    except Exception as error:
        outcome = "failed"
        fail({"size": subject.size, "method": name}, error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    note("step", step=name, outcome=outcome, seconds=time.perf_counter() - began)
    write(Path(os.environ["OUT"]))


def over(*_: Any) -> None:
    raise Over


def fail(about: dict[str, Any], error: Exception) -> None:
    """Said, kept, and the rest goes on; a poisoned device ends this process at the next call."""
    traceback.print_exception(error)
    note("failed", **about, why=f"{type(error).__name__}: {str(error)[:600]}")
    synchronize()


def machine() -> None:
    """Which card, which versions, and whether it computes at all."""
    x = torch.randn(64, 64, device=DEVICE)
    assert torch.allclose((x @ x).cpu(), x.cpu() @ x.cpu(), atol=1e-3), "the device multiplies wrongly"
    known = provenance(DEVICE)
    known["versions"] |= {name: found for name in PACKAGES if (found := installed(name))}
    known["git_revision"] = os.environ.get("COMMIT") or known["git_revision"]
    note("machine", **known)


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main() -> None:
    end = time.perf_counter() + float(sys.argv[1])
    begun = {row["step"] for row in read(Path(os.environ["OUT"]))["begun"]}
    if not begun:
        machine()
    subject = load(os.environ.get("GGUF"))
    parameters, layers = sum(p.numel() for p in subject.target.parameters()), subject.target.config.num_hidden_layers
    note("target", size=subject.size, parameters=parameters, layers=layers)
    signal.signal(signal.SIGALRM, over)
    with traced() if DRY else nullcontext():
        for name, step in STEPS.items():
            if name not in begun and chosen(f"timings: {name}"):
                play(name, step, subject, end - time.perf_counter())


if __name__ == "__main__":
    main()
