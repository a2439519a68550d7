"""A drafter → a folder that is a Hub repo: `config.json`, `model.safetensors` if there are weights, `README.md`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..errors import SpeculationError, meant, one_line
from ..version import __version__
from .cards import CardInfo, make_card, with_results
from .draft import is_embedded
from .files import COMMIT_HASH
from .loading import CARD, CONFIG, FORMAT_VERSION, WEIGHTS
from .registry import Storable
from .target import made_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DRAFT_FOLDER = "draft_model"


def write_drafter(
    drafter: Storable,
    folder: str | Path,
    *,
    target: "PreTrainedModel | None" = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    embed_draft_model: bool | None = None,
    **card: Unpack[CardInfo],
) -> None:
    """Write the drafter into `folder`.

    Args:
        drafter: what to save.
        folder: made if it is not there.
        target: the model that the drafter is made for; others are then refused. None keeps what the config says.
        tokenizer: the target's; its hash is stored too.
        embed_draft_model: True copies the draft model's weights into a subfolder; False names where it was loaded from:
            its Hub repo at that revision, or a folder beside `folder`. None embeds, unless the drafter was loaded with
            one of these named.
        card: for the model card.

    Raises:
        SpeculationError: a draft model that cannot be named or copied as asked; a folder that cannot be written; a
            result file without figures of this drafter on its target.
    """
    if unknown := [name for name in card if name not in CardInfo.__annotations__]:
        known = ("target", "tokenizer", "embed_draft_model", *CardInfo.__annotations__)
        raise SpeculationError(f"unknown argument {unknown[0]!r}{meant(unknown[0], known)}; known: {', '.join(known)}")
    folder = Path(folder)
    if folder.is_file():
        raise SpeculationError(f"folder={str(folder)!r} is a file; name a folder to save into")
    made = made_for(target, tokenizer) if target is not None else drafter.config.target
    entry = _draft_entry(drafter, embed_draft_model, folder)
    content = {"drafter_type": drafter.config.drafter_type, "format_version": FORMAT_VERSION}
    content |= {"hf_specdec_version": __version__} | drafter.config.chosen()
    content |= {name: value for name, value in (("draft_model", entry), ("target", made)) if value is not None}
    text = make_card(
        content,
        license=card.get("license"),
        datasets=card.get("datasets"),
        trained_on=card.get("trained_on") or drafter.trained_on,
    )
    if (results := card.get("results")) is not None:
        measured = drafter.config.from_options(drafter.config.to_dict() | {"target": made})
        text = with_results(text, results, measured, [str(folder)])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if entry is not None and is_embedded(entry):
            drafter.draft_model.save_pretrained(folder / entry["subfolder"])  # type: ignore[attr-defined]
        if weights := {name: tensor.contiguous() for name, tensor in drafter.weights().items()}:
            save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
        (folder / CARD).write_text(text)
    except (OSError, SafetensorError) as error:
        raise SpeculationError(f"cannot write to folder {str(folder)!r}: {error}; name another one") from error


def _draft_entry(drafter: Storable, embed: bool | None, folder: Path) -> dict[str, str] | None:
    """Where the saved config says that the draft model lives."""
    model, known = getattr(drafter, "draft_model", None), drafter.config.draft_model or {}
    if not drafter.takes_draft_model or model is None:
        return None
    beside = None if embed or (embed is None and "path" not in known) else _beside(model, folder)
    if not embed and (beside is not None or "repo_id" in known):
        return beside or known
    if embed is False:
        return _pinned(model)
    if getattr(model, "is_quantized", False):
        raise SpeculationError(
            "the draft model is quantized in memory and cannot be copied; load the drafter without quantization "
            "before saving it, or pass embed_draft_model=False"
        )
    return {"subfolder": known["subfolder"] if is_embedded(known) else DRAFT_FOLDER}


def _beside(model: "PreTrainedModel", folder: Path) -> dict[str, str] | None:
    """The model's own folder as seen from `folder`: one beside it, or a folder in that."""
    mine, own = Path(model.config.name_or_path).resolve(), folder.resolve()
    near = own.parent in (mine.parent, mine.parent.parent) and not mine.is_relative_to(own)
    if not model.config.name_or_path or not mine.is_dir() or not near or mine == own.parent:
        return None
    return {"path": f"../{mine.relative_to(own.parent).as_posix()}"}


def _pinned(model: "PreTrainedModel") -> dict[str, str]:
    """The model's repo and commit; asks the Hub for the commit if the model does not know it."""
    name = model.config.name_or_path
    try:
        validate_repo_id(name)
        commit = getattr(model.config, "_commit_hash", None) or HfApi().model_info(name).sha
    except Exception as error:  # not a repo id, no such repo, no connection
        raise SpeculationError(
            "embed_draft_model=False needs a draft model from a repo on the Hub or from a folder beside the one to "
            f"save into, and this one is {name!r}; push it first, or embed it ({one_line(error)})"
        ) from error
    if Path(name).is_dir() or not COMMIT_HASH.fullmatch(commit or ""):
        raise SpeculationError(
            f"the draft model was loaded from the folder {name!r}, which is not beside the one to save into; "
            "push it first, or embed it"
        )
    return {"repo_id": name, "revision": commit}
