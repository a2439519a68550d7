"""`hf-specdec export`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo

from ..serve.export import export_drafter
from ..tools.loading.drafters import SPEC


def export(
    drafter: Annotated[str, Argument(help=f"Drafter to export: {SPEC}.", metavar="DRAFTER")],
    to: Annotated[str, Option(help="Engine or format: vllm, sglang or speculators.")],
    output: Annotated[
        Path | None, Option(help="New folder for the draft model and the command; default: print the command only.")
    ] = None,
    draft: Annotated[
        str | None, Option(help="Hub repo or folder of the draft model, where DRAFTER names none.")
    ] = None,
) -> None:
    """Write what an engine loads, and print the command that starts it.

    Example:

    hf-specdec export hub_configs/draft_model --to vllm --output my-export
    """
    echo(export_drafter(drafter, to, output, draft))
