"""`hf-specdec demo`: a few prompts, decoded by the pair in this folder."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from ..bench.methods import PLAIN, Method, build_method
from ..instruments.bare import time_bare_forwards
from ..instruments.meter import Forward
from ..instruments.padding import pad_mlps
from ..instruments.recording import RecordingDrafter
from ..loading.devices import dtype_name
from ..loading.drafters import load_drafter
from ..loading.models import ModelSource, load_model, load_tokenizer
from ..showing.quiet import quiet
from .colour import legend, painted
from .compare import compare_on_prompt
from .outcomes import differences, speed, table
from .prompts import PROMPTS

PAIR = Path(__file__).parent
MLP = 24_000
"""hidden units per MLP of the cost-padded target"""
GAMMA = 5
"""tokens drafted per round, by us and by transformers"""
TURNS = 2
WORTHWHILE = 1.2
"""speed-up below which the demo says what stands in the way"""
NEW_TOKENS = 48
PICTURE: dict[str, Any] = {"record": True, "width": 100, "force_terminal": True, "color_system": "truecolor"}
HF, OURS = "transformers assisted", "hf_specdec"


def run_demo(svg: Path | str | None = None) -> None:
    """Decode a few prompts with the embedded pair and print what speculation did and gained.

    Args:
        svg: where to save what was printed as a picture.
    """
    console = Console(highlight=False, **(PICTURE if svg is not None else {}))
    with quiet():
        dtype = dtype_name("auto", "cpu")
        sources = [ModelSource(str(PAIR / name), dtype) for name in ("target", "draft")]
        tokenizer, (target, draft) = load_tokenizer(sources[0]), map(load_model, sources)
        sizes = [sum(p.numel() for p in model.parameters()) / 1e6 for model in (target, draft)]
        pad_mlps(target, MLP)
        padded = sum(p.numel() for p in target.parameters()) / 1e6
        console.print(
            f"Target: {sizes[0]:.1f} M parameters, cost-padded: its MLPs got units that add exactly zero, so that it "
            f"costs like a model of {padded:.0f} M and says what it said. Draft: {sizes[1]:.1f} M. Both are small and "
            f"were trained for minutes: look at the tokens, not at the answers.\n"
            f"{dtype}, {torch.get_num_threads()} CPU threads, greedy, {NEW_TOKENS} new tokens at most, "
            f"{GAMMA} drafted per round; each method decodes each prompt {TURNS} times, in turn.\n"
        )
        console.print(legend(console), "\n")
        recorder = RecordingDrafter(load_drafter(f"draft_model:num_draft_tokens={GAMMA}", draft))
        assisted = build_method(f"hf-assisted:num_assistant_tokens={GAMMA}", draft)
        assisted.name = HF
        methods = [Method(PLAIN), assisted, Method(OURS, {"assistant_model": recorder}, draft, recorder)]
        outcomes, parted = [], []
        for name, prompt in PROMPTS.items():
            found, inputs = compare_on_prompt(target, tokenizer, methods, prompt, TURNS, max_new_tokens=NEW_TOKENS)
            console.rule(name, style="dim")
            console.print(painted(console, tokenizer, prompt, found[-1].tokens, recorder.rounds))
            parted += [f"{name}: {line}" for line in differences(target, tokenizer, inputs, found)]
            outcomes.append(found)
    console.rule(style="dim")
    console.print(table(outcomes))
    for line in parted:
        console.print(line)
    plain, *_, ours = map(speed, zip(*outcomes, strict=True))
    if ours / plain < WORTHWHILE:
        console.print(cost_of_width(target, draft, inputs["input_ids"]))
    if svg is not None:
        console.save_svg(str(svg), title="hf-specdec demo")


def cost_of_width(target: PreTrainedModel, draft: PreTrainedModel, ids: Tensor) -> str:
    """A sentence with the costs that decide what a draft of `GAMMA` tokens can gain on this machine."""
    widths = [Forward("target", 1, width, ids.shape[1], 0.0) for width in (1, GAMMA + 1)]
    table = time_bare_forwards({"target": target, "draft": draft}, widths, ids)
    step, wide, drafted = (table[kind] for kind in (("target", 1, 1), ("target", 1, GAMMA + 1), ("draft", 1, 1)))
    round_cost = (wide + GAMMA * drafted) / step
    return (
        f"On this machine a verification of {GAMMA + 1} tokens takes {1000 * wide:.0f} ms, a single step of the target "
        f"{1000 * step:.0f} ms. With {GAMMA} draft steps before it, a round costs {round_cost:.1f} steps, and has to "
        "bring as many tokens to be even. Where a forward mostly waits for the weights to come from memory, as "
        "on a GPU, a verification costs little more than a step."
    )
