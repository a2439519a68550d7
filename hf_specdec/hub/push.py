"""A folder → a Hub repo that works through `Drafter.from_pretrained` and through `custom_generate`."""

import json
import shutil
import tempfile
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import CommitInfo, HfApi

from ..config import DrafterConfig
from ..errors import SpeculationError
from ..version import __version__
from .cards import REPO_PLACEHOLDER, draft_sentence, make_card, with_license, with_results
from .draft import PATTERNS, is_embedded
from .draft_repo import draft_on_hub
from .files import check_no_pickles, read_json, safe_file
from .loading import CARD, CONFIG, WEIGHTS, read_config
from .registry import Storable
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
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "drafter"  # with nothing beside it, so that no draft model is named there
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
    license: str | None = None,
    draft_repo: str | None = None,
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
        license: for the card, as the Hub names it, such as "apache-2.0"; None leaves what the card says.
        draft_repo: the repo that holds the draft model, where the config names a folder beside (`../...`); it must hold
            the same weights.

    Returns:
        The address of the last commit.

    Raises:
        SpeculationError: the folder holds no drafter, its draft model would not be found, the result file has no
            figures of this drafter on its target, or the Hub refuses.
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
        config = _stage(folder, staged, config, draft_on_hub(config.draft_model, folder, draft_repo, api))
        _write_card(folder, staged, config, repo_id, results, license)
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
        except Exception as error:  # the Hub's, and those of whatever carries its requests
            raise SpeculationError(
                f"could not push {folder} to {repo_id!r}; check the name, that the token may write there, and the "
                f"connection. The Hub's answer: {' '.join(str(error).split()) or type(error).__name__}"
            ) from error
    return str(last.commit_url)


def generate_code(drafter_type: str, repo_id: str | None = None, revision: str | None = None) -> str:
    """The text of `custom_generate/generate.py`, pinned to a revision of a repo, or naming none."""
    template = Template((Path(__file__).parent / "generate.py.template").read_text(encoding="utf-8"))
    drafter = None if repo_id is None else json.dumps({"drafter": repo_id, "revision": revision})
    return template.substitute(speculation_type=json.dumps(drafter_type), drafter=drafter)


def _stage(folder: Path, staged: Path, config: DrafterConfig, draft: dict[str, str] | None) -> DrafterConfig:
    """Copy what belongs to a drafter; returns its config, which names the draft model as the Hub knows it."""
    embedded = draft["subfolder"] if draft is not None and is_embedded(draft) else None
    patterns = [CONFIG, WEIGHTS, "LICENSE*", *([f"{embedded}/{p}" for p in PATTERNS] if embedded else [])]
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        copy = staged / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(safe_file(folder, str(path.relative_to(folder))), copy)
    (staged / REQUIREMENTS).parent.mkdir(exist_ok=True)
    (staged / REQUIREMENTS).write_text(f"hf-specdec>={__version__}\n")
    if draft != config.draft_model:
        content = read_json(folder, CONFIG) | {"draft_model": draft}
        (staged / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
    return read_config(staged)[1]


def _write_card(
    folder: Path, staged: Path, config: DrafterConfig, repo_id: str, results: str | Path | None, license: str | None
) -> None:
    """The folder's card, or a new one, as it fits the repo."""
    stored = read_json(folder, CONFIG)
    has_card = (folder / CARD).exists() or (folder / CARD).is_symlink()
    text = safe_file(folder, CARD).read_text(encoding="utf-8") if has_card else make_card(read_json(staged, CONFIG))
    if config.draft_model is not None:
        text = text.replace(draft_sentence(stored["draft_model"]), draft_sentence(config.draft_model))
    if results is not None:
        text = with_results(text, results, config, [str(folder), repo_id])
    text = text if license is None else with_license(text, license)
    (staged / CARD).write_text(text.replace(REPO_PLACEHOLDER, repo_id), encoding="utf-8")


def _commit(api: HfApi, info: CommitInfo, where: dict[str, Any]) -> str:
    return info.oid or str(api.model_info(where["repo_id"], revision=where["revision"]).sha)
