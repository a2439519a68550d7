"""What each part of streaming buys: streams, candidates, nodes, and pruning (the paper's Figure 5).

    python docs/laboratory/streaming_ablation.py --target smollm2 --pack-linear --streams hub_configs/streaming \\
        --prompts PROMPTS --picture ablation.png

The streams as they were trained, used in part: the first γ of them, k candidates of each, trees of so many nodes, and
the paper's full product with and without pruning. Copies stay out. All ways take turns at each prompt; plain decoding
is 1. What a forward is fed in its lower layers is `nodes`, and what is left of it in the upper ones `kept`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from typer import Option

from hf_specdec import SpeculationStats, StreamingDrafter
from hf_specdec.commands.options import command
from hf_specdec.tools.loading.models import PairSettings
from hf_specdec.tools.loading.prompts import load_prompts
from in_turn import Way, take_turns


@dataclass(kw_only=True)
class AblationSettings(PairSettings):
    """What is taken apart."""

    streams: Annotated[str, Option(help="Folder of trained streams.")]
    prompts: Annotated[list[str], Option(help="JSON lines, or text with a prompt per line.")]
    limit: Annotated[int, Option(help="Prompts of each file.")] = 4
    max_new_tokens: Annotated[int, Option(help="Per prompt.")] = 64
    chat: Annotated[bool, Option("--chat", help="Ask texts as questions, as streams of one task were trained.")] = False
    prune_below: Annotated[float, Option(help="Chance below which pruned products lose a node.")] = 0.05
    picture: Annotated[str | None, Option(help="Picture to save.")] = None


@dataclass(kw_only=True)
class Part(Way):
    """One way to use the streams."""

    panel: str
    """which curve it is a point of"""
    x: int = 0
    drafted: int = 0
    pruned: int = 0

    def count(self, stats: SpeculationStats) -> None:
        super().count(stats)
        self.drafted += sum((width - 1) * count for width, count in stats.verify_widths.items())
        self.pruned += sum(int(note.split()[0]) for note in stats.notes if "were pruned" in note)


def main(settings: AblationSettings) -> None:
    """Decode in all ways, and print."""
    pair = settings.load()
    whole = StreamingDrafter.from_pretrained(settings.streams)
    ways = [Part(panel="plain"), *_ways(whole, settings.prune_below)]
    prompts = [prompt for name in settings.prompts for prompt in load_prompts(name, settings.limit)]
    prompts = [replace(prompt, chat=prompt.chat or settings.chat) for prompt in prompts]
    take_turns(pair.target, pair.tokenizer, prompts, ways, settings.max_new_tokens)
    plain, *others = ways
    table = Table("part", "", "tokens per call", "nodes", "kept", "speed-up")
    for way in others:
        nodes, kept = way.drafted / way.steps, (way.drafted - way.pruned) / way.steps
        figures = (f"{way.per_call:.2f}", f"{nodes:.1f}", f"{kept:.1f}", f"{way.speed / plain.speed:.2f}")
        table.add_row(way.panel, str(way.x), *figures)
    Console().print(table)
    if settings.picture is not None:
        _draw(others, plain, settings.picture)


def _ways(whole: StreamingDrafter, prune_below: float) -> list[Part]:
    gamma, most = whole.config.num_streams, 16
    ways = [Part(panel="streams", x=g, drafter=_part(whole, g, num_nodes=most)) for g in range(1, gamma + 1)]
    ways += [
        Part(panel="candidates", x=k, drafter=_part(whole, gamma, num_nodes=most, num_candidates=k))
        for k in (1, 2, 4, 8)
    ]
    ways += [Part(panel="nodes", x=n, drafter=_part(whole, gamma, num_nodes=n)) for n in (4, 8, 16, 32)]
    ways += [Part(panel="nodes by the budget", x=0, drafter=_part(whole, gamma))]
    for name, chance in (("product", 0.0), ("product, pruned", prune_below)):
        options = {"tree": "product", "prune_below": chance}
        ways += [
            Part(panel=name, x=k, drafter=_part(whole, min(3, gamma), num_candidates=k, **options))
            for k in (1, 2, 3, 4)
        ]
    return ways


def _part(whole: StreamingDrafter, gamma: int, **options: Any) -> StreamingDrafter:
    """The same streams, but only the first γ of them."""
    trained = whole.config.chosen()
    part = {"num_streams": gamma, "copies": False, "acceptance": [], "acceptance_sampled": []}
    drafter = StreamingDrafter(**(trained | part | options))
    weights = whole.weights()
    drafter.load_weights(weights | {"embeddings": weights["embeddings"][:gamma]})
    return drafter


def _draw(ways: Sequence[Part], plain: Part, path: str) -> None:
    """Tokens per call and speed-up by what was varied; the products' speed-up in one panel, as in Figure 5."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    panels = {"streams": "γ", "candidates": "k", "nodes": "nodes", "product": "k of the full product, γ = 3"}
    for axes, (panel, label) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for name in dict.fromkeys(way.panel for way in ways if way.panel.startswith(panel) and way.x):
            mine = [way for way in ways if way.panel == name]
            axes.plot(
                [way.x for way in mine], [way.speed / plain.speed for way in mine], "o-", label=f"{name}: speed-up"
            )
            if panel != "product":
                axes.plot([way.x for way in mine], [way.per_call for way in mine], "o--", label="tokens per call")
        axes.set(xlabel=label)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    command(main, None, __doc__)()
