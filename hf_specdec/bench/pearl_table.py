"""PEARL on paced devices: measured speed beside what Figure 3's schedule and serial decoding give without overhead.

    python -m hf_specdec.bench.pearl_table --target TARGET --draft DRAFT --prompts FILE --json results.json

Draft and target run in two processes. Each forward occupies a pretended device for a set time (its *pace*), so that two
models on two cores overlap as on two GPUs; processes, messages and everything between the forwards are real.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from ..drafters.base import Drafter
from ..drafters.draft_model import DraftModelDrafter
from ..drafters.pearl import PearlDrafter, Timeline
from .measure import load_model, load_tokenizer
from .pacing import paced, sleep_until
from .prompts import load_prompts
from .recording import RecordingDrafter, Round

WINDOWS = range(1, 25)
TRIALS = 200
"""sampled texts of one acceptance record over which the serial bound is averaged"""


class Pace:
    """The pace of a model that is sent to another process, as a pair of forward hooks."""

    def __init__(self, model: nn.Module, milliseconds: float) -> None:
        self.seconds, self.began = milliseconds / 1000, 0.0
        self.hooks = [model.register_forward_pre_hook(self.before), model.register_forward_hook(self.after)]

    def before(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def after(self, *_: Any) -> None:
        sleep_until(self.began + self.seconds)

    def __getstate__(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "began": 0.0}


@dataclass
class Row:
    """One method on one file at one speed ratio and temperature; times in seconds, of decoding without the prefill."""

    prompts: str
    temperature: float
    ratio: float
    method: str
    tokens: int
    seconds: float
    bound: float | None
    """the same run without any overhead; None where there is no closed form"""
    serial_bound: float | None
    """serial decoding of the very texts of this run, the same tokens accepted, at the window that is best for them,
    without any overhead: texts that are sampled, and what chance accepts, are others in every schedule"""
    alpha: float | None
    same_text: bool | None
    """whether greedy text was plain decoding's"""
    corrections: int = 0
    foreseen: int = 0
    """how many of them were drafted for"""
    messages: int = 0
    bytes: int = 0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def serial_seconds(accepts: list[list[float]], window: int, ratio: float, step: float) -> float:
    """Serial decoding without overhead, from the probability that the draft of each token is accepted.

    Args:
        accepts: per text, per token after the first; 0 or 1 where it is known.
        step: seconds of a draft step; the target takes `ratio` of them. The draft's prefill counts as a step.
    """
    total = 0.0
    for probabilities in accepts:
        trials = 1 if all(p in (0.0, 1.0) for p in probabilities) else TRIALS
        coins = torch.rand(trials, len(probabilities), generator=torch.Generator().manual_seed(0))
        for passed in (coins < torch.tensor(probabilities)).tolist():
            at, seconds = 0, step
            while at < len(passed):
                drafted = min(window, len(passed) - at - 1)
                run = next((i for i in range(drafted) if not passed[at + i]), drafted)
                at += run + 1
                seconds += step * (drafted + ratio)
            total += seconds / trials
    return total


def pearl_seconds(line: Timeline, window: int, ratio: float, step: float) -> float:
    """Figure 3's schedule of one row without overhead: a round that passes all tests waits for γ draft steps, as does
    one whose correction was foreseen; others wait for one."""
    whole, short = max(ratio, window) * step, max(ratio, 1.0) * step
    rounds = zip(line.tests, line.corrections, strict=True)
    return step + sum(whole if tested == accepted or hits else short for (tested, accepted), (_, hits) in rounds)


@torch.no_grad()
def acceptances(target: Any, draft: Any, ids: Tensor, prompt: int, temperature: float) -> list[float]:
    """Of every new token x after the first, the chance that it came out of an acceptance: min(p, q)(x) / p(x), or
    whether the greedy choices agree."""
    p, q = (model(ids).logits[0, prompt : ids.shape[1] - 1].float() for model in (target, draft))
    if not temperature:
        return (p.argmax(-1) == q.argmax(-1)).float().tolist()
    p, q = ((x / temperature).softmax(-1).gather(1, ids[0, prompt + 1 :, None])[:, 0] for x in (p, q))
    return (q / p).clamp(max=1.0).tolist()


def outcomes(rounds: Sequence[Round], chances: list[float]) -> list[float]:
    """The same where it is known what was accepted: all but the target's own tokens behind a draft that passed."""
    known: list[float] = []
    for one in rounds:
        known += [1.0] * one.accepted
        if one.rejected is not None:
            known.append(0.0)
        known += chances[len(known) : len(known) + len(one.tokens) - one.accepted - (one.rejected is not None)]
    return known


@dataclass
class Table:
    """A pair of models, and what is asked of them."""

    target: Any
    draft: Any
    tokenizer: Any
    step: float
    """seconds of a draft step"""
    new_tokens: int

    def run(
        self, prompts: str, texts: list[str], ratio: float, temperature: float, windows: list[int], only: str
    ) -> Iterator[Row]:
        """The methods whose name contains `only`, on one file."""
        inputs = [self.tokenizer(text, return_tensors="pt") for text in texts]
        plain = [self._generate(None, x, temperature, i) for i, x in enumerate(inputs)]
        gamma = max(1, round(ratio))
        bounds = self._serial_bounds(plain, inputs, [[]] * len(inputs), ratio, temperature)
        best = min(bounds, key=bounds.__getitem__)
        methods: dict[str, tuple[type[Drafter], dict[str, Any]]] = {
            f"serial, best window {best}": (DraftModelDrafter, {"num_draft_tokens": best}),
            f"PEARL, window {gamma}, as published": (PearlDrafter, {"window": gamma, "corrections": 0}),
            f"PEARL, window {gamma}": (PearlDrafter, {"window": gamma}),
            "PEARL, auto": (PearlDrafter, {"window": "auto"}),
            "w/o pre-verify": (PearlDrafter, {"window": gamma, "corrections": 0, "pre_verify": False}),
            "w/o post-verify": (PearlDrafter, {"window": gamma, "corrections": 0, "post_verify": False}),
        }
        if windows:
            methods = {f"PEARL, window {w}": (PearlDrafter, {"window": w, "corrections": 0}) for w in windows}
        for name, (kind, options) in methods.items():
            if only not in name:
                continue
            row = Row(prompts, temperature, ratio, name, 0, 0.0, None, None, None, None)
            bound, alphas, made, played = 0.0, [], [], []
            with self._paced(kind, options, ratio) as drafter:
                recorder = RecordingDrafter(drafter)
                self._generate(recorder, inputs[0], temperature, 0, max_new_tokens=4)
                for i, x in enumerate(inputs):
                    ids = self._generate(recorder, x, temperature, i)
                    played.append(list(recorder.rounds))
                    stats = recorder.last_stats
                    assert stats is not None
                    row.tokens += stats.emitted_tokens - 1
                    row.seconds += stats.total_seconds - stats.prefill_seconds
                    alphas.append(stats.alpha or 0.0)
                    made.append(ids)
                    if isinstance(drafter, PearlDrafter) and drafter.last_timeline is not None:
                        line = drafter.last_timeline
                        fixed = gamma if options["window"] == "auto" else options["window"]
                        bound += pearl_seconds(line, fixed, ratio, self.step)
                        row.foreseen += sum(hits for _, hits in line.corrections)
                        row.corrections += sum(made for made, _ in line.corrections)
                        row.messages += line.messages
                        row.bytes += line.bytes
            row.alpha = sum(alphas) / len(alphas)
            row.same_text = None if temperature else all(map(torch.equal, made, plain))
            bounds = self._serial_bounds(made, inputs, played, ratio, temperature)
            row.serial_bound = min(bounds.values())
            if name.startswith("serial"):
                row.bound = bounds[best]
            elif name.startswith("PEARL, window"):
                row.bound = bound
            yield row

    def _serial_bounds(
        self, texts: list[Tensor], inputs: list[Any], played: list[list[Round]], ratio: float, temperature: float
    ) -> dict[int, float]:
        """Seconds that serial decoding takes for these texts without overhead, by window.

        Args:
            played: the rounds that they came from; empty where it is not known what was accepted.
        """
        records = []
        for ids, x, rounds in zip(texts, inputs, played, strict=True):
            chances = acceptances(self.target, self.draft, ids, x["input_ids"].shape[1], temperature)
            records.append(outcomes(rounds, chances) if rounds else chances)
        return {window: serial_seconds(records, window, ratio, self.step) for window in WINDOWS}

    @contextmanager
    def _paced(self, kind: type[Drafter], options: dict[str, Any], ratio: float) -> Iterator[Drafter]:
        """A drafter over the paced draft, and the target paced meanwhile."""
        milliseconds = 1000 * self.step
        with paced(self.target, milliseconds * ratio):
            if kind is PearlDrafter:
                pace = Pace(self.draft, milliseconds)
                try:
                    with PearlDrafter(self.draft, worker="process", **options) as drafter:
                        yield drafter
                finally:
                    for hook in pace.hooks:
                        hook.remove()
            else:
                with paced(self.draft, milliseconds):
                    yield DraftModelDrafter(self.draft, **options)

    def _generate(self, drafter: Drafter | None, inputs: Any, temperature: float, seed: int, **options: Any) -> Tensor:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        settings = {"max_new_tokens": self.new_tokens, "pad_token_id": self.tokenizer.pad_token_id} | sampling
        return self.target.generate(**inputs, **settings | options, assistant_model=drafter)


def line_of(row: Row) -> str:
    """One line of the table."""
    share = "" if row.bound is None else f"{row.bound / row.seconds:.0%}"
    text = {None: "", True: "same", False: "differs"}[row.same_text]
    foreseen = f"{row.foreseen} of {row.corrections}" if row.corrections else ""
    alpha = "" if row.alpha is None else f"{row.alpha:.2f}"
    return (
        f"| {row.prompts} | {row.temperature:g} | {row.ratio:g} | {row.method} | {row.speed:.2f} | {share} | {alpha} | "
        f"{foreseen} | {text} |"
    )


def _shown(row: Row | None) -> str:
    """Tokens per second, over serial's bound, and in brackets the share of the own bound."""
    if row is None:
        return "-"
    gain = f", {row.serial_bound / row.seconds - 1:+.0%}" if row.serial_bound else ""
    return f"{row.speed:.2f}{gain}" + (f" ({row.bound / row.seconds:.0%})" if row.bound else "")


def overview(rows: Sequence[Row]) -> str:
    """A line per file, temperature and ratio, a column per schedule."""
    kinds = {
        "serial, best window": lambda name: name.startswith("serial"),
        "PEARL as published": lambda name: name.endswith("as published"),
        "PEARL, window = ratio": lambda name: name.startswith("PEARL, window") and not name.endswith("as published"),
        "PEARL, auto": lambda name: name == "PEARL, auto",
    }
    cells: dict[tuple[str, float, float], dict[str, Row]] = {}
    for row in rows:
        for kind, fits in kinds.items():
            if fits(row.method):
                cells.setdefault((row.prompts, row.temperature, row.ratio), {})[kind] = row
    lines = [f"| prompts | T | ratio | {' | '.join(kinds)} | corrections foreseen |", "|---" * 8 + "|"]
    for (prompts, t, ratio), found in cells.items():
        shown = [_shown(found.get(kind)) for kind in kinds]
        if serial := found.get("serial, best window"):
            shown[0] += f", γ = {serial.method.split()[-1]}"
        fixed = found.get("PEARL, window = ratio")
        foreseen = f"{fixed.foreseen} of {fixed.corrections}" if fixed else "-"
        lines.append(f"| {prompts} | {t:g} | {ratio:g} | {' | '.join(shown)} | {foreseen} |")
    return "\n".join(lines)


def main(
    target: Annotated[str, typer.Option(help="Folder or repo of the target.")],
    draft: Annotated[str, typer.Option(help="Folder or repo of the draft.")],
    prompts: Annotated[list[Path], typer.Option(help="File of prompts; repeat for several.")],
    json_file: Annotated[Path, typer.Option("--json", help="Where rows are kept; what it holds is not run again.")],
    ratio: Annotated[list[float], typer.Option(help="T_target / T_draft; repeat for several.")] = [3, 5, 10],  # noqa: B006
    temperature: Annotated[list[float], typer.Option(help="Repeat for several.")] = [0, 1],  # noqa: B006
    window: Annotated[list[int], typer.Option(help="Compare these windows of PEARL instead of the methods.")] = [],  # noqa: B006
    only: Annotated[str, typer.Option(help="Run the methods whose name contains this.")] = "",
    limit: Annotated[int, typer.Option(help="Prompts per file.")] = 2,
    max_new_tokens: Annotated[int, typer.Option()] = 64,
    draft_milliseconds: Annotated[float, typer.Option(help="Pace of a draft step.")] = 30.0,
) -> None:
    """Paced measurements of PEARL. Speeds are tokens per second of decoding, prefill left out.

    Ends with a line for each file, temperature and ratio of the JSON file: tokens per second, over what serial decoding
    reaches on the very same text at its best window without any overhead, and in brackets the share of the own schedule
    without overhead. Corrections are those of the run whose window is the ratio.
    """
    torch.set_num_threads(1)
    table = Table(
        load_model(target, "float32", "cpu"),
        load_model(draft, "float32", "cpu"),
        load_tokenizer(target),
        draft_milliseconds / 1000,
        max_new_tokens,
    )
    held: list[dict[str, Any]] = json.loads(json_file.read_text()) if json_file.exists() else []
    asked = {"windows": window, "only": only, "limit": limit, "new_tokens": max_new_tokens, "step": draft_milliseconds}
    typer.echo(
        "| prompts | T | ratio | method | tokens/s | of its bound | α | foreseen | greedy text |\n" + "|-" * 9 + "|"
    )
    for path in prompts:
        for t in temperature:
            for c in ratio:
                cell = {"prompts": path.stem, "temperature": t, "ratio": c} | asked
                if any(cell.items() <= row.items() for row in held):
                    continue
                for row in table.run(path.stem, load_prompts(path, limit), c, t, window, only):
                    typer.echo(line_of(row))
                    held.append(asdict(row) | asked)
                json_file.write_text(json.dumps(held, indent=1))
    fields = Row.__dataclass_fields__
    typer.echo(overview([Row(**{name: row[name] for name in fields}) for row in held if not row["windows"]]))


if __name__ == "__main__":
    from hf_specdec.bench import pearl_table  # by its name, so that a worker can take over a paced model

    typer.run(pearl_table.main)
