"""DISCO's Tables 1, 2 and 4 for a pair of models: every stop rule by the clock, with the same number of candidates.

    python docs/laboratory/disco_table.py --target smollm2 --pack-linear \\
        --draft hub_configs/draft_model/draft_model --trained hub_configs/disco \\
        --validation maths --prompts code --prompts sentences

Fixed windows are chosen on validation prompts, as in the paper (Appendix E), and on the test prompts themselves, which
nobody can know before: the harder comparison. Methods take turns at each prompt, in greedy decoding. `--counted` leaves
out whatever depends on the clock, and so on what else the machine does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any
from unittest.mock import patch

from typer import Option

from disco_windows import f1_of_windows, oracle_windows
from hf_specdec import DiscoDrafter, Drafter, DraftModelDrafter, SpeculationError
from hf_specdec.commands.options import command
from hf_specdec.drafters.disco import Threshold
from hf_specdec.tools.bench.methods import PLAIN, build_method
from hf_specdec.tools.loading.models import Pair, PairSettings
from hf_specdec.tools.loading.prompts import Prompt, load_prompts
from hf_specdec.tools.loading.rows import set_name
from hf_specdec.train.disco import Quality, answers, quality, records_of
from shared import Way, drafted, show, take_turns


@dataclass(kw_only=True)
class TableSettings(PairSettings):
    """What is compared."""

    trained: Annotated[str, Option(help="A DISCO drafter for this pair.")]
    validation: Annotated[list[str], Option(help="Prompts to choose the fixed window on.")]
    prompts: Annotated[list[str], Option(help="Prompts to compare on; may be given several times.")]
    limit: Annotated[int, Option(help="Prompts of each.")] = 8
    max_new_tokens: Annotated[int, Option(help="Per prompt.")] = 64
    windows: Annotated[list[int], Option("--window", help="γ; may be given several times.")] = field(
        default_factory=lambda: [1, 2, 3, 4, 5, 6, 8, 10]
    )
    candidates: Annotated[
        int, Option(help="Tokens tried per position, by all; above 1 without those that try one.")
    ] = 1
    counted: Annotated[bool, Option(help="Tables 2 and 4 alone, and rules that no clock is asked for.")] = False
    records: Annotated[str, Option(help="Folder for what was seen.")] = "records"


def main(settings: TableSettings) -> None:
    """Count, compare, print."""
    pair = settings.load()
    if pair.draft is None:
        raise SpeculationError("the table needs a draft model; name one with --draft")
    trained: Any = Drafter.from_pretrained(settings.trained, draft_model=pair.draft)
    if not isinstance(trained, DiscoDrafter):
        raise SpeculationError(f"--trained {settings.trained} must hold a DISCO drafter, not {type(trained).__name__}")
    validation = [prompt for source in settings.validation for prompt in load_prompts(source, settings.limit)]
    sets = {set_name(source): load_prompts(source, settings.limit) for source in settings.prompts}
    held_out = judged(pair, trained, validation, settings, "validation")
    chosen = held_out.best
    print(f"F1 of accepted tokens (γ = {chosen} had the best on validation prompts), and an oracle's windows")
    found = [predicted(name, judged(pair, trained, some, settings, name), chosen) for name, some in sets.items()]
    show(("prompts", "DISCO", f"γ = {chosen}", "best γ", "always accepting", "oracle"), found)
    if settings.counted:
        for name, prompts in sets.items():
            ways = [*fixed(pair, settings).values(), *rules(pair, trained, settings)]
            with patch.object(Threshold, "weighs", True):  # drafts that lose time are not paused
                take_turns(pair, prompts, ways, settings.max_new_tokens)
            print(f"\n{name}, {settings.candidates} per position")
            show(("", "tokens/call", "window"), [(way.method.name, f"{way.per_call:.2f}", spread(way)) for way in ways])
    else:
        compare(pair, trained, validation, sets, settings)


def compare(
    pair: Pair,
    trained: DiscoDrafter,
    validation: Sequence[Prompt],
    sets: Mapping[str, Sequence[Prompt]],
    settings: TableSettings,
) -> None:
    """Table 1, by the clock."""
    windows = fixed(pair, settings)
    take_turns(pair, validation, list(windows.values()), settings.max_new_tokens)
    chosen = fastest(windows)
    print(f"\nγ = {chosen} was fastest on {', '.join(map(set_name, settings.validation))}")
    for name, prompts in sets.items():
        windows = fixed(pair, settings)
        ways = [Way(method=build_method(PLAIN, None)), *windows.values(), *rules(pair, trained, settings)]
        take_turns(pair, prompts, ways, settings.max_new_tokens)
        print(f"\n{name}, {settings.candidates} per position")
        show(HEADER, [row(way, ways[0], windows[chosen], windows[fastest(windows)]) for way in ways])


def fixed(pair: Pair, settings: TableSettings) -> dict[int, Way]:
    """Fixed windows, not yet counted."""
    assert pair.draft is not None
    k = settings.candidates
    drafters = {g: DraftModelDrafter(pair.draft, num_draft_tokens=g, num_candidates=k) for g in settings.windows}
    return {g: Way(method=drafted(f"γ = {g}", drafter)) for g, drafter in drafters.items()}


def rules(pair: Pair, trained: DiscoDrafter, settings: TableSettings) -> list[Way]:
    """Rules that choose the window while they draft, all from the same draft model."""
    draft, classifier, k = trained.draft_model, trained.classifier, settings.candidates
    options = {name: getattr(trained.config, name) for name in ("tau", "tau_sampled", "lookup", "max_draft_tokens")}
    methods = []
    if not settings.counted:  # these go by measured times
        methods += [
            drafted("the draft's own chances", DraftModelDrafter(draft, num_candidates=k)),
            drafted("DISCO, budget", DiscoDrafter(draft, classifier, rule="budget", num_candidates=k, **options)),
        ]
    if k == 1:
        heuristic = "hf-assisted:num_assistant_tokens_schedule=heuristic"
        methods += [
            *(build_method(spec, draft) for spec in (heuristic, "hf-confidence")),
            drafted("DISCO, token", DiscoDrafter(draft, classifier, rule="token", **options)),
        ]
    return [Way(method=method) for method in methods]


def fastest(windows: dict[int, Way]) -> int:
    """γ with the most tokens per second."""
    return max(windows, key=lambda gamma: windows[gamma].speed)


HEADER = ("", "speed-up", "tokens/call", "window", "over γ of validation", "over best γ here", "same text")


def row(way: Way, plain: Way, validated: Way, best: Way) -> tuple[str, ...]:
    """A line of Table 1, with the mean and deviation of the windows as Table 2 has the oracle's."""
    over = (f"{way.speed / other.speed:.2f}" for other in (validated, best))
    return way.method.name, f"{way.speed / plain.speed:.2f}", f"{way.per_call:.2f}", spread(way), *over, str(way.same)


def spread(way: Way) -> str:
    """Mean and deviation of the windows that were drafted: of n rounds, `verified[i]` went beyond i tokens."""
    n = max(1, way.steps)
    mean = sum(way.verified.values()) / n
    squares = sum((2 * i + 1) * count for i, count in way.verified.items()) / n
    return f"{mean:.1f} ± {max(0.0, squares - mean**2) ** 0.5:.1f}"


@dataclass
class Judged:
    """On the target's greedy answers to some prompts."""

    disco: Quality
    windows: dict[int, float]
    """F1 of each fixed window"""
    oracle: list[int]
    """its windows"""

    @property
    def best(self) -> int:
        """The fixed window γ of the best F1."""
        return max(self.windows, key=self.windows.__getitem__)


def judged(pair: Pair, trained: DiscoDrafter, prompts: Sequence[Prompt], settings: TableSettings, name: str) -> Judged:
    """The classifier, fixed windows and an oracle."""
    texts = answers(pair, prompts, Path(settings.records) / name, False, settings.max_new_tokens)
    drafted_by = replace(pair, draft=trained.draft_model)
    records = records_of(drafted_by, texts, trained.config.k, trained.config.lookup)
    found = quality(trained.classifier, records, do_sample=False)
    return Judged(found, f1_of_windows(records), oracle_windows(records))


def predicted(name: str, found: Judged, chosen: int) -> tuple[str, ...]:
    """A line of Table 4, and the oracle's of Table 2."""
    f1 = (f"{x:.2f}" for x in (found.disco.f1, found.windows[chosen]))
    hindsight = f"{found.windows[found.best]:.2f} (γ = {found.best})"
    oracle = f"{fmean(found.oracle):.1f} ± {pstdev(found.oracle):.1f}"
    return name, *f1, hindsight, f"{found.disco.f1_always:.2f}", oracle


if __name__ == "__main__":
    command(main, None, __doc__)()
