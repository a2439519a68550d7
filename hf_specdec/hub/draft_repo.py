"""A draft model beside a drafter's folder → the repo that holds it on the Hub, at a commit, with the same weights."""

import hashlib
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.hf_api import RepoFile

from ..errors import SpeculationError
from .draft import find_draft


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
            f"The Hub's answer: {' '.join(str(error).split())}"
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
