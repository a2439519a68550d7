"""Which drafter drafts for a target: what it brings, else what is known for it, else what needs nothing."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from huggingface_hub import hf_hub_download

from ...errors import SpeculationError, one_line, warn
from ...hub import check_made_for, drafter_from_flag
from ...hub.fetching import Allowance
from ...hub.files import HubSource
from ...hub.known import Known, known_for, ready_folder
from ...hub.registry import drafter_class, drafter_types, load_model
from ...hub.tokenizer import public_name
from ...target.devices import DTYPES, input_device
from ...target.packing import is_packed
from ...verify.rules import Rules
from ..base import Drafter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BESIDE = "drafter"
"""subfolder of a target's folder or repo that may hold a drafter made for it"""
MEMORY_MB = 64
"""of past outputs, beside whatever else drafts"""
NOT_OURS = (None, "none", "auto", "dflash")
"""values of `speculation_type` in a target's generation config that name no drafter of ours to make"""


class Candidate(NamedTuple):
    """A drafter that could be used."""

    name: str
    why: str
    """it is a candidate"""
    make: Callable[[], Drafter]


def chosen(target: "PreTrainedModel", allowance: Allowance) -> Drafter:
    """The first candidate that loads and serves the target; it says why in `because`."""
    left_out = ""
    for name, why, make in _candidates(target, allowance):
        try:
            drafter = make()
            if drafter.config.drafter_type == "auto":
                raise SpeculationError("it is a drafter that chooses another one, and auto has chosen")
            check_made_for(drafter.config.target, target)
            drafter.check_target(target)
        except Exception as error:  # every repo is broken in its own way, and the call goes on without it
            said = f"{name} was left out: {one_line(error)}"
            warn(f"speculation_type='auto': {said}")
            left_out += f"; {said}"
            continue
        drafter.because = f"auto chose {drafter.config.drafter_type} ({name}): {why}{left_out}"
        return drafter
    raise AssertionError("the last candidate needs nothing")


def over_draft(draft_model: Any) -> Drafter:
    """For a draft model that the user has given."""
    drafter = _hybrid(draft_model)
    drafter.because = "auto chose hybrid: a draft model was given"
    return drafter


def _candidates(target: "PreTrainedModel", allowance: Allowance) -> Iterator[Candidate]:
    yield from _brought(target, allowance)
    for known in known_for(target):
        folder = ready_folder(known.folder) if known.folder else None
        if known.folder and folder is None:
            continue  # it comes with a clone of the repository, and this is none
        why = f"known for {known.targets[0]}" + ", which this model is like" * (not known.names(target))
        yield Candidate(known.name, why, partial(_of_known, known, folder, target, allowance))
    name = public_name(target.config.name_or_path) or type(target).__name__
    yield Candidate("without a draft model", f"it needs nothing, and nothing else is at hand for {name}", _hybrid)


# ---------------------------------------------------------------------- what the target brings


def _brought(target: "PreTrainedModel", allowance: Allowance) -> Iterator[Candidate]:
    if target.config.name_or_path and getattr(target.config.get_text_config(), "num_mtp_layers", None):
        why = "the model was trained to foretell several tokens"
        yield Candidate("its own layers", why, partial(_with_own_layers, target, allowance))
    config: Any = getattr(target, "generation_config", None)
    if (kind := getattr(config, "speculation_type", None)) not in NOT_OURS:
        said = Rules.split(getattr(config, "speculation", None))[1]
        options = said if isinstance(said, dict) else {}
        make = partial(_flagged, str(kind), options, target, allowance)
        yield Candidate(str(options.get("drafter", kind)), "the model's generation config asks for it", make)
    if (source := _beside(target, allowance)) is not None:
        make = partial(_loaded, source, target, allowance)
        yield Candidate(f"{source.repo_or_folder}/{BESIDE}", "it lies beside the model", make)


def _flagged(kind: str, options: dict[str, Any], target: "PreTrainedModel", allowance: Allowance) -> Drafter:
    """The drafter that the target's own flag names, if it may be fetched."""
    if "drafter" in options:
        where = {field.name: options[field.name] for field in fields(HubSource) if field.name in options}
        source = allowance.drafter(HubSource(options["drafter"], **where))
        options = options | _like(target) | {"local_files_only": source.local_files_only}
        if source.revision is not None:
            options["revision"] = source.revision
    named = cast(Drafter, drafter_from_flag(target, kind, options))
    return copy(named)  # `because` is not for those who name it themselves


def _beside(target: "PreTrainedModel", allowance: Allowance) -> HubSource | None:
    """A drafter in a subfolder of the target's own."""
    name, commit = target.config.name_or_path, getattr(target.config, "_commit_hash", None)
    if name and Path(name).is_dir():
        return HubSource(name, BESIDE) if (Path(name) / BESIDE / "config.json").is_file() else None
    if not name or commit is None:  # it did not come from the Hub
        return None
    with suppress(Exception):  # there is none, or nobody who could say
        hf_hub_download(name, "config.json", subfolder=BESIDE, revision=commit, local_files_only=not allowance.asks)
        return HubSource(name, BESIDE, revision=commit)
    return None


# ---------------------------------------------------------------------- how it is made


def _of_known(known: Known, folder: Path | None, target: "PreTrainedModel", allowance: Allowance) -> Drafter:
    """
    Raises:
        SpeculationError: it is of a kind that this version does not know, is not at hand, or may not be fetched.
    """
    if known.kind not in drafter_types():
        raise SpeculationError(f"this version does not draft with {known.kind!r}")
    if folder is not None:
        return _loaded(HubSource(folder), target, allowance)
    return _hybrid(load_model(allowance.model(HubSource(known.repo)), **_like(target)))


def _loaded(source: HubSource, target: "PreTrainedModel", allowance: Allowance) -> Drafter:
    source = allowance.drafter(source)
    where: dict[str, Any] = {} if source.is_local else {"revision": source.revision}
    where |= {"subfolder": source.subfolder, "local_files_only": source.local_files_only}
    return Drafter.from_pretrained(source.repo_or_folder, **where | _like(target))


def _with_own_layers(target: "PreTrainedModel", allowance: Allowance) -> Drafter:
    """
    Raises:
        SpeculationError: transformers would fetch more of the target's checkpoint than is allowed.
    """
    name = target.config.name_or_path
    if not Path(name).is_dir():
        if allowance.gigabytes == 0:  # transformers asks the Hub for the checkpoint's newest commit
            raise SpeculationError("its layers are looked up on the Hub, which max_download_gb=0 asks nothing")
        allowance.model(HubSource(name))
    return _hybrid(drafter_class("mtp")())


def _hybrid(draft_model: Any = None) -> Drafter:
    """Whatever drafts, with copies and past outputs in one tree."""
    return cast(Drafter, drafter_class("hybrid")(draft_model, memory_mb=MEMORY_MB))


def _like(target: "PreTrainedModel") -> dict[str, Any]:
    """How what drafts is loaded: in the target's format, where the target is."""
    device, dtype = input_device(target), str(target.dtype).removeprefix("torch.")
    return {
        "dtype": dtype if dtype in DTYPES else "auto",
        "device_map": None if device.type == "cpu" else str(device),
        "pack_linear": is_packed(target),
    }
