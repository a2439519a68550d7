"""The commands `hf-specdec demo` and `hf-specdec generate`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..bench.audit import audit
from ..bench.bare import time_bare_forwards
from ..bench.measure import load_model, load_tokenizer
from ..bench.meter import Forward
from ..bench.padding import pad_mlps
from ..bench.recording import RecordingDrafter
from ..bench.specs import PLAIN, Method, build_method, default_drafter, load_drafter
from .colour import legend, painted
from .compare import Outcome, compare
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
    with _quiet():
        tokenizer = load_tokenizer(str(PAIR / "target"))
        dtype = demo_dtype(cpu_capabilities())
        target, draft = (load_model(str(PAIR / name), dtype, "cpu") for name in ("target", "draft"))
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
        outcomes, differences = [], []
        for name, prompt in PROMPTS.items():
            found, inputs = _decode(target, tokenizer, methods, prompt, TURNS, max_new_tokens=NEW_TOKENS)
            console.rule(name, style="dim")
            console.print(painted(console, tokenizer, prompt, found[-1].tokens, recorder.rounds))
            differences += [f"{name}: {line}" for line in _differences(target, tokenizer, inputs, found)]
            outcomes.append(found)
    console.rule(style="dim")
    console.print(_table(outcomes))
    for line in differences:
        console.print(line)
    plain, *_, ours = map(_speed, zip(*outcomes, strict=True))
    if ours / plain < WORTHWHILE:
        console.print(cost_of_width(target, draft, inputs["input_ids"]))
    if svg is not None:
        console.save_svg(str(svg), title="hf-specdec demo")


def demo_dtype(capabilities: Mapping[str, Any]) -> str:
    """bfloat16 where the CPU computes in it, else float32: where bfloat16 is emulated, a forward costs in proportion to
    its width, and a draft cannot pay.

    Args:
        capabilities: as `cpu_capabilities` says.
    """
    return "bfloat16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "float32"


def cpu_capabilities() -> Mapping[str, Any]:
    """What torch says of the CPU's instructions; nothing where it is too old to say it."""
    return getattr(torch.cpu, "get_capabilities", dict)()


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


def run_generate(
    prompt: str,
    target: str,
    draft: str | None = None,
    drafter: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    dtype: str = "bfloat16",
    device: str = "cpu",
    threads: int | None = None,
    seed: int = 0,
) -> None:
    """Continue a prompt with any two models, or any drafter, beside plain decoding.

    Args:
        target: a folder or Hub repo.
        draft: one of a draft model, for drafters that need one.
        drafter: a folder, Hub repo or `type:key=value,...`; a draft model drafts if there is one, else prompt lookup.
        temperature: 0 is greedy.
        dtype: of the weights, a torch dtype's name.
        threads: of the CPU; all where None.
        seed: of sampling.

    Raises:
        SpeculationError: a model, a drafter or a combination of them that does not work.
    """
    console = Console(highlight=False)
    if threads:
        torch.set_num_threads(threads)
    with _quiet():
        tokenizer = load_tokenizer(target)
        model = load_model(target, dtype, device)
        draft_model = load_model(draft, dtype, device) if draft else None
        spec = drafter or default_drafter(draft)
        recorder = RecordingDrafter(load_drafter(spec, draft_model))
        methods = [Method(PLAIN), Method(spec, {"assistant_model": recorder}, draft_model, recorder)]
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
        found, inputs = _decode(model, tokenizer, methods, prompt, 1, seed, max_new_tokens=max_new_tokens, **sampling)
        lines = _differences(model, tokenizer, inputs, found) if temperature == 0 else []
    console.print(legend(console), "\n")
    console.print(painted(console, tokenizer, prompt, found[-1].tokens, recorder.rounds), "\n")
    console.print(_table([found], compared=temperature == 0))
    for line in lines:
        console.print(line)
    console.print(f"\n{recorder.last_stats}")


def _decode(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[Method],
    prompt: str,
    turns: int,
    seed: int = 0,
    **options: Any,
) -> tuple[list[Outcome], dict[str, Any]]:
    encoded = tokenizer(prompt, return_tensors="pt").to(target.device)
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    options = {"do_sample": False, "pad_token_id": tokenizer.pad_token_id} | options
    return compare(target, methods, inputs, turns, seed, **options), inputs


def _differences(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, Any],
    outcomes: Sequence[Outcome],
) -> Iterator[str]:
    """A sentence for each method whose text left plain decoding's, with the logits that decided."""
    plain, *others = outcomes
    for other in others:
        found = audit(target, inputs["input_ids"], plain.tokens, other.tokens, pad_token_id=tokenizer.pad_token_id)
        if found is None:
            continue
        if found.gap is None:
            yield f"{other.name} ends where plain decoding goes on, or the other way round, at token {found.position}"
            continue
        tokens = [tokenizer.decode([token]) for token in (found.plain_token, found.other_token)]
        verdict = "a near tie of plain's own top two" if found.near_tie else "NOT a near tie"
        yield (
            f"{other.name} differs first at new token {found.position}, {tokens[1]!r} for {tokens[0]!r}: {verdict}, "
            f"{found.gap:.4f} apart, where {str(target.dtype).removeprefix('torch.')} rounds to {found.rounding:.4f}"
        )


def _table(outcomes: Sequence[Sequence[Outcome]], compared: bool = True) -> Table:
    """One line per method, over all prompts.

    Args:
        outcomes: per prompt, the methods' outcomes, plain decoding's first.
        compared: whether the texts should be the same.
    """
    table = Table("", "tokens/s", "tokens/call", "speed-up", "text", box=None)
    speeds: list[float] = []
    for rows in zip(*outcomes, strict=True):
        speeds.append(_speed(rows))
        same = sum(row.tokens == prompt[0].tokens for row, prompt in zip(rows, outcomes, strict=True))
        text = f"plain's own in {same} of {len(rows)}" if compared else "sampled"
        table.add_row(
            rows[0].name,
            f"{speeds[-1]:.1f}",
            f"{sum(row.mean_acceptance_length for row in rows) / len(rows):.2f}",
            f"{speeds[-1] / speeds[0]:.2f}x",
            "" if len(speeds) == 1 else text,
        )
    return table


def _speed(rows: Sequence[Outcome]) -> float:
    """Tokens per second of one method over all prompts."""
    return sum(len(row.tokens) for row in rows) / sum(row.seconds for row in rows)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and notes, which are not about what is shown here."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
