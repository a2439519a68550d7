"""The paper's Tables 1, 2 and 4 for a pair of models: every stop rule in one run, simulated and by the clock.

    python docs/laboratory/disco_table.py --target T --draft D --train A.jsonl --test B.jsonl --output OUT

Rules are chosen on validation prompts and compared on test prompts. Records are made once and kept in the output
folder; the simulation plays all rules over the same records, with costs that are measured, paced or stated (`--c`).
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from disco_baselines import LONGEST, Chosen
from disco_choices import blinded, choose_all, seconds_of
from disco_clock import clock, clock_methods
from disco_oracle import oracle_report, plot_oracle
from hf_specdec.commands.options import expanded
from hf_specdec.drafters.disco import StopClassifier
from hf_specdec.errors import SpeculationError
from hf_specdec.tools.instruments.pretended import paced, pretended_costs
from hf_specdec.tools.instruments.provenance import provenance
from hf_specdec.tools.loading.models import ModelSource, load_model, load_tokenizer
from hf_specdec.tools.loading.prompts import Prompt, sample_prompts
from hf_specdec.tools.loading.rows import set_name
from hf_specdec.train.disco.extraction import Regime, extract
from hf_specdec.train.disco.fitting import fit, quality
from hf_specdec.train.disco.records import Record
from hf_specdec.train.disco.simulation import Costs
from hf_specdec.train.disco.tuning import WIDTHS, measure_costs

STATED_WIDTH_COST = 0.03
"""by which each further token widens a verification, in target steps, where costs are stated"""
STATED_RULE_COST = 0.05
"""of the classifier, in draft steps, where costs are stated"""
TIMED = 8
"""test prompts that are decoded by the clock, where nothing else is said"""
K = 10
"""likeliest tokens that the classifier sees"""
KINDS = {False: "greedy", True: "sampled"}


class Models(NamedTuple):
    """A loaded pair."""

    tokenizer: PreTrainedTokenizerBase
    target: PreTrainedModel
    draft: PreTrainedModel


@dataclass
class Settings:
    """Options of the command."""

    target: Annotated[str, typer.Option(help="Folder or repo of the target.")]
    draft: Annotated[str, typer.Option(help="Folder or repo of the draft.")]
    train: Annotated[str, typer.Option(help="Prompts to train the classifier on.")]
    test: Annotated[list[str], typer.Option(help="Prompts to compare on; a further one shows transfer.")]
    output: Annotated[Path, typer.Option(help="Folder for records, tables and plots.")]
    validation: Annotated[str | None, typer.Option(help="Prompts to choose rules on; from --train if none.")] = None
    limit: Annotated[int, typer.Option(help="Training prompts; half as many to validate and to test.")] = 128
    timed: Annotated[
        int | None, typer.Option(help="Test prompts to decode by the clock, 8 if not given; 0 leaves it at simulation.")
    ] = None
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 96
    pad_target_mlp: Annotated[int | None, typer.Option(help="Widen the target's MLPs to cost more.")] = None
    pad_draft_mlp: Annotated[int | None, typer.Option(help="Widen the draft's MLPs likewise.")] = None
    pace_target: Annotated[
        float | None, typer.Option(help="Milliseconds that each forward of the target takes, whatever its width.")
    ] = None
    pace_draft: Annotated[float | None, typer.Option(help="Milliseconds that each forward of the draft takes.")] = None
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "bfloat16"
    c: Annotated[
        list[float],
        typer.Option(help="State a draft step's cost in target steps; without clock, --timed, padding and pace."),
    ] = field(default_factory=list)
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2
    seed: Annotated[int, typer.Option(help="Of sampling, splits and the classifier.")] = 0

    def check(self) -> None:
        """
        Raises:
            SpeculationError: options that stated costs would ignore.
        """
        clock = ("pad_target_mlp", "pad_draft_mlp", "pace_target", "pace_draft", "timed")
        given = [f"{name}={getattr(self, name)}" for name in clock if getattr(self, name) is not None]
        if self.c and given:
            raise SpeculationError(
                f"c={self.c} states the costs and leaves out the clock; drop c, or drop {', '.join(given)}"
            )

    def load(self, pad_target_mlp: int | None = None, pad_draft_mlp: int | None = None) -> Models:
        """The models, cost-padded where asked for."""
        target = ModelSource(self.target, self.dtype, pad_mlp=pad_target_mlp)
        draft = ModelSource(self.draft, self.dtype, pad_mlp=pad_draft_mlp)
        return Models(load_tokenizer(target), load_model(target), load_model(draft))

    @property
    def kind_of_costs(self) -> str:
        return "stated" if self.c else "paced" if self.pace_target or self.pace_draft else "measured"

    def regime(self, do_sample: bool, rollout: int = 0, number: int = 0) -> Regime:
        """How the target writes; each split has a seed of its own."""
        return Regime(do_sample, self.max_new_tokens, K, rollout, self.seed + number)


@dataclass
class Study:
    """What the rules are chosen and compared on."""

    validation: dict[bool, list[Record]]
    """greedy and sampled"""
    tested: dict[tuple[str, bool], list[Record]]
    """by set, greedy and sampled"""
    prompts: dict[str, list[Prompt]]
    """of the test sets"""
    classifier: StopClassifier
    plainer: StopClassifier
    """one that is told nothing of the lookup"""


@dataclass
class Line:
    """A row of the table."""

    method: str
    choice: str
    """what validation chose"""
    seconds: float
    speedup: float
    of_oracle: float
    measured_speedup: float | None = None
    of_static: float | None = None
    """speed over the best static window's, by the clock where there is one, else simulated"""


def simulate(chosen: Sequence[Chosen], costs: Costs) -> list[Line]:
    """The table by simulation; the oracle is its last line."""
    oracle = oracle_report(chosen[0].values, costs)
    lines = [Line("plain", "", oracle.plain_seconds, 1.0, 1 / oracle.speedup)]
    for one in chosen:
        seconds = seconds_of(one.values, one.make, costs.with_rule() if one.asks else costs, one.longest)
        lines.append(Line(one.name, one.choice, seconds, oracle.plain_seconds / seconds, oracle.seconds / seconds))
    spread = f"lookahead {oracle.mean:.1f} ± {oracle.deviation:.1f}"
    return [*lines, Line("oracle", spread, oracle.seconds, oracle.speedup, 1.0)]


def compare_with_static(lines: Sequence[Line]) -> None:
    """Set `of_static`: against the best of the static windows, the one chosen on the test texts included."""
    static = [line for line in lines if line.method.startswith("static")]
    measured = [line.measured_speedup for line in static if line.measured_speedup is not None]
    best = max(measured or (line.speedup for line in static))
    for line in lines:
        speedup = line.measured_speedup if measured else line.speedup
        line.of_static = None if speedup is None else speedup / best


def table(lines: Sequence[Line]) -> str:
    """Markdown."""
    head = [
        "| method | chosen on validation | simulated speed-up | of the oracle's | by the clock | over best static |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        measured = "-" if line.measured_speedup is None else f"{line.measured_speedup:.2f}x"
        static = "-" if line.of_static is None else f"{line.of_static:.2f}"
        share = f"{line.of_oracle:.0%}"
        head.append(f"| {line.method} | {line.choice} | {line.speedup:.2f}x | {share} | {measured} | {static} |")
    return "\n".join(head)


def overview(results: Sequence[dict[str, Any]]) -> str:
    """Speed-ups of all methods (rows) on all sets (columns): simulated, and by the clock where that was asked for."""
    columns: dict[str, list[float | None]] = {}
    for figure, label in (("speedup", ""), ("measured_speedup", ", by the clock")):
        for result in results:
            kind = "T = 1" if result["sampled"] else "greedy"
            values = [line[figure] for line in result["lines"]]
            if any(values):
                columns[f"{result['set']}, {kind}{label}"] = values
    rows = [f"| method | {' | '.join(columns)} |", "|---" + "|---:" * len(columns) + "|"]
    for i, line in enumerate(results[0]["lines"]):
        cells = ["-" if values[i] is None else f"{values[i]:.2f}" for values in columns.values()]
        rows.append(f"| {line['method']} | {' | '.join(cells)} |")
    return "\n".join(rows)


def run(settings: Settings) -> None:
    """Compare all stop rules."""
    settings.check()
    torch.set_num_threads(settings.threads)
    known = study(settings)
    models = settings.load(settings.pad_target_mlp, settings.pad_draft_mlp)
    stated = [Costs(c, lambda width: 1 + STATED_WIDTH_COST * (width - 1), STATED_RULE_COST * c) for c in settings.c]
    with ExitStack() as pace:
        for model, milliseconds in ((models.target, settings.pace_target), (models.draft, settings.pace_draft)):
            if milliseconds is not None:
                pace.enter_context(paced(model, milliseconds))
        for costs in stated or [measure_costs(models.target, models.draft, known.classifier)]:
            compare(settings, known, models, costs)


def study(settings: Settings) -> Study:
    """Record what the models do on all sets, and train the classifiers."""
    seed, half = settings.seed, settings.limit // 2
    tokenizer, target, draft = settings.load()
    training = sample_prompts(settings.train, settings.limit, seed)
    held = sample_prompts(
        settings.validation or settings.train, None, seed, "validation" if settings.validation else "train"
    )
    held = [prompt for prompt in held if prompt not in set(training)][:half]
    tests = {set_name(source): sample_prompts(source, half, seed, split="test") for source in settings.test}

    def records(prompts: Sequence[Prompt], do_sample: bool, split: str, rollout: int, number: int) -> list[Record]:
        name = f"{split}-{KINDS[do_sample]}"
        regime, folder = settings.regime(do_sample, rollout, number), settings.output / "records" / name
        return extract(target, draft, tokenizer, prompts, regime, folder, name)

    seen = {s: records(training, s, "train", 0, 0) for s in KINDS}
    valid = {s: records(held, s, "validation", LONGEST - 1, 1) for s in KINDS}
    tested = {(n, s): records(p, s, n, LONGEST - 1, 2) for n, p in tests.items() for s in KINDS}
    seen_blind, valid_blind = ({s: [blinded(r) for r in some] for s, some in each.items()} for each in (seen, valid))
    classifier, plainer = fit(seen, valid, seed=seed), fit(seen_blind, valid_blind, seed=seed)
    return Study(valid, tested, tests, classifier, plainer)


def compare(settings: Settings, known: Study, models: Models, costs: Costs) -> None:
    """All rules on all sets at these costs; what is known is written after each set."""
    ratio = costs.draft / costs.verify(1)
    output = settings.output / f"table-{settings.kind_of_costs}-{ratio:.2f}"
    about = ", ".join([f"trained on {set_name(settings.train)}", *pretended_costs(vars(settings))])
    text = [f"# Stop rules at c = {ratio:.2f} ({settings.kind_of_costs}), {about}"]
    typer.echo(text[0])
    results: list[dict[str, Any]] = []
    for (name, do_sample), recorded in known.tested.items():
        chosen = choose_all(known.classifier, known.plainer, known.validation[do_sample], recorded, costs, do_sample)
        lines = simulate(chosen, costs)
        timed = TIMED if settings.timed is None else settings.timed
        if timed and not settings.c:
            methods = clock_methods(chosen, models.draft, known.classifier)
            prompts = known.prompts[name][: timed + 1]
            measured = clock(
                models.target, models.draft, models.tokenizer, methods, prompts, settings.regime(do_sample)
            )
            for line in lines:
                if line.method in measured:
                    line.measured_speedup = measured["plain"] / measured[line.method]
        compare_with_static(lines)
        found = quality(known.classifier, recorded, do_sample)
        f1 = f"F1 {found.f1:.2f}, {found.f1_always:.2f} if all were accepted; calibration error"
        text += [f"## {name}, {KINDS[do_sample]}", f"{f1} {found.calibration_error:.3f}.", table(lines)]
        rows = [asdict(line) for line in lines]
        results.append({"set": name, "sampled": do_sample, "quality": asdict(found), "lines": rows})
        whole = [*text, "## Speed-ups", overview(results)]
        output.with_name(f"{output.name}.md").write_text("\n\n".join(whole) + "\n")
        typer.echo("\n".join(text[-3:]))
        gamma = next(one for one in chosen if one.name == "static optimal").make().gamma  # type: ignore[attr-defined]
        plot_oracle(chosen[0].values, f"{name}-{KINDS[do_sample]}", gamma, settings.output / "plots")
    typer.echo(overview(results))
    summary = {
        "c": ratio,
        "costs": settings.kind_of_costs,
        "draft_seconds": costs.draft,
        "rule_seconds": costs.rule,
        "target_seconds": {width: costs.verify(width) for width in WIDTHS},
        "provenance": provenance(torch.device("cpu")),
        "results": results,
    }
    output.with_name(f"{output.name}.json").write_text(json.dumps(summary, indent=2) + "\n")


main = expanded(run)

if __name__ == "__main__":
    typer.run(main)
