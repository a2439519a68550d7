"""A folder or a Hub repo → a drafter."""

from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..config import DrafterConfig
from ..errors import SpeculationError, shown
from .draft import PATTERNS, check_draft_entry, find_draft, is_embedded
from .files import HubSource, check_no_pickles, naming, read_json, read_tensors, taken
from .registry import Storable, drafter_class, drafter_types, load_model, reader_of
from .target import check_fields

DrafterT = TypeVar("DrafterT", bound=Storable)

FORMAT_VERSION = 1
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"


DRAFT_OPTIONS = ("trust_remote_code", "device_map", "dtype", "quantization", "pack_linear")
"""options of `load_drafter` that are about the draft model: what `load_draft` takes"""


def load_drafter(
    cls: type[DrafterT],
    repo_or_folder: str | Path,
    *,
    draft_model: Any = None,
    **options: Any,
) -> DrafterT:
    """Load a drafter; its class follows from `drafter_type` in its `config.json`, or from what others write there.

    Args:
        cls: `Drafter`, or the class that is expected.
        repo_or_folder: a local folder, else a repo on the Hub.
        draft_model: use this model instead of the one that the config names.
        options: where files come from (fields of `HubSource`), how the draft model is loaded (`DRAFT_OPTIONS`), and
            options of the drafter in place of the stored ones.

    Raises:
        SpeculationError: whatever is wrong with the repo; the message names the file and the fix.
    """
    source = HubSource(repo_or_folder, **taken(options, [f.name for f in fields(HubSource)]))
    loading = taken(options, DRAFT_OPTIONS)
    folder = source.folder([CONFIG, WEIGHTS])
    check_no_pickles(folder)
    found, config = read_config(folder)
    if not issubclass(found, cls):
        raise SpeculationError(
            f"{folder / CONFIG} holds a {config.drafter_type!r} drafter, which {cls.__name__}.from_pretrained() "
            f"does not load; call Drafter.from_pretrained(), or {found.__name__}.from_pretrained()"
        )
    if not found.takes_draft_model and draft_model is not None:
        raise SpeculationError(
            f"{folder / CONFIG}: {config.drafter_type!r} drafts without a model; leave draft_model out"
        )
    is_model = found.needs_draft_model and config.draft_model is None  # the folder is the draft model's
    if draft_model is None and (is_model or config.draft_model is not None):
        trusted = bool(loading.get("trust_remote_code", False))
        draft_model = load_model(folder if is_model else draft_folder(config, folder, source, trusted), **loading)
    arguments = [draft_model] if found.takes_draft_model else []
    try:
        make = _make if is_model else _with_weights
        drafter = make(found, arguments, config.chosen() | options, folder)
    except MemoryError as error:
        raise SpeculationError(
            f"{folder / CONFIG}: there is not enough memory for its options ({error}); lower them"
        ) from error
    drafter.config.target, drafter.config.draft_model = config.target, config.draft_model
    return drafter


def draft_folder(config: DrafterConfig, folder: Path, source: HubSource, trust_remote_code: bool = False) -> Path:
    """The local folder of the draft model that the config in `folder` names; downloaded where it is on the Hub.

    Args:
        source: where `folder` came from.

    Raises:
        SpeculationError: it is not there, or cannot be had.
    """
    assert config.draft_model is not None, "read_config() saw to it"
    if "path" in config.draft_model and not source.is_local:
        raise SpeculationError(
            f"{folder / CONFIG}: draft_model.path is {shown(config.draft_model['path'])}, a folder beside this "
            "one, and a repo on the Hub has none; push it again with --draft-repo, or pass draft_model=..."
        )
    if is_embedded(config.draft_model):  # fetch it from the same commit
        names = [f"{config.draft_model['subfolder']}/{pattern}" for pattern in PATTERNS]
        folder = source.at_commit_of(folder).folder(names)
    return find_draft(config.draft_model, folder, source, trust_remote_code)


def read_config(folder: Path) -> tuple[type[Storable], DrafterConfig]:
    """The drafter class and the checked config that `config.json` in `folder` describes. One of others, of a draft
    model that a drafter is for, says nothing of options."""
    content, path = read_json(folder, CONFIG), folder / CONFIG
    if "drafter_type" not in content and (reader := reader_of(content)) is not None:
        return reader, reader.config_class()
    drafter_type, version = content.pop("drafter_type", None), content.pop("format_version", None)
    if drafter_type is None:
        hint = (
            " (this is a transformers model: pass the model itself as assistant_model)"
            if "model_type" in content
            else ""
        )
        raise SpeculationError(
            f'{path} has no "drafter_type", so it is not a drafter{hint}; known types: {", ".join(drafter_types())}'
        )
    if not isinstance(drafter_type, str) or drafter_type not in drafter_types():
        raise SpeculationError(
            f"{path}: unknown drafter_type {shown(drafter_type)}; known: {', '.join(drafter_types())}. A newer "
            "hf_specdec may know it, and a class of your own is known once it was imported; an import path is not "
            "allowed here"
        )
    if type(version) is not int or version < 1:
        raise SpeculationError(f'{path}: "format_version" is {shown(version)}; it must be {FORMAT_VERSION}')
    if version > FORMAT_VERSION:
        raise SpeculationError(
            f"{path} has format_version {shown(version)}, and this hf_specdec reads up to {FORMAT_VERSION}; "
            "pip install --upgrade hf-specdec"
        )
    if not isinstance(written_by := content.pop("hf_specdec_version", ""), str):
        raise SpeculationError(
            f"{path}: hf_specdec_version is {shown(written_by)}; it must be a string such as '0.1.0'"
        )
    cls = drafter_class(drafter_type)
    if content.get("target") is not None:
        check_fields(content["target"], path)
    if content.get("draft_model") is not None:
        check_draft_entry(content["draft_model"], path)
    if cls.needs_draft_model and content.get("draft_model") is None:
        raise SpeculationError(f"{path}: {drafter_type!r} needs a draft_model; name it with save_pretrained()")
    if not cls.takes_draft_model and content.get("draft_model") is not None:
        raise SpeculationError(
            f"{path}: {drafter_type!r} drafts without a model, but draft_model is set; remove the entry"
        )
    with naming(path):
        return cls, cls.config_class.from_options(content)


def _with_weights(cls: type[DrafterT], arguments: list[Any], options: dict[str, Any], folder: Path) -> DrafterT:
    path, name = folder / WEIGHTS, cls.config_class.drafter_type
    if cls.weights is Storable.weights:
        if path.exists() or path.is_symlink():
            raise SpeculationError(
                f"{path} is there, but a {name!r} drafter has no weights of its own; "
                "remove the file, or correct drafter_type in config.json"
            )
        return _make(cls, arguments, options, folder)
    # First without memory: what config.json declares is compared with the file before any of it is allocated.
    with naming(folder / CONFIG, "declares sizes that cannot be built"), torch.device("meta"):
        expected = cls(*arguments, **options).weights()
    if not expected and not path.exists():  # a stop rule that nobody had to train
        return _make(cls, arguments, options, folder)
    tensors = read_tensors(folder, WEIGHTS, expected)
    drafter = _make(cls, arguments, options, folder)
    with naming(path):
        drafter.load_weights(tensors)
    return drafter


def _make(cls: type[DrafterT], arguments: list[Any], options: dict[str, Any], folder: Path) -> DrafterT:
    with naming(folder / CONFIG):
        return cls(*arguments, **options)
