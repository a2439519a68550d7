"""The paper's Tables 1, 2 and 4 for a pair of models: every stop rule in one run, simulated and by the clock.

    python -m hf_specdec.bench.disco_table --target T --draft D --train A.jsonl --test B.jsonl --output OUT

Rules are chosen on validation prompts and compared on test prompts. Records are made once and kept in the output
folder; the simulation plays all rules over the same records, with costs that are measured, paced or stated (`--c`).
"""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..drafters.disco import StopClassifier
from ..errors import SpeculationError
from ..training.disco.extraction import Regime, extract
from ..training.disco.fitting import fit, quality
from ..training.disco.records import Record
from ..training.disco.run import sample_prompts
from ..training.disco.simulation import Costs, Rule, Values, play, values_of
from ..training.disco.tuning import WIDTHS, chances, measure_costs, simulated_choices
from .disco_baselines import HF_LONGEST, LONGEST, Chosen, Heuristic, Perplexity, Recalibrated, Static, Threshold
from .disco_clock import clock, clock_methods
from .measure import load_model, load_tokenizer
from .oracle import oracle_report, plot_oracle
from .pacing import paced
from .pretended import pretended_costs
from .provenance import provenance

LIMITS = (1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 6.0)
THRESHOLDS = tuple(0.05 * i for i in range(1, 20))
RATES = (0.03, 0.1, 0.3)
"""of recalibration, in log-odds per token"""
STATED_WIDTH_COST = 0.03
"""by which each further token widens a verification, in target steps, where costs are stated"""
STATED_RULE_COST = 0.05
"""of the classifier, in draft steps, where costs are stated"""
TIMED = 8
"""test prompts that are decoded by the clock, where nothing else is said"""
HF_THRESHOLD = 0.4
"""transformers' default"""


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


def seconds_of(values: Sequence[Values], make: Callable[[], Rule], costs: Costs, longest: int = LONGEST) -> float:
    """All texts under one rule, each with a rule of its own."""
    return sum(costs.seconds(play(value, make(), longest)) for value in values)


def choose_all(
    classifier: StopClassifier,
    plainer: StopClassifier,
    validation: Sequence[Record],
    test: Sequence[Record],
    costs: Costs,
    do_sample: bool,
) -> list[Chosen]:
    """Every method, tuned on validation records, with the test texts as it reads them.

    Args:
        plainer: a classifier that is told nothing of the lookup.
    """

    def top(records: Sequence[Record]) -> list[Values]:
        return [values_of(record, lambda x: x[..., 0]) for record in records]

    seen, held, own, own_held = (
        top(validation),
        top(test),
        *(chances(classifier, r, do_sample) for r in (validation, test)),
    )

    def best(grid: Sequence[Any], rule: Callable[[Any], Rule]) -> Any:
        return min(grid, key=lambda value: seconds_of(seen, lambda: rule(value), costs))

    gamma, limit, confidence = (
        best(range(1, LONGEST + 1), Static),
        best(LIMITS, Perplexity),
        best(THRESHOLDS, Threshold),
    )
    hindsight = min(range(1, LONGEST + 1), key=lambda g: seconds_of(held, lambda: Static(g), costs))
    chosen = [
        Chosen("static 5", "", held, lambda: Static(5)),
        Chosen("static optimal", f"γ {gamma}", held, lambda: Static(gamma)),
        Chosen("static, best on test", f"γ {hindsight}", held, lambda: Static(hindsight)),
        Chosen("transformers heuristic", "", held, Heuristic, longest=LONGEST),
        Chosen("transformers confidence", f"τ {HF_THRESHOLD}", held, lambda: Threshold(HF_THRESHOLD), HF_LONGEST),
        Chosen("confidence, tuned", f"τ {confidence:.2f}", held, lambda: Threshold(confidence)),
        Chosen("perplexity", f"≤ {limit}", held, lambda: Perplexity(limit)),
    ]
    for name in ("token", "draft"):
        found = simulated_choices(own, costs, [name])[0]  # type: ignore[list-item]
        drafter_rule = _disco_rule(name, found.tau)
        label = f"τ {found.tau}, SLmax {found.longest}"
        chosen.append(Chosen(f"DISCO, {name} rule", label, own_held, drafter_rule, found.longest, True))
    blind, blind_held = (chances(plainer, [blinded(r) for r in some], do_sample) for some in (validation, test))
    found = simulated_choices(blind, costs, ["draft"])[0]
    label = f"τ {found.tau}, SLmax {found.longest}"
    chosen.append(
        Chosen("draft rule, no lookup", label, blind_held, _disco_rule("draft", found.tau), found.longest, True)
    )
    grid = [(tau, rate) for tau in THRESHOLDS for rate in RATES]
    tau, rate = min(grid, key=lambda pair: seconds_of(own, lambda: Recalibrated(*pair), costs.with_rule()))
    label = f"τ {tau:.2f}, rate {rate}"
    chosen.append(Chosen("draft rule, recalibrated", label, own_held, lambda: Recalibrated(tau, rate), asks=True))
    chosen.append(Chosen("stops at a mistake", "", [told(value) for value in held], lambda: Threshold(0.5)))
    return chosen


def told(values: Values) -> Values:
    """For a rule that is told of each token, once it is drafted, whether it will be accepted."""
    return Values(
        [float(fine) for fine in values.accepted], [[0.0] * len(row) for row in values.after], values.accepted
    )


def blinded(record: Record) -> Record:
    """The record with nothing known of the lookup."""
    features, after = record.features.clone(), record.after.clone()
    features[..., -2:] = 0
    after[..., -2:] = 0
    return replace(record, features=features, after=after)


def _disco_rule(name: str, tau: float) -> Callable[[], Rule]:
    from ..drafters.disco import StopRule

    return lambda: StopRule(tau, name == "draft")


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
    for field, label in (("speedup", ""), ("measured_speedup", ", by the clock")):
        for result in results:
            kind = "T = 1" if result["sampled"] else "greedy"
            values = [line[field] for line in result["lines"]]
            if any(values):
                columns[f"{result['set']}, {kind}{label}"] = values
    rows = [f"| method | {' | '.join(columns)} |", "|---" + "|---:" * len(columns) + "|"]
    for i, line in enumerate(results[0]["lines"]):
        cells = ["-" if values[i] is None else f"{values[i]:.2f}" for values in columns.values()]
        rows.append(f"| {line['method']} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main(
    target: Annotated[str, typer.Option(help="Folder or repo of the target.")],
    draft: Annotated[str, typer.Option(help="Folder or repo of the draft.")],
    train: Annotated[Path, typer.Option(help="Prompts to train the classifier on.")],
    test: Annotated[list[Path], typer.Option(help="Prompts to compare on; a further one shows transfer.")],
    output: Annotated[Path, typer.Option(help="Folder for records, tables and plots.")],
    validation: Annotated[Path | None, typer.Option(help="Prompts to choose rules on; from --train if none.")] = None,
    limit: Annotated[int, typer.Option(help="Training prompts; half as many to validate and to test.")] = 128,
    timed: Annotated[
        int | None, typer.Option(help="Test prompts to decode by the clock, 8 if not given; 0 leaves it at simulation.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 96,
    pad_target_mlp: Annotated[int | None, typer.Option(help="Widen the target's MLPs to cost more.")] = None,
    pad_draft_mlp: Annotated[int | None, typer.Option(help="Widen the draft's MLPs likewise.")] = None,
    pace_target: Annotated[
        float | None, typer.Option(help="Milliseconds that each forward of the target takes, whatever its width.")
    ] = None,
    pace_draft: Annotated[float | None, typer.Option(help="Milliseconds that each forward of the draft takes.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "bfloat16",
    c: Annotated[
        list[float],
        typer.Option(help="State a draft step's cost in target steps; without clock, --timed, padding and pace."),
    ] = [],  # noqa: B006
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    seed: Annotated[int, typer.Option(help="Of sampling, splits and the classifier.")] = 0,
) -> None:
    """Compare all stop rules."""
    pretended = {
        "pad_target_mlp": pad_target_mlp,
        "pad_draft_mlp": pad_draft_mlp,
        "pace_target": pace_target,
        "pace_draft": pace_draft,
    }
    given = [f"{name}={value}" for name, value in (pretended | {"timed": timed}).items() if value is not None]
    if c and given:
        raise SpeculationError(f"c={c} states the costs and leaves out the clock; drop c, or drop {', '.join(given)}")
    timed = TIMED if timed is None else timed
    torch.set_num_threads(threads)
    tokenizer, plain_target, plain_draft = (
        load_tokenizer(target),
        load_model(target, dtype, "cpu"),
        load_model(draft, dtype, "cpu"),
    )
    training = sample_prompts(train, limit, seed)
    held = sample_prompts(validation or train, None, seed)
    held = [text for text in held if text not in set(training)][: limit // 2]
    tests = {path.stem: sample_prompts(path, limit // 2, seed) for path in test}

    def records(prompts: Sequence[str], do_sample: bool, split: str, rollout: int, number: int) -> list[Record]:
        regime = Regime(do_sample, max_new_tokens, 10, rollout, seed + number)
        name = f"{split}-{'sampled' if do_sample else 'greedy'}"
        return extract(plain_target, plain_draft, tokenizer, prompts, regime, output / "records" / name, name)

    seen = {s: records(training, s, "train", 0, 0) for s in (False, True)}
    valid = {s: records(held, s, "validation", LONGEST - 1, 1) for s in (False, True)}
    tested = {(n, s): records(p, s, n, LONGEST - 1, 2) for n, p in tests.items() for s in (False, True)}
    classifier = fit(seen, valid, seed=seed)
    seen_blind, valid_blind = ({s: [blinded(r) for r in some] for s, some in each.items()} for each in (seen, valid))
    plainer = fit(seen_blind, valid_blind, seed=seed)
    padded_target = load_model(target, dtype, "cpu", pad_target_mlp)
    padded_draft = load_model(draft, dtype, "cpu", pad_draft_mlp)
    kind_of_costs = "stated" if c else "paced" if pace_target or pace_draft else "measured"
    stated = [Costs(x, lambda width: 1 + STATED_WIDTH_COST * (width - 1), STATED_RULE_COST * x) for x in c]
    with ExitStack() as pace:
        for model, milliseconds in ((padded_target, pace_target), (padded_draft, pace_draft)):
            if milliseconds is not None:
                pace.enter_context(paced(model, milliseconds))
        for costs in stated or [measure_costs(padded_target, padded_draft, classifier)]:
            ratio = costs.draft / costs.verify(1)
            label = f"table-{kind_of_costs}-{ratio:.2f}"
            about = ", ".join([f"trained on {train.stem}", *pretended_costs(pretended)])
            text = [f"# Stop rules at c = {ratio:.2f} ({kind_of_costs}), {about}"]
            typer.echo(text[0])
            results: list[dict[str, Any]] = []
            for (name, do_sample), recorded in tested.items():
                chosen = choose_all(classifier, plainer, valid[do_sample], recorded, costs, do_sample)
                lines = simulate(chosen, costs)
                if timed and not c:
                    methods = clock_methods(chosen, padded_draft, classifier)
                    regime = Regime(do_sample, max_new_tokens, 10, 0, seed)
                    measured = clock(padded_target, padded_draft, tokenizer, methods, tests[name][: timed + 1], regime)
                    for line in lines:
                        if line.method in measured:
                            line.measured_speedup = measured["plain"] / measured[line.method]
                compare_with_static(lines)
                found = quality(classifier, recorded, do_sample)
                f1 = f"F1 {found.f1:.2f}, {found.f1_always:.2f} if all were accepted; calibration error"
                kind = "sampled" if do_sample else "greedy"
                text += [f"## {name}, {kind}", f"{f1} {found.calibration_error:.3f}.", table(lines)]
                results.append(
                    {
                        "set": name,
                        "sampled": do_sample,
                        "quality": asdict(found),
                        "lines": [asdict(line) for line in lines],
                    }
                )
                whole = [*text, "## Speed-ups", overview(results)]
                (output / f"{label}.md").write_text("\n\n".join(whole) + "\n")
                typer.echo("\n".join(text[-3:]))
                gamma = next(one for one in chosen if one.name == "static optimal").make().gamma  # type: ignore[attr-defined]
                plot_oracle(chosen[0].values, f"{name}-{kind}", gamma, output / "plots")
            typer.echo(overview(results))
            summary = {
                "c": ratio,
                "costs": kind_of_costs,
                "draft_seconds": costs.draft,
                "rule_seconds": costs.rule,
                "target_seconds": {width: costs.verify(width) for width in WIDTHS},
                "provenance": provenance(torch.device("cpu")),
                "results": results,
            }
            (output / f"{label}.json").write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
