"""Does the budget know what it says? Chances against what came true, and its decisions replayed.

    python docs/laboratory/budget.py --target smollm2 --pack-linear --prompts PROMPTS --drafter hub_configs/hybrid \\
        --drafter prompt_lookup --picture reliability.png

Each drafter decodes the prompts greedily. Counted from the 200th round on: how far the chances of nodes to survive are
from what came true (ECE), and by how much tokens and seconds of rounds differ from what the budget expected when it
decided. How far its times are off is seen in the first 200 rounds; with that the replay foretells the tokens per second
of the others. The picture shows the chances by what came true.
"""

from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from typer import Option

from hf_specdec import SpeculationError
from hf_specdec.commands.options import command
from hf_specdec.tools.loading.chat import batch, prompt_ids
from hf_specdec.tools.loading.drafters import load_drafter
from hf_specdec.tools.loading.models import PairSettings
from hf_specdec.tools.loading.prompts import load_prompts
from traces import Traced, TracingDrafter, calibration_error

LEARNED = 200
"""rounds after which is counted; what these took says how far measured times are off"""


@dataclass(kw_only=True)
class BudgetSettings(PairSettings):
    """What decodes what."""

    prompts: Annotated[list[str], Option(help="JSON lines, or text with a prompt per line.")]
    drafter: Annotated[list[str], Option(help="Folder, repo or type:key=value,...")] = field(default_factory=list)
    limit: Annotated[int, Option(help="Prompts of each file.")] = 8
    max_new_tokens: Annotated[int, Option(help="Per prompt.")] = 96
    batch_size: Annotated[int, Option(help="Prompts decoded together.")] = 1
    picture: Annotated[str | None, Option(help="Picture to save.")] = None


def main(settings: BudgetSettings) -> None:
    """Decode and print."""
    pair = settings.load()
    columns = "tokens, of those expected", "seconds", "tokens per second, of those foretold"
    table = Table("drafter", "rounds", "ECE", *columns)
    reliability = {}
    for spec in settings.drafter:
        loaded = load_drafter(spec, pair.draft, target=pair.target, **settings.of_drafts())
        every = _decode(settings, pair, TracingDrafter(loaded), spec)
        first, rounds = every[:LEARNED], every[LEARNED:]
        if not rounds:
            raise SpeculationError(f"{spec} has no more than {LEARNED} rounds; set limit or max_new_tokens higher")
        error, reliability[spec] = calibration_error(list(chain.from_iterable(r.fates for r in rounds)))
        (tokens, seconds), (_, off) = came_true(rounds), came_true(first)
        figures = (f"{value:.3f}" for value in (error, tokens, seconds, tokens / (seconds / off)))
        table.add_row(spec, str(len(rounds)), *figures)
    Console().print(table)
    if settings.picture is not None:
        _draw(reliability, settings.picture)


def came_true(rounds: list[Traced]) -> tuple[float, float]:
    """Tokens, and seconds, over what the budget expected when it decided."""
    _, tokens, seconds = zip(*(r.replayed() for r in rounds), strict=True)
    return sum(r.tokens for r in rounds) / sum(tokens), sum(r.seconds for r in rounds) / sum(seconds)


def _decode(settings: BudgetSettings, pair: Any, drafter: TracingDrafter, spec: str) -> list[Traced]:
    """The rounds of all prompts."""
    files = [load_prompts(name, settings.limit) for name in settings.prompts]
    prompts = [prompt for group in zip(*files, strict=False) for prompt in group]  # of all kinds in turn
    size = settings.batch_size
    for at in tqdm(range(0, len(prompts), size), spec, unit="batch"):
        rows = [prompt_ids(pair.tokenizer, prompt) for prompt in prompts[at : at + size]]
        inputs = batch(rows, pair.tokenizer.pad_token_id, pair.target.device)
        options = {"max_new_tokens": settings.max_new_tokens, "do_sample": False}
        pair.target.generate(**inputs, **options, assistant_model=drafter, pad_token_id=pair.tokenizer.pad_token_id)
    return drafter.rounds


def _draw(reliability: dict[str, list[tuple[float, float, int]]], path: str) -> None:
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
    for spec, bins in reliability.items():
        said, true, counts = zip(*bins, strict=True)
        (line,) = axes.plot(said, true, label=spec.removeprefix("hub_configs/"))
        axes.scatter(said, true, [8 + 200 * n / sum(counts) for n in counts], color=line.get_color())
    axes.set(xlabel="chance that a node survives, as the budget had it", ylabel="share that survived")
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    command(main, None, __doc__)()
