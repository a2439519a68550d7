"""`hf-specdec push`."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option, echo

from ..hub import push_folder


def push(
    folder: Annotated[Path, Argument(help="A drafter's folder, such as hub_configs/prompt_lookup.")],
    repo_id: Annotated[str, Option(help="Repo on the Hub; made if it is not there.")],
    private: Annotated[bool | None, Option(help="Visibility of a new repo; the account's default if left out.")] = None,
    revision: Annotated[str | None, Option(help="Branch; made if it is not there.")] = None,
    commit_message: Annotated[str | None, Option(help="Of the commit with the files.")] = None,
    create_pr: Annotated[bool, Option("--create-pr", help="Open a pull request instead.")] = False,
    results: Annotated[Path | None, Option(help="Result file of `bench` for the model card.")] = None,
    license: Annotated[str | None, Option(help="For the model card, such as apache-2.0.")] = None,
    draft_repo: Annotated[
        str | None, Option(help="Repo of the draft model, where the folder names one beside it.")
    ] = None,
) -> None:
    """Upload a folder, and say where it is."""
    options: dict[str, Any] = {"private": private, "revision": revision, "commit_message": commit_message}
    options |= {"license": license, "draft_repo": draft_repo}
    echo(push_folder(folder, repo_id, create_pr=create_pr, results=results, **options))
