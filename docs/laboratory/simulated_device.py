"""What a GPU would take for each drafter's rounds, without one: counted on the CPU, and priced.

    WRITE_DOCS=1 python docs/laboratory/simulated_device.py

The small pair of the tests decodes four prompts, one row, greedy, everything recorded before. The device is that of
`tests/helpers/simulated.py`, where the prices stand. `--names hybrid` lists what the host launches and calls. The heads
are random: their rounds can be compared, not their tokens, and their own kernels are priced as small.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
sys.path += [str(TESTS / "helpers"), str(TESTS / "gpu")]

import head_pairs  # noqa: E402
import models  # noqa: E402
import simulated  # noqa: E402
from samples import SAMPLES  # noqa: E402

import hf_specdec  # noqa: E402
from hf_specdec import DraftModelDrafter, HybridDrafter, PromptLookupDrafter, SuffixDrafter  # noqa: E402
from hf_specdec.engine.engine import Engine  # noqa: E402
from hf_specdec.target.buffers import slots_for  # noqa: E402

PAGE = ROOT / "docs" / "gpu" / "2026-11-h200.md"
BEGIN, END = "<!-- by docs/laboratory/simulated_device.py -->\n", "<!-- end of what was simulated -->\n"
COMPILED = 7.07e-3
"""seconds per token of transformers' compiled static cache on the same card"""
KINDS = ("copy", "code", "chat", "text")
"""of the prompts"""
Side = tuple[Any, Any, list[torch.Tensor]]
"""a target, its drafter, and prompts"""


def of_pair(make: Callable[[Any], Any]) -> Side:
    """Of which nothing is known. No text ends before its last token."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(TESTS / "pair" / name, dtype=torch.float32) for name in ("target", "draft")
    )
    tokenizer = AutoTokenizer.from_pretrained(TESTS / "pair" / "target")
    for model in (target, draft):
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    texts = [next(sample.text for sample in SAMPLES if sample.kind == kind) for kind in KINDS]
    return target, make(draft), [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]


def of_heads() -> Side:
    return *head_pairs.PAIRS["GLM-4-MoE, 3"](), [models.prompts([40])["input_ids"]]


SIDES: dict[str, Callable[[], Side]] = {
    "plain": lambda: of_pair(lambda draft: None),
    "prompt lookup": lambda: of_pair(lambda draft: PromptLookupDrafter()),
    "suffix": lambda: of_pair(lambda draft: SuffixDrafter()),
    "draft model": lambda: of_pair(DraftModelDrafter),
    "hybrid": lambda: of_pair(HybridDrafter),
    "MTP, random": of_heads,
}
HEAD = (
    "drafter, simulated", "ms per token", "over compiled", "tokens per call", "ms a round", "beside forwards",
    "launches", "graphs", "eager", "writes", "reads", "calls", "slots", "used",
)  # fmt: skip


@dataclass
class Rounds:
    """What several calls came to between their first rounds and their ends."""

    count: int = 0
    tokens: int = 0
    used: int = 0
    """slots of the target's forwards that were asked for"""
    whole: float = 0.0
    """seconds"""
    seconds: Counter[str] = field(default_factory=Counter)
    """these and what follows: as of the device"""
    met: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    functions: Counter[str] = field(default_factory=Counter)

    def add(self, device: Any, count: int, new: int, widths: Counter[int]) -> None:
        """A call of so many rounds, tokens, and verifications of a width."""
        self.count += count
        self.tokens += new
        self.used += sum(width * times for width, times in widths.items())
        self.whole += device.host - device.since
        for name in ("seconds", "met", "operations", "functions"):
            getattr(self, name).update(getattr(device, name))

    @property
    def cells(self) -> list[str]:
        """Of the table."""
        count, n, per_token = self.count, self.met, self.whole / self.tokens
        beside = self.whole - self.seconds["target"] - self.seconds["draft"]
        shown = [f"{1e3 * per_token:.2f}", f"{COMPILED / per_token:.2f}", f"{self.tokens / count:.2f}"]
        shown += [f"{1e3 * seconds / count:.2f}" for seconds in (self.whole, beside)]
        shown += [f"{n[name] / count:.1f}" for name in ("launches", "graphs", "eager", "writes", "reads")]
        return [*shown, f"{n['calls'] / count:.0f}", f"{n['slots'] / count:.1f}", f"{self.used / count:.1f}"]


def predicted(target: Any, drafter: Any, prompts: list[torch.Tensor], new: int) -> Rounds:
    """Of one way to decode. What it records is recorded, and nothing is known of these prompts, before it begins."""
    device = simulated.Device(target)
    options = {"max_new_tokens": new, "do_sample": False, "speculation": {"forwards": "captured"}}
    for prompt in {slots_for(prompt.shape[1] + new): prompt for prompt in prompts}.values():
        with device.simulated():
            hf_specdec.warm_up(target, drafter, input_ids=prompt.flip(1), **options)
    options |= {"assistant_model": drafter, "return_dict_in_generate": True}
    for prompt in prompts:  # a warm-up does not meet all chains of a draft model
        with device.simulated():
            target.generate(prompt.flip(1), **options)
    found, play, count = Rounds(), Engine.play_round, 0

    def counting(engine: Engine) -> None:
        nonlocal count
        if not count:
            device.forget()
        count += 1
        play(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "play_round", counting)
        for prompt in prompts:
            count = 0
            with device.simulated():
                output = target.generate(prompt, **options)
            # The first new token comes from the prompt.
            added = output.sequences.shape[1] - prompt.shape[1] - 1
            found.add(device, count, added, output.speculation.verify_widths)
    return found


def main(
    max_new_tokens: Annotated[int, typer.Option(help="Per prompt.")] = 96,
    names: Annotated[str, typer.Option(help="A drafter; list what its rounds launch and call.")] = "",
) -> None:
    """Print a line for each drafter, its counts per round; with `WRITE_DOCS` put them into their page."""
    torch.set_num_threads(1)
    lines = [f"| {' | '.join(HEAD)} |", f"|---{'|---:' * (len(HEAD) - 1)}|"]
    for name, side in SIDES.items():
        with pytest.MonkeyPatch.context() as patch:
            if name == "MTP, random":
                head_pairs.never_declined(patch)
            found = predicted(*side(), max_new_tokens)
        lines.append(f"| {name} | {' | '.join(found.cells)} |")
        for met in (found.operations, found.functions) if name == names else ():
            typer.echo("\n".join(f"{n / found.count:6.1f} {what}" for what, n in met.most_common()) + "\n")
    table = "\n".join(lines)
    typer.echo(table)
    if os.environ.get("WRITE_DOCS"):
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    typer.run(main)
