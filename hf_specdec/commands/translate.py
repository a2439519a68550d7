"""`hf-specdec translate`."""

from typing import Annotated

from typer import Argument, Option, echo

from ..loading.drafters import config_of
from ..serving.engines import translated


def translate(
    drafter: Annotated[str, Argument(help="Folder, repo or type:key=value,... of a drafter.", metavar="DRAFTER")],
    to: Annotated[str, Option(help="vllm or sglang.")] = "vllm",
    draft: Annotated[str | None, Option(help="Repo or folder of the draft model, where DRAFTER names none.")] = None,
) -> None:
    """Print what an engine is to be told."""
    config, own = config_of(drafter)
    echo(translated(config, to, draft or own))
