"""PEARL on paced devices: measured speed beside what Figure 3's schedule and serial decoding give without overhead.

    python docs/laboratory/pearl_table.py --target TARGET --draft DRAFT --prompts FILE --json results.json

Draft and target run in two processes. Each forward occupies a pretended device for a set time (its *pace*), so that two
models on two cores overlap as on two GPUs; processes, messages and everything between the forwards are real.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from hf_specdec.commands.options import expanded
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.pearl import PearlDrafter
from hf_specdec.tools.instruments.recording import RecordingDrafter, Round
from hf_specdec.tools.loading.chat import batch, prompt_ids
from hf_specdec.tools.loading.models import PairSettings
from hf_specdec.tools.loading.prompts import Prompt, load_prompts
from hf_specdec.tools.loading.rows import set_name
from hf_specdec.tools.loading.sampling import sampling_at
from pearl_bounds import WINDOWS, acceptances, outcomes, pearl_seconds, serial_seconds
from pearl_pace import Pace
from pretended import paced


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
    """whether the text was plain decoding's; None where each method draws its own"""
    corrections: int = 0
    foreseen: int = 0
    """how many of them were drafted for"""

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def methods(gamma: int, best: int) -> dict[str, tuple[type[Drafter], dict[str, Any]]]:
    """Drafters and their options by name.

    Args:
        gamma: the window that the speed ratio asks for.
        best: the window at which serial decoding is fastest.
    """
    return {
        f"serial, best window {best}": (DraftModelDrafter, {"num_draft_tokens": best}),
        f"PEARL, window {gamma}, as published": (PearlDrafter, {"window": gamma, "corrections": 0}),
        f"PEARL, window {gamma}": (PearlDrafter, {"window": gamma}),
        "PEARL, auto": (PearlDrafter, {"window": "auto"}),
        "w/o pre-verify": (PearlDrafter, {"window": gamma, "corrections": 0, "pre_verify": False}),
        "w/o post-verify": (PearlDrafter, {"window": gamma, "corrections": 0, "post_verify": False}),
    }


@dataclass
class Table:
    """A pair of models, and what is asked of them."""

    target: Any
    draft: Any
    tokenizer: Any
    step: float
    """seconds of a draft step"""
    new_tokens: int
    coupled: bool = False
    """draws are those of seed and place, so that all methods write one text"""

    def run(self, name: str, prompts: list[Prompt], ratio: float, temperature: float, only: list[str]) -> Iterator[Row]:
        """The methods whose name contains one of `only`, or all, on one file."""
        inputs = [batch([prompt_ids(self.tokenizer, prompt)], self.tokenizer.pad_token_id) for prompt in prompts]
        plain = [self._generate(None, x, temperature, i) for i, x in enumerate(inputs)]
        bounds = self._serial_bounds(plain, inputs, [[]] * len(inputs), ratio, temperature)
        best = min(bounds, key=bounds.__getitem__)
        for method, (kind, options) in methods(max(1, round(ratio)), best).items():
            if not only or any(part in method for part in only):
                row = Row(name, temperature, ratio, method, 0, 0.0, None, None, None, None)
                made, played, bound = self._decode(row, kind, options, inputs)
                told = self.coupled or not temperature
                row.same_text = all(map(torch.equal, made, plain)) if told else None
                bounds = self._serial_bounds(made, inputs, played, ratio, temperature)
                row.serial_bound = min(bounds.values())
                if method.startswith("serial"):
                    row.bound = bounds[best]
                elif method.startswith("PEARL, window"):
                    row.bound = bound
                yield row

    def _decode(
        self, row: Row, kind: type[Drafter], options: dict[str, Any], inputs: list[Any]
    ) -> tuple[list[Tensor], list[list[Round]], float]:
        """All texts by one method, counted in `row`.

        Returns:
            The texts, the rounds that they came from, and the seconds that PEARL's schedule takes without overhead.
        """
        made, played, alphas, bound = [], [], [], 0.0
        with self._paced(kind, options, row.ratio) as drafter:
            recorder = RecordingDrafter(drafter)
            self._generate(recorder, inputs[0], row.temperature, 0, max_new_tokens=4)
            for i, x in enumerate(inputs):
                made.append(self._generate(recorder, x, row.temperature, i))
                played.append(list(recorder.rounds))
                stats = recorder.last_stats
                assert stats is not None
                row.tokens += stats.emitted_tokens - 1
                row.seconds += stats.total_seconds - stats.prefill_seconds
                alphas.append(stats.alpha or 0.0)
                if isinstance(drafter, PearlDrafter) and drafter.last_timeline is not None:
                    line = drafter.last_timeline
                    window = max(1, round(row.ratio)) if options["window"] == "auto" else options["window"]
                    bound += pearl_seconds(line, window, row.ratio, self.step)
                    row.foreseen += sum(hits for _, hits in line.corrections)
                    row.corrections += sum(drafted for drafted, _ in line.corrections)
        row.alpha = sum(alphas) / len(alphas)
        return made, played, bound

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
        sampling = sampling_at(temperature)
        if temperature and self.coupled:
            sampling["speculation"] = {"sampling": "coupled"}
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


@dataclass
class Settings:
    """Options of the command."""

    target: Annotated[str, typer.Option(help="Folder or repo of the target.")]
    draft: Annotated[str, typer.Option(help="Folder or repo of the draft.")]
    prompts: Annotated[list[str], typer.Option(help="File, set or data set of prompts; repeat for several.")]
    json_file: Annotated[
        Path, typer.Option("--output", "--json", help="Where rows are kept; what it holds is not run again.")
    ]
    ratio: Annotated[list[float], typer.Option(help="T_target / T_draft; repeat for several.")] = field(
        default_factory=lambda: [3, 5, 10]
    )
    temperature: Annotated[list[float], typer.Option(help="Repeat for several.")] = field(
        default_factory=lambda: [0, 1]
    )
    only: Annotated[list[str], typer.Option(help="Run the methods whose name contains this; repeat for several.")] = (
        field(default_factory=list)
    )
    limit: Annotated[int, typer.Option(help="Prompts per source.")] = 2
    max_new_tokens: int = 64
    draft_milliseconds: Annotated[float, typer.Option(help="Pace of a draft step.")] = 30.0
    coupled: Annotated[bool, typer.Option(help="Draw by seed and place alone: all methods write one text.")] = False


def run(settings: Settings) -> None:
    """Paced measurements of PEARL. Speeds are tokens per second of decoding, prefill left out.

    Ends with a line for each file, temperature and ratio of the JSON file: tokens per second, over what serial decoding
    reaches on the very same text at its best window without any overhead, and in brackets the share of the own schedule
    without overhead. Corrections are those of the run whose window is the ratio.
    """
    pair = PairSettings(target=settings.target, draft=settings.draft, dtype="float32", threads=1).load()
    step, new_tokens, path = settings.draft_milliseconds, settings.max_new_tokens, settings.json_file
    table = Table(pair.target, pair.draft, pair.tokenizer, step / 1000, new_tokens, settings.coupled)
    held: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    only, limit = settings.only, settings.limit
    asked = {"only": only, "limit": limit, "new_tokens": new_tokens, "step": step}
    asked["coupled"] = settings.coupled
    typer.echo("| prompts | T | ratio | method | tokens/s | of its bound | α | foreseen | text |\n" + "|-" * 9 + "|")
    for source, t, c in product(settings.prompts, settings.temperature, settings.ratio):
        cell = {"prompts": set_name(source), "temperature": t, "ratio": c} | asked
        if any(cell.items() <= ({"coupled": False} | row).items() for row in held):
            continue
        for row in table.run(set_name(source), load_prompts(source, limit), c, t, only):
            typer.echo(line_of(row))
            held.append(asdict(row) | asked)
        path.write_text(json.dumps(held, indent=1))
    fields = Row.__dataclass_fields__
    rows = [{name: row[name] for name in fields if name in row} for row in held]
    typer.echo(overview([Row(**row) for row in rows]))


main = expanded(run)

if __name__ == "__main__":
    typer.run(main)
