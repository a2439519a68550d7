"""A folder → a Hub repo that works through `Drafter.from_pretrained` and through `custom_generate`."""

import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from string import Template
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.hf_api import RepoFile

from ..config import DrafterConfig
from ..errors import SpeculationError, one_line
from ..version import __version__
from .cards import REPO_PLACEHOLDER, draft_sentence, make_card, with_license, with_results
from .draft import PATTERNS, find_draft, is_embedded
from .files import check_no_pickles, read_json, safe_file, taken
from .loading import CARD, CONFIG, WEIGHTS, read_config
from .registry import Storable
from .saving import write_drafter

GENERATE, REQUIREMENTS = "custom_generate/generate.py", "custom_generate/requirements.txt"


@dataclass(frozen=True)
class Upload:
    """How a folder is uploaded."""

    private: bool | None = None
    """visibility of a repo that is made; None is the account's default"""
    revision: str | None = None
    """branch to push to, made if it is not there; None is the main one"""
    commit_message: str | None = None
    """of the first commit"""
    create_pr: bool = False
    """open a pull request instead of changing the branch"""
    token: str | bool | None = None
    """None uses the stored login"""


UPLOAD = [field.name for field in fields(Upload)]


def save_drafter(
    drafter: Storable, folder: str | Path, *, push_to_hub: bool = False, repo_id: str | None = None, **options: Any
) -> None:
    """Write the drafter into `folder`, and upload it if asked to.

    Args:
        push_to_hub: upload the folder afterwards to `repo_id` (default: the folder's name), as `push_folder` does.
        options: what `write_drafter` takes, and fields of `Upload`.

    Raises:
        SpeculationError: options of an upload without `push_to_hub`; see `write_drafter` and `push_folder`.
    """
    upload = taken(options, UPLOAD)
    asked = {"repo_id": repo_id} | upload
    given = [name for name, value in asked.items() if value is not None and value is not getattr(Upload, name, None)]
    if given and not push_to_hub:
        raise SpeculationError(f"{', '.join(given)} needs push_to_hub=True")
    write_drafter(drafter, folder, **options)
    if push_to_hub:
        push_folder(folder, repo_id or Path(folder).resolve().name, **upload)


def push_drafter(drafter: Storable, repo_id: str, **options: Any) -> str:
    """Save into a temporary folder and upload it; see `push_folder`.

    Args:
        options: what `write_drafter` takes, and fields of `Upload`.
    """
    upload = taken(options, UPLOAD)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "drafter"  # with nothing beside it, so that no draft model is named there
        write_drafter(drafter, folder, **options)
        return push_folder(folder, repo_id, **upload)


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    results: str | Path | None = None,
    license: str | None = None,
    draft_repo: str | None = None,
    **upload: Any,
) -> str:
    """Upload a drafter's folder in two commits: the files, then a `custom_generate/generate.py` that pins them.

    Only what belongs to a drafter is uploaded. `folder` itself stays as it is.

    Args:
        folder: as `save_pretrained` wrote it, or one of `hub_configs/`.
        repo_id: made if it is not there.
        results: a result file of `hf-specdec bench` for the card's table.
        license: for the card, as the Hub names it, such as "apache-2.0"; None leaves what the card says.
        draft_repo: the repo that holds the draft model, where the config names a folder beside (`../...`); it must hold
            the same weights.
        upload: fields of `Upload`.

    Returns:
        The address of the last commit.

    Raises:
        SpeculationError: the folder holds no drafter, its draft model would not be found, the result file has no
            figures of this drafter on its target, or the Hub refuses.
    """
    folder, how = Path(folder), Upload(**upload)
    if not folder.is_dir():
        raise SpeculationError(f"folder={str(folder)!r} is not a folder; save a drafter into it with save_pretrained()")
    check_no_pickles(folder)
    _, config = read_config(folder)
    api = HfApi(token=how.token, library_name="hf_specdec", library_version=__version__)
    where: dict[str, Any] = {"repo_id": repo_id, "revision": how.revision}
    with tempfile.TemporaryDirectory() as temporary:
        staged = Path(temporary)
        config = _stage(folder, staged, config, draft_on_hub(config.draft_model, folder, draft_repo, api))
        _write_card(folder, staged, config, repo_id, results, license)
        try:
            repo_id = where["repo_id"] = api.create_repo(repo_id, private=how.private, exist_ok=True).repo_id
            if how.revision is not None and not how.create_pr:
                api.create_branch(repo_id, branch=how.revision, exist_ok=True)
            message = how.commit_message or f"Upload {config.drafter_type} drafter"
            files = api.upload_folder(folder_path=staged, commit_message=message, create_pr=how.create_pr, **where)
            if how.create_pr:
                where["revision"] = files.pr_revision
            code = generate_code(config.drafter_type, repo_id, _commit(api, files, where))
            last = api.upload_file(
                path_or_fileobj=code.encode(), path_in_repo=GENERATE, commit_message="Pin the drafter's files", **where
            )
        except Exception as error:  # the Hub's, and those of whatever carries its requests
            raise SpeculationError(
                f"could not push {folder} to {repo_id!r}; check the name, that the token may write there, and the "
                f"connection. The Hub's answer: {one_line(error) or type(error).__name__}"
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


def draft_on_hub(
    entry: dict[str, str] | None, folder: Path, draft_repo: str | None, api: HfApi
) -> dict[str, str] | None:
    """The `draft_model` entry of a drafter's config as it has to be on the Hub.

    Args:
        entry: of the config in `folder`.
        draft_repo: the repo of a draft model beside `folder`. What lies below the folder beside it keeps its place: the
            draft in `../drafter/draft_model` is looked for in the repo's `draft_model`.

    Raises:
        SpeculationError: a draft model beside the folder and no repo named, or the other way round; the repo cannot be
            read, or has other weights.
    """
    beside = (entry or {}).get("path")
    if beside is None:
        if draft_repo is not None:
            raise SpeculationError(
                f"draft_repo={draft_repo!r} is for drafters whose config.json names a draft model beside their folder "
                f'("path"); {folder} has {entry}; leave draft_repo (--draft-repo) out'
            )
        return entry
    if draft_repo is None:
        raise SpeculationError(
            f"{folder} names its draft model in {beside!r}, a folder that a repo on the Hub does not have; push "
            "the draft model first, then this drafter with --draft-repo ORG/NAME (draft_repo=), the repo that "
            "holds it"
        )
    subfolder = "/".join(PurePosixPath(beside).parts[2:])
    try:
        revision = str(api.model_info(draft_repo).sha)
        tree = api.list_repo_tree(draft_repo, recursive=True, revision=revision)
        held = {item.path: item for item in tree if isinstance(item, RepoFile)}
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise SpeculationError(
            f"draft_repo={draft_repo!r} could not be read; push the draft model first, and check name and token. "
            f"The Hub's answer: {one_line(error)}"
        ) from error
    local = find_draft({"path": beside}, folder)
    for path in sorted(local.glob("model*.safetensors")):
        _check_same(path, held.get(f"{subfolder}/{path.name}".lstrip("/")), f"{draft_repo} at {revision[:12]}")
    return {"repo_id": draft_repo, "revision": revision} | ({"subfolder": subfolder} if subfolder else {})


def _check_same(path: Path, held: RepoFile | None, where: str) -> None:
    """Refuse a repo with another draft model than the one that was tried out here."""
    with path.open("rb") as file:
        mine = hashlib.file_digest(file, "sha256").hexdigest()
    if held is None:
        raise SpeculationError(f"{where} lacks {path.name} of {path.parent}; push the draft model there first")
    if held.size != path.stat().st_size or (held.lfs is not None and held.lfs.sha256 != mine):
        raise SpeculationError(
            f"{where} has a different {path.name} than {path.parent}; push the draft model that this drafter "
            "uses, or name the repo that holds it"
        )
