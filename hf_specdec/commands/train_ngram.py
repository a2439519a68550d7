"""`hf-specdec train ngram`."""

from pathlib import Path
from typing import Annotated

from typer import Option, echo

from ..tools.loading.models import GgufFile, Revision, TargetSettings, TrustRemoteCode, load_tokenizer
from ..train.ngram import train_ngram_drafter


def train_ngram(
    tokenizer: Annotated[
        str, Option(help="The target's tokenizer, or the target: a folder, a Hub repo, a GGUF file, or smollm2.")
    ],
    data: Annotated[
        list[str],
        Option(
            help="Text to count in: a file of plain text (a document per line) or of JSON lines, a data set of the Hub "
            "(ORG/NAME or ORG/NAME:SPLIT, by default the split train), or a set of this package (chat, code, ...); may "
            "be given several times."
        ),
    ],
    output: Annotated[Path, Option(help="Folder to write the drafter to.")],
    order: Annotated[int, Option(help="Length of the longest n-grams, from 1 to 6; 2 is a bigram model.")] = 3,
    min_count: Annotated[int, Option(help="Leave out n-grams that occur less often than this.")] = 1,
    revision: Revision = None,
    gguf_file: GgufFile = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    r"""Count n-grams, and say where the drafter is.

    Example:

    hf-specdec train ngram --tokenizer smollm2 --data chat --data summaries \
      --output my_ngram
    """
    how = {"revision": revision, "gguf_file": gguf_file, "trust_remote_code": trust_remote_code}
    source = TargetSettings(target=tokenizer, **how)  # type: ignore[arg-type]
    train_ngram_drafter(load_tokenizer(source), data, order, min_count, output=output)
    echo(output)
