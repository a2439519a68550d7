"""A draft of another tokenizer: what it saves, beside transformers' own way for such drafts.

Run as `python docs/laboratory/other_tokenizer.py --target smollm2 --dtype float32 --pack-linear --draft-folder
tests/pair/draft --prompts chat`. Calls of the target are counted, and greedy texts compared with plain decoding's.
"""

from dataclasses import dataclass
from typing import Annotated

from transformers import AutoModelForCausalLM, AutoTokenizer
from typer import Option

from hf_specdec import DraftModelDrafter, HybridDrafter, Translated
from hf_specdec.commands.options import command
from hf_specdec.tools.bench.methods import PLAIN, Method
from hf_specdec.tools.loading.models import TargetSettings
from hf_specdec.tools.loading.prompts import load_prompts
from shared import Way, drafted, show, take_turns


@dataclass(kw_only=True)
class TokenizerSettings(TargetSettings):
    """What drafts."""

    draft_folder: Annotated[str, Option(help="A model with a tokenizer of its own.")]
    prompts: Annotated[str, Option(help="File, set or data set, as for `hf-specdec bench`.")]
    limit: Annotated[int, Option(help="Prompts.")] = 10
    window: Annotated[int, Option(help="γ.")] = 4
    max_new_tokens: Annotated[int, Option(help="Per prompt.")] = 64


def main(settings: TokenizerSettings) -> None:
    """Print the table."""
    pair = settings.load()
    theirs = AutoTokenizer.from_pretrained(settings.draft_folder)
    stock, draft = (AutoModelForCausalLM.from_pretrained(settings.draft_folder).eval() for _ in range(2))
    stock.generation_config.num_assistant_tokens = settings.window
    stock.generation_config.num_assistant_tokens_schedule = "constant"
    translated = Translated(draft, pair.tokenizer, theirs)
    tokenizers = {"tokenizer": pair.tokenizer, "assistant_tokenizer": theirs}
    methods = [
        Method(PLAIN),
        Method("transformers", {"assistant_model": stock} | tokenizers),
        drafted("draft model", DraftModelDrafter(translated, num_draft_tokens=settings.window)),
        drafted("hybrid", HybridDrafter(translated)),
    ]
    ways = [Way(method=method) for method in methods]
    count = take_turns(pair, load_prompts(settings.prompts, settings.limit), ways, settings.max_new_tokens)
    rows = (
        (way.method.name, way.tokens, way.calls, f"{way.tokens / way.calls:.2f}", f"{way.same} of {count}")
        for way in ways
    )
    show(("", "tokens", "calls", "tokens / call", "same text"), rows)


if __name__ == "__main__":
    command(main, None, __doc__)()
