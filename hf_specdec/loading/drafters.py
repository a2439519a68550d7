"""Drafters by SPEC: a folder, a Hub repo, or `type:key=value,...` of a registered drafter."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .. import registry
from ..config import parse_options
from ..drafters import Drafter, StreamingDrafter
from ..errors import SpeculationError


def default_drafter(draft: str | None) -> str:
    """The SPEC where none is given: a draft model drafts if there is one, else the prompt is looked up."""
    return "prompt_lookup" if draft is None else "draft_model"


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
        others: names that are no drafters and that the caller knows as well, for the message.
        target: tuned, in place, where the drafter was trained together with it.
        loading: of the draft models that drafters bring; see `TargetSettings.of_drafts`.

    Raises:
        SpeculationError: the SPEC cannot be read, names nothing known, or needs a draft model that was not given.
    """
    drafter = _described(spec, draft, others, **loading)
    if target is not None and isinstance(drafter, StreamingDrafter) and drafter.config.mode == "tuned":
        drafter.tune(target)
    return drafter


def _described(spec: str, draft: PreTrainedModel | None, others: Iterable[str], **loading: Any) -> Drafter:
    if Path(spec).is_dir() and spec not in registry.drafter_types():
        return Drafter.from_pretrained(spec, **loading)
    name, options = parse_options(spec)
    if name in registry.drafter_types():
        drafter_class: Any = registry.drafter_class(name)
        models = [required_draft(spec, draft)] if drafter_class.needs_draft_model else []
        return drafter_class(*models, **options)
    if "/" in spec:
        return Drafter.from_pretrained(spec, **loading)
    known = ", ".join((*registry.drafter_types(), *others))
    raise SpeculationError(f"{spec!r} is no folder, no Hub repo and no known drafter; known: {known}")


def own_model(drafter: Drafter) -> PreTrainedModel | None:
    """The model that a drafter drafts with, its own or the one given to it; None where it needs none."""
    return next((value for value in vars(drafter).values() if isinstance(value, PreTrainedModel)), None)


def required_draft(spec: str, draft: PreTrainedModel | None) -> PreTrainedModel:
    """The draft model.

    Raises:
        SpeculationError: there is none.
    """
    if draft is None:
        raise SpeculationError(f"{spec!r} needs a draft model; name one with --draft")
    return draft
