"""A folder → a Hub repo that works through `Drafter.from_pretrained` and through `custom_generate`."""

import json
import shutil
import tempfile
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from ..config import DrafterConfig
from ..errors import SpeculationError
from ..registry import Storable
from ..version import __version__
from .cards import REPO_PLACEHOLDER, make_card, with_results
from .draft import PATTERNS
from .files import check_no_pickles, read_json, safe_file
from .loading import CARD, CONFIG, WEIGHTS, read_config
from .saving import write_drafter

GENERATE, REQUIREMENTS = "custom_generate/generate.py", "custom_generate/requirements.txt"


def save_drafter(
    drafter: Storable,
    folder: str | Path,
    *,
    push_to_hub: bool = False,
    repo_id: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    token: str | bool | None = None,
    **save: Any,
) -> None:
    """Write the drafter into `folder`, and upload it if asked to. `save` is what `write_drafter` takes.

    Args:
        push_to_hub: upload the folder afterwards to `repo_id` (default: the folder's name), as `push_folder` does.

    Raises:
        SpeculationError: options of an upload without `push_to_hub`; see `write_drafter` and `push_folder`.
    """
    push: dict[str, Any] = {"private": private, "revision": revision, "commit_message": commit_message}
    push |= {"create_pr": create_pr or None, "token": token}
    given = [name for name, value in ({"repo_id": repo_id} | push).items() if value is not None]
    if given and not push_to_hub:
        raise SpeculationError(f"{', '.join(given)} needs push_to_hub=True")
    write_drafter(drafter, folder, **save)
    if push_to_hub:
        push_folder(folder, repo_id or Path(folder).resolve().name, **push | {"create_pr": create_pr})


def push_drafter(
    drafter: Storable,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    token: str | bool | None = None,
    **save: Any,
) -> str:
    """Save into a temporary folder and upload it; `save` is what `write_drafter` takes. See `push_folder`."""
    with tempfile.TemporaryDirectory() as folder:
        write_drafter(drafter, folder, **save)
        return push_folder(
            folder,
            repo_id,
            private=private,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
            token=token,
        )


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    token: str | bool | None = None,
    results: str | Path | None = None,
) -> str:
    """Upload a drafter's folder in two commits: the files, then a `custom_generate/generate.py` that pins them.

    Only what belongs to a drafter is uploaded. `folder` itself stays as it is.

    Args:
        folder: as `save_pretrained` wrote it, or one of `hub_configs/`.
        repo_id: made if it is not there.
        private: visibility of a repo that is made; None is the account's default.
        revision: branch to push to, made if it is not there; None is the main one.
        commit_message: of the first commit.
        create_pr: open a pull request instead of changing the branch.
        token: None uses the stored login.
        results: a result file of `hf-specdec bench` for the card's table.

    Returns:
        The address of the last commit.

    Raises:
        SpeculationError: the folder holds no drafter, or the Hub refuses.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise SpeculationError(f"folder={str(folder)!r} is not a folder; save a drafter into it with save_pretrained()")
    check_no_pickles(folder)
    _, config = read_config(folder)
    api = HfApi(token=token, library_name="hf_specdec", library_version=__version__)
    where: dict[str, Any] = {"repo_id": repo_id, "revision": revision}
    with tempfile.TemporaryDirectory() as temporary:
        staged = Path(temporary)
        _stage(folder, staged, config, repo_id, results)
        try:
            repo_id = where["repo_id"] = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if revision is not None and not create_pr:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            message = commit_message or f"Upload {config.drafter_type} drafter"
            files = api.upload_folder(folder_path=staged, commit_message=message, create_pr=create_pr, **where)
            if create_pr:
                where["revision"] = files.pr_revision
            code = generate_code(config.drafter_type, repo_id, _commit(api, files, where))
            last = api.upload_file(
                path_or_fileobj=code.encode(), path_in_repo=GENERATE, commit_message="Pin the drafter's files", **where
            )
        except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
            raise SpeculationError(
                f"could not push {folder} to {repo_id!r}; check the name and that the token may write there. "
                f"The Hub's answer: {' '.join(str(error).split())}"
            ) from error
    return str(last.commit_url)


def generate_code(drafter_type: str, repo_id: str | None = None, revision: str | None = None) -> str:
    """The text of `custom_generate/generate.py`, pinned to a revision of a repo, or naming none."""
    template = Template((Path(__file__).parent / "generate.py.template").read_text(encoding="utf-8"))
    drafter = None if repo_id is None else json.dumps({"drafter": repo_id, "revision": revision})
    return template.substitute(speculation_type=json.dumps(drafter_type), drafter=drafter)


def _stage(folder: Path, staged: Path, config: DrafterConfig, repo_id: str, results: str | Path | None) -> None:
    """Copy what belongs to a drafter, with the card that fits the repo."""
    draft = (config.draft_model or {}).get("subfolder")
    patterns = [CONFIG, WEIGHTS, CARD, "LICENSE*", *([f"{draft}/{p}" for p in PATTERNS] if draft else [])]
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        copy = staged / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(safe_file(folder, str(path.relative_to(folder))), copy)
    (staged / REQUIREMENTS).parent.mkdir(exist_ok=True)
    (staged / REQUIREMENTS).write_text(f"hf-specdec>={__version__}\n")
    card = staged / CARD
    text = card.read_text() if card.exists() else make_card(read_json(folder, CONFIG))
    if results is not None:
        text = with_results(text, results)
    card.write_text(text.replace(REPO_PLACEHOLDER, repo_id))


def _commit(api: HfApi, info: CommitInfo, where: dict[str, Any]) -> str:
    return info.oid or str(api.model_info(where["repo_id"], revision=where["revision"]).sha)
