"""`hf-specdec push`."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option, echo

from ..hub import push_folder

_commit: Any = partial(Option, rich_help_panel="The commit")
_card: Any = partial(Option, rich_help_panel="The model card")


@dataclass(kw_only=True)
class PushSettings:
    """How a folder is uploaded."""

    private: Annotated[bool | None, Option(help="Visibility of a new repo; default: what the account has set.")] = None
    revision: Annotated[str | None, _commit(help="Branch, created if it does not exist; default: the main branch.")] = (
        None
    )
    commit_message: Annotated[str | None, _commit(help="Message of the commit.")] = None
    create_pr: Annotated[bool, _commit("--create-pr", help="Open a pull request instead of committing.")] = False
    results: Annotated[Path | None, _card(help="Result file of `hf-specdec bench`, whose figures are shown.")] = None
    license: Annotated[str | None, _card(help="License, such as apache-2.0.")] = None
    draft_repo: Annotated[
        str | None,
        Option(help="Repo that holds the draft model, where the folder names a draft model beside itself."),
    ] = None


def push(
    folder: Annotated[Path, Argument(help="A drafter's folder, such as hub_configs/prompt_lookup.")],
    repo_id: Annotated[str, Option(help="Repo on the Hub, as ORG/NAME; created if it does not exist.")],
    settings: PushSettings,
) -> None:
    """Upload a folder, and say where it is.

    Example:

    hf-specdec push hub_configs/prompt_lookup --repo-id YOUR-NAME/my-drafter
    """
    echo(push_folder(folder, repo_id, **asdict(settings)))
