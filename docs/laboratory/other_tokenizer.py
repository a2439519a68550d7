"""A draft of another tokenizer: what it saves, beside transformers' own way for such drafts.

Run as `python docs/laboratory/other_tokenizer.py --target smollm2 --dtype float32 --pack-linear --draft-folder
tests/pair/draft --prompts chat`. Calls of the target are counted, and greedy texts held against plain
decoding's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer import Option

from hf_specdec import DraftModelDrafter, HybridDrafter, Translated
from hf_specdec.commands.options import command
from hf_specdec.tools.loading.chat import batch, prompt_ids
from hf_specdec.tools.loading.models import TargetSettings
from hf_specdec.tools.loading.prompts import load_prompts


@dataclass(kw_only=True)
class TokenizerSettings(TargetSettings):
    """What drafts."""

    draft_folder: Annotated[str, Option(help="A model with a tokenizer of its own.")]
    prompts: Annotated[str, Option(help="JSON lines, or text with a prompt per line.")]
    limit: Annotated[int, Option(help="Prompts.")] = 10
    window: Annotated[int, Option(help="γ.")] = 4
    max_new_tokens: Annotated[int, Option(help="Per prompt.")] = 64


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """Forwards of a model, within the block."""
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()


def measure(settings: TokenizerSettings) -> None:
    """Print the table."""
    pair = settings.load()
    theirs = AutoTokenizer.from_pretrained(settings.draft_folder)
    stock, draft = (AutoModelForCausalLM.from_pretrained(settings.draft_folder).eval() for _ in range(2))
    stock.generation_config.num_assistant_tokens = settings.window
    stock.generation_config.num_assistant_tokens_schedule = "constant"
    translated = Translated(draft, pair.tokenizer, theirs)
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "transformers": {"assistant_model": stock, "tokenizer": pair.tokenizer, "assistant_tokenizer": theirs},
        "draft model": {"assistant_model": DraftModelDrafter(translated, num_draft_tokens=settings.window)},
        "hybrid": {"assistant_model": HybridDrafter(translated)},
    }
    tokens, calls, same = (dict.fromkeys(ways, 0) for _ in range(3))
    prompts = load_prompts(settings.prompts, settings.limit)
    for prompt in tqdm(prompts, unit="prompt"):
        inputs = batch([prompt_ids(pair.tokenizer, prompt)], pair.tokenizer.pad_token_id)
        options = {"max_new_tokens": settings.max_new_tokens, "do_sample": False}
        texts = {}
        for name, told in ways.items():
            with counted(pair.target) as forwards:
                texts[name] = pair.target.generate(**inputs, **options, **told)
            tokens[name] += texts[name].shape[1] - inputs["input_ids"].shape[1]
            calls[name] += len(forwards)
            same[name] += torch.equal(texts[name], texts["plain"])
    table = Table(box=None)
    for title in ("", "tokens", "calls", "tokens / call", "same text"):
        table.add_column(title, justify="right")
    for name in ways:
        cells = tokens[name], calls[name], f"{tokens[name] / calls[name]:.2f}", f"{same[name]} of {len(prompts)}"
        table.add_row(name, *map(str, cells))
    Console().print(table)


if __name__ == "__main__":
    command(measure, None, __doc__)()
