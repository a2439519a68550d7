"""`hf-specdec train ngram`."""

from pathlib import Path
from typing import Annotated

from typer import Option, echo

from ..loading.models import ModelSource, load_tokenizer
from ..training.ngram import train_ngram_drafter


def train_ngram(
    tokenizer: Annotated[str, Option(help="Folder, Hub repo or GGUF file with the target's tokenizer.")],
    data: Annotated[list[Path], Option(help="Text, a document per line, or JSON lines; may be given several times.")],
    output: Annotated[Path, Option(help="Folder to write the drafter to.")],
    order: Annotated[int, Option(help="2 is a bigram model.")] = 3,
    min_count: Annotated[int, Option(help="Leave out n-grams that occur less often.")] = 1,
    revision: Annotated[str | None, Option(help="Branch, tag or commit of the tokenizer's repo.")] = None,
    gguf_file: Annotated[str | None, Option(help="GGUF file in the tokenizer's folder or repo.")] = None,
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run Python code that a repo brings.")
    ] = False,
) -> None:
    """Count n-grams, and say where the drafter is."""
    source = ModelSource(tokenizer, revision=revision, gguf_file=gguf_file, trust_remote_code=trust_remote_code)
    train_ngram_drafter(load_tokenizer(source), data, order, min_count, output=output)
    echo(output)
