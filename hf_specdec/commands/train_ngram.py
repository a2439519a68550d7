"""`hf-specdec train ngram`."""

from pathlib import Path
from typing import Annotated

from typer import Option, echo

from ..training.ngram import train_ngram_drafter


def train_ngram(
    tokenizer: Annotated[str, Option(help="Folder or Hub repo with the target's tokenizer.")],
    data: Annotated[list[Path], Option(help="Text, a document per line, or JSON lines; may be given several times.")],
    output: Annotated[Path, Option(help="Folder to write the drafter to.")],
    order: Annotated[int, Option(help="2 is a bigram model.")] = 3,
    min_count: Annotated[int, Option(help="Leave out n-grams that occur less often.")] = 1,
) -> None:
    """Count n-grams, and say where the drafter is."""
    train_ngram_drafter(tokenizer, data, order, min_count).save_pretrained(str(output))
    echo(output)
