"""What each part of streaming buys: streams, candidates, nodes, and pruning (the paper's Figure 5).

    python docs/laboratory/streaming_ablation.py --target smollm2 --pack-linear --streams hub_configs/streaming \\
        --prompts PROMPTS --picture ablation.png

The trained streams are used in part: the first γ of them, k candidates of each, and trees of so many nodes with and
without pruning. Copies are left out. All ways take turns at each prompt; plain decoding is 1.
`nodes` is what a forward is fed in its lower layers, `kept` what is left of it in the upper ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from matplotlib.figure import Figure
from typer import Option

from hf_specdec import StreamingDrafter
from hf_specdec.commands.options import command
from hf_specdec.tools.bench.decoding import Generation
from hf_specdec.tools.bench.methods import PLAIN, Method
from hf_specdec.tools.loading.models import PairSettings
from hf_specdec.tools.loading.prompts import load_prompts
from shared import Way, drafted, show, take_turns


@dataclass(kw_only=True)
class AblationSettings(PairSettings):
    """What is taken apart."""

    streams: Annotated[str, Option(help="Folder of trained streams.")]
    prompts: Annotated[list[str], Option(help="File, set or data set, as for `hf-specdec bench`.")]
    limit: Annotated[int, Option(help="Prompts of each file.")] = 4
    max_new_tokens: Annotated[int, Option(help="Per prompt.")] = 64
    chat: Annotated[bool, Option("--chat", help="Ask texts as questions, as streams of one task were trained.")] = False
    prune_below: Annotated[float, Option(help="Chance below which pruned trees lose a node.")] = 0.05
    picture: Annotated[str | None, Option(help="Picture to save.")] = None


@dataclass(kw_only=True)
class Part(Way):
    """One way to use the streams."""

    panel: str
    """which curve it is a point of"""
    x: int = 0
    drafted: int = 0
    pruned: int = 0

    def count(self, made: Generation) -> None:
        super().count(made)
        if self.method.drafter is not None and (stats := self.method.drafter.last_stats) is not None:
            self.drafted += sum((width - 1) * count for width, count in stats.verify_widths.items())
            self.pruned += sum(int(note.split()[0]) for note in stats.notes if "were pruned" in note)


def main(settings: AblationSettings) -> None:
    """Decode in all ways, and print."""
    pair = settings.load()
    whole = StreamingDrafter.from_pretrained(settings.streams)
    plain, *parts = ways = [Part(method=Method(PLAIN), panel=PLAIN), *parts_of(whole, settings.prune_below)]
    prompts = [prompt for name in settings.prompts for prompt in load_prompts(name, settings.limit)]
    prompts = [replace(prompt, chat=prompt.chat or settings.chat) for prompt in prompts]
    take_turns(pair, prompts, ways, settings.max_new_tokens)
    rows = []
    for part in parts:
        nodes, kept = part.drafted / part.steps, (part.drafted - part.pruned) / part.steps
        speedup = part.speed / plain.speed
        rows.append((part.panel, part.x, f"{part.per_call:.2f}", f"{nodes:.1f}", f"{kept:.1f}", f"{speedup:.2f}"))
    show(("part", "", "tokens per call", "nodes", "kept", "speed-up"), rows)
    if settings.picture is not None:
        draw(parts, plain, settings.picture)


def parts_of(whole: StreamingDrafter, prune_below: float) -> list[Part]:
    """The streams with one thing varied at a time."""
    gamma, most = whole.config.num_streams, 16

    def part(panel: str, x: int, streams: int = gamma, **options: Any) -> Part:
        return Part(method=drafted(f"{panel} {x}", first_streams(whole, streams, **options)), panel=panel, x=x)

    parts = [part("streams", g, g, num_nodes=most) for g in range(1, gamma + 1)]
    parts += [part("candidates", k, num_nodes=most, num_candidates=k) for k in (1, 2, 4, 8)]
    parts += [part("nodes", n, num_nodes=n) for n in (4, 8, 16, 32)]
    parts += [part("nodes, pruned", n, num_nodes=n, prune_below=prune_below) for n in (4, 8, 16, 32)]
    return [*parts, part("nodes by the budget", 0)]


def first_streams(whole: StreamingDrafter, gamma: int, **options: Any) -> StreamingDrafter:
    """The same streams, but only the first γ of them."""
    trained = whole.config.chosen()
    part = {"num_streams": gamma, "copies": False, "acceptance": [], "acceptance_sampled": []}
    drafter = StreamingDrafter(**(trained | part | options))
    weights = whole.weights()
    drafter.load_weights(weights | {"embeddings": weights["embeddings"][:gamma]})
    return drafter


def draw(parts: Sequence[Part], plain: Part, path: str) -> None:
    """Tokens per call and speed-up by what was varied, as in Figure 5."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    panels = {"streams": "γ", "candidates": "k", "nodes": "nodes"}
    for axes, (panel, label) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for name in dict.fromkeys(part.panel for part in parts if part.panel.startswith(panel) and part.x):
            mine = [part for part in parts if part.panel == name]
            xs = [part.x for part in mine]
            axes.plot(xs, [part.speed / plain.speed for part in mine], "o-", label=f"{name}: speed-up")
            axes.plot(xs, [part.per_call for part in mine], "o--", label=f"{name}: tokens per call")
        axes.set(xlabel=label)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    command(main, None, __doc__)()
