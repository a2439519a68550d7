"""`hf-specdec translate`."""

from typing import Annotated

from typer import Argument, Option, echo

from ..serve.engines import translated
from ..tools.loading.drafters import SPEC, config_of


def translate(
    drafter: Annotated[str, Argument(help=f"Drafter to translate: {SPEC}.", metavar="DRAFTER")],
    to: Annotated[str, Option(help="Engine: vllm or sglang.")] = "vllm",
    draft: Annotated[
        str | None, Option(help="Hub repo or folder of the draft model, where DRAFTER names none.")
    ] = None,
) -> None:
    """Print what an engine is to be told.

    Example:

    hf-specdec translate hub_configs/prompt_lookup --to vllm
    """
    config, own = config_of(drafter)
    echo(translated(config, to, draft or own))
