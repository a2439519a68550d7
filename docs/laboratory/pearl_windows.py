"""PEARL where the paper measured it: a draft that is nearly always right, and windows below, at and above the ratio.

    python docs/laboratory/pearl_windows.py --target TARGET --draft DRAFT --prompts FILE

Draft and target decode every text greedily, and their rounds are counted in set times: a draft step takes 1, a target
forward the ratio, nothing else takes any. So the table is the same on every machine. Which tokens the draft gets right
is decided by a seeded coin (`synthetic_acceptance`).
"""

from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from hf_specdec import PearlDrafter
from hf_specdec.commands.options import expanded
from hf_specdec.drafters.pearl import Timeline
from hf_specdec.tools.loading.chat import batch, prompt_ids
from hf_specdec.tools.loading.models import PairSettings
from hf_specdec.tools.loading.prompts import load_prompts
from hf_specdec.tools.loading.rows import set_name
from pearl_bounds import WINDOWS, acceptances, pearl_seconds, serial_seconds
from pretended import synthetic_acceptance


@dataclass
class SetTimes:
    """What is decoded in set times, at which ratios."""

    target: Annotated[str, typer.Option(help="Folder or repo of the target.")]
    draft: Annotated[str, typer.Option(help="Folder or repo of the draft.")]
    prompts: Annotated[list[str], typer.Option(help="File, set or data set of prompts; repeat for several.")]
    ratio: Annotated[list[int], typer.Option(help="c, T_target / T_draft; repeat for several.")] = field(
        default_factory=lambda: [3, 5]
    )
    limit: Annotated[int, typer.Option(help="Prompts per source.")] = 4
    max_new_tokens: int = 64


@dataclass
class Settings(SetTimes):
    """Options of the command."""

    window: Annotated[list[int], typer.Option(help="γ; repeat for several.")] = field(
        default_factory=lambda: [2, 3, 4, 5, 6, 7]
    )
    acceptance: Annotated[float, typer.Option(help="Share of tokens that the draft gets right.")] = 0.97


@dataclass
class Count:
    """What all texts of a source took, in draft steps, without the target's prefill."""

    ratios: list[int]
    tokens: int = 0
    pearl: dict[tuple[int, int], float] = field(default_factory=dict)
    """by ratio and window"""
    serial: dict[tuple[int, int], float] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    """of all windows together"""

    def add_serial(self, accepted: list[float]) -> None:
        """A text, of whose tokens it is known whether the draft has them right."""
        self.tokens += len(accepted)
        for c in self.ratios:
            for gamma in WINDOWS:
                self._add(self.serial, (c, gamma), serial_seconds([accepted], gamma, c, 1.0))

    def add_pearl(self, drafter: PearlDrafter, gamma: int) -> None:
        """The drafter's last call."""
        line = drafter.last_timeline
        assert line is not None
        self.timeline.tests += line.tests
        self.timeline.corrections += line.corrections
        for c in self.ratios:
            self._add(self.pearl, (c, gamma), pearl_seconds(line, gamma, c, 1.0))

    @staticmethod
    def _add(times: dict[tuple[int, int], float], key: tuple[int, int], seconds: float) -> None:
        times[key] = times.get(key, 0.0) + seconds

    def speed(self, times: dict[tuple[int, int], float], c: int, gamma: int) -> float:
        """Over plain decoding, which takes c for each token."""
        return c * self.tokens / times[c, gamma]

    def line(self, name: str, c: int, windows: list[int]) -> str:
        """One line of the table."""
        best = max(WINDOWS, key=lambda gamma: self.speed(self.serial, c, gamma))
        cells = [f"{self.speed(self.pearl, c, gamma):.2f}" for gamma in windows]
        cells.append(f"{self.speed(self.serial, c, best):.2f} (γ = {best})")
        run = self.timeline.mean_accepted_run()
        cells.append("-" if run is None else f"{run:.1f}")
        return f"| {name} | {c} | {' | '.join(cells)} |"


def count(pair: Any, inputs: list[dict[str, Tensor]], settings: Settings) -> Count:
    """All texts of a source, by every window."""
    counted = Count(settings.ratio)
    options = {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": False,
        "pad_token_id": pair.tokenizer.pad_token_id,
    }
    for seed, x in enumerate(inputs):
        plain, prompt = pair.target.generate(**x, **options), x["input_ids"].shape[1]
        with synthetic_acceptance(pair.draft, plain[0].tolist(), settings.acceptance, seed):
            counted.add_serial(acceptances(pair.target, pair.draft, plain, prompt, 0.0))
            for gamma in settings.window:
                with closing(PearlDrafter(pair.draft, window=gamma, corrections=0, worker="thread")) as drafter:
                    assert torch.equal(pair.target.generate(**x, **options, assistant_model=drafter), plain)
                    counted.add_pearl(drafter, gamma)
    return counted


def run(settings: Settings) -> None:
    """Speeds over plain decoding in set times, by window, beside serial decoding with its best window."""
    pair = PairSettings(target=settings.target, draft=settings.draft, dtype="float32", threads=1).load()
    windows = " | ".join(f"γ = {gamma}" for gamma in settings.window)
    typer.echo(f"| prompts | c | {windows} | serial, best γ | accepted in a row |")
    typer.echo("|---" * (4 + len(settings.window)) + "|")
    for source in settings.prompts:
        prompts = load_prompts(source, settings.limit)
        inputs = [batch([prompt_ids(pair.tokenizer, prompt)], pair.tokenizer.pad_token_id) for prompt in prompts]
        counted = count(pair, inputs, settings)
        for c in settings.ratio:
            typer.echo(counted.line(set_name(source), c, settings.window))


main = expanded(run)

if __name__ == "__main__":
    typer.run(main)
