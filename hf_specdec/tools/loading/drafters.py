"""Drafters by SPEC: a folder, a Hub repo, or `type:key=value,...` of a registered drafter."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from transformers import PreTrainedModel
from typer import Option

from ...config import DrafterConfig, parse_options
from ...drafters import Drafter, StreamingDrafter
from ...drafters.heads import HeadDrafter
from ...errors import SpeculationError
from ...hub import registry
from ...hub.files import HubSource
from ...hub.loading import read_config
from .models import Pair, PairSettings

SPEC = "auto, a folder, a Hub repo, or TYPE:KEY=VALUE,... such as draft_model:num_draft_tokens=5"
"""what `load_drafter` takes, for `--help`"""
DEFAULT = "auto"
"""the SPEC where none is given"""


@dataclass(kw_only=True)
class DrafterSettings(PairSettings):
    """What every command that runs one drafter is told about it."""

    drafter: Annotated[
        str | None,
        Option(help=f"Drafter: {SPEC}. Default: {DEFAULT}."),
    ] = None

    @property
    def spec(self) -> str:
        """The drafter's SPEC, also where none was named."""
        return self.drafter or DEFAULT

    def load_drafter(self, pair: Pair) -> Drafter:
        """The drafter for a loaded pair.

        Raises:
            SpeculationError: it cannot be loaded as asked.
        """
        return load_drafter(self.spec, pair.draft, target=pair.target, **self.of_drafts())


def load_drafter(
    spec: str,
    draft: PreTrainedModel | None,
    others: Iterable[str] = (),
    target: PreTrainedModel | None = None,
    **loading: Any,
) -> Drafter:
    """The drafter that a SPEC describes.

    Args:
        draft: for drafters that need a draft model and do not bring their own.
        others: further names that the caller accepts, for the message.
        target: tuned, in place, where the drafter was trained together with it.
        loading: of the draft models that drafters bring; see `TargetSettings.of_drafts`.

    Raises:
        SpeculationError: the SPEC cannot be read, names nothing known, or needs a draft model that was not given.
    """
    drafter = _described(spec, draft, others, **loading)
    if target is not None and isinstance(drafter, StreamingDrafter) and drafter.config.mode == "tuned":
        drafter.tune(target)
    return drafter if target is None else drafter.for_target(target)


def config_of(spec: str) -> tuple[DrafterConfig, Path | None]:
    """The config that a SPEC describes, and the folder with the drafter's `config.json`; no model is loaded.

    Raises:
        SpeculationError: the SPEC cannot be read, or names nothing known.
    """
    name, options = _read(spec, ())
    if name is not None:
        return registry.drafter_class(name).config_class.from_options(options), None
    folder = HubSource(spec).folder(["config.json"])
    return read_config(folder)[1], folder


def _described(spec: str, draft: PreTrainedModel | None, others: Iterable[str], **loading: Any) -> Drafter:
    name, options = _read(spec, others)
    if name is None:
        return Drafter.from_pretrained(spec, **loading)
    drafter_class: Any = registry.drafter_class(name)
    draft = required_draft(spec, draft) if drafter_class.needs_draft_model else draft
    return drafter_class(*[draft] * drafter_class.takes_draft_model, **options)


def _read(spec: str, others: Iterable[str]) -> tuple[str | None, dict[str, Any]]:
    """A drafter's type and options; None for a folder or repo, which has them."""
    if Path(spec).is_dir() and spec not in registry.drafter_types():
        return None, {}
    name, options = parse_options(spec)
    if name in registry.drafter_types():
        return name, options
    if "/" in spec:
        return None, {}
    known = ", ".join((*registry.drafter_types(), *others))
    raise SpeculationError(f"drafter {spec!r} is not a folder, a Hub repo or a known name; known: {known}")


def own_model(drafter: Drafter) -> PreTrainedModel | None:
    """The model that a drafter drafts with, its own or the one given to it; None where it needs none, and for heads,
    which read the target's states: nobody else can run them."""
    if isinstance(getattr(drafter, "model_drafter", None) or drafter, HeadDrafter):
        return None
    own = getattr(drafter, "draft_model", None)
    return own or next((value for value in vars(drafter).values() if isinstance(value, PreTrainedModel)), None)


def required_draft(spec: str, draft: PreTrainedModel | None) -> PreTrainedModel:
    """The draft model.

    Raises:
        SpeculationError: there is none.
    """
    if draft is None:
        raise SpeculationError(f"{spec!r} needs a draft model; name one with --draft")
    return draft
