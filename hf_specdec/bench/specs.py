"""SPEC, the short form of a way to decode, and what it stands for in a `generate` call.

A SPEC is a drafter's folder, its Hub repo, `type:key=value,...` of a registered drafter, or one of `BASELINES`, which
may have options, too: `draft_model:num_draft_tokens=5`, `hf-assisted:num_assistant_tokens=3`.
"""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .. import registry
from ..drafters.base import Drafter
from ..errors import SpeculationError

PLAIN = "plain"
HF_DEFAULTS: dict[str, dict[str, Any]] = {
    "hf-assisted": {
        "num_assistant_tokens": 5,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    },
    "hf-confidence": {
        "num_assistant_tokens": 20,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.4,
    },
    "hf-prompt-lookup": {"prompt_lookup_num_tokens": 10},
}
"""Options of transformers' own speculation: a fixed window, its default confidence threshold, and prompt lookup."""
NEEDS_DRAFT = ("hf-assisted", "hf-confidence")
BASELINES = (PLAIN, *HF_DEFAULTS)


@dataclass
class Method:
    """One way of decoding the prompts."""

    name: str
    """the SPEC as it was given"""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """what it adds to `generate`"""
    draft: PreTrainedModel | None = None
    """the model that drafts, if any"""
    drafter: Drafter | None = None
    draft_options: dict[str, Any] = field(default_factory=dict)
    """what transformers' loop reads from the draft's generation config"""
    single_row: bool = False
    """whether it takes a batch of 1 only"""

    def prepared(self) -> AbstractContextManager[None]:
        """Sets the options that live in the draft's generation config, and takes them back."""
        return _generation_options(self.draft, self.draft_options) if self.draft is not None else nullcontext()


def parse_options(spec: str) -> tuple[str, dict[str, Any]]:
    """`name:key=value,...` → name and options; values are JSON where they can be, else text."""
    name, _, rest = spec.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise SpeculationError(f"cannot read {part!r} in {spec!r}; options look like name:key=value,key=value")
        try:
            options[key.strip()] = json.loads(value)
        except ValueError:
            options[key.strip()] = value
    return name, options


def build_method(spec: str, draft: PreTrainedModel | None) -> Method:
    """What a SPEC stands for.

    Args:
        draft: for drafters and baselines that take a draft model, unless they bring their own.

    Raises:
        SpeculationError: the SPEC cannot be read, names nothing known, or needs a draft model that was not given.
    """
    name, options = parse_options(spec)
    if name in BASELINES:
        return _baseline(spec, name, options, draft)
    drafter = load_drafter(spec, draft)
    models = [value for value in vars(drafter).values() if isinstance(value, PreTrainedModel)]
    return Method(spec, {"assistant_model": drafter}, models[0] if models else None, drafter)


def default_drafter(draft: str | None) -> str:
    """The SPEC where none is given: a draft model drafts if there is one, else the prompt is looked up."""
    return "prompt_lookup" if draft is None else "draft_model"


def load_drafter(spec: str, draft: PreTrainedModel | None) -> Drafter:
    """The drafter that a SPEC describes."""
    import hf_specdec  # noqa: F401  registers the drafters

    if Path(spec).is_dir() and spec not in registry.drafter_types():
        return Drafter.from_pretrained(spec)
    name, options = parse_options(spec)
    if name in registry.drafter_types():
        drafter_class: Any = registry.drafter_class(name)
        models = [_required(spec, draft)] if registry.drafter_class(name).needs_draft_model else []
        return drafter_class(*models, **options)
    if "/" in spec:
        return Drafter.from_pretrained(spec)
    known = ", ".join((*registry.drafter_types(), *BASELINES))
    raise SpeculationError(f"{spec!r} is no folder, no Hub repo and no known drafter; known: {known}")


def _baseline(spec: str, name: str, options: dict[str, Any], draft: PreTrainedModel | None) -> Method:
    defaults = HF_DEFAULTS.get(name, {})
    if unknown := sorted(set(options) - set(defaults)):
        raise SpeculationError(f"unknown option {unknown} of {name!r}; its options are {sorted(defaults) or '(none)'}")
    options = defaults | options
    if name in NEEDS_DRAFT:
        draft = _required(spec, draft)
        return Method(spec, {"assistant_model": draft}, draft, draft_options=options, single_row=True)
    return Method(spec, options, single_row=name != PLAIN)


def _required(spec: str, draft: PreTrainedModel | None) -> PreTrainedModel:
    if draft is None:
        raise SpeculationError(f"{spec!r} needs a draft model; name one with --draft")
    return draft


@contextmanager
def _generation_options(draft: PreTrainedModel, options: dict[str, Any]) -> Iterator[None]:
    config = draft.generation_config
    before = {name: getattr(config, name) for name in options}
    for name, value in options.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
