"""A way to decode, by its short form SPEC.

A SPEC is a drafter's (`loading.drafters`), or one of `BASELINES`, which may have options, too:
`draft_model:num_draft_tokens=5`, `hf-assisted:num_assistant_tokens=3`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from transformers import PreTrainedModel
from typer import Option

from ...errors import SpeculationError
from ...verify.rules import Rules
from ..loading.drafters import SPEC, load_drafter, own_model, parse_options, required_draft
from ..loading.models import Pair, PairSettings
from .method import Method
from .rivals import RIVALS, rival

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
USUAL = (PLAIN, *HF_DEFAULTS)
BASELINES = (*USUAL, *RIVALS)


def build_method(spec: str, draft: PreTrainedModel | None, **loading: Any) -> Method:
    """What a SPEC stands for.

    Args:
        draft: for drafters and baselines that take a draft model, unless they bring their own.
        loading: of the draft models that drafters bring, see `TargetSettings.of_drafts`, and the `target`.

    Raises:
        SpeculationError: the SPEC cannot be read, names nothing known, or needs a draft model that was not given.
    """
    name, options = parse_options(spec)
    if name in BASELINES:
        return _baseline(spec, name, options, draft)
    drafter = load_drafter(spec, draft, others=BASELINES, **loading)
    return Method(spec, {"assistant_model": drafter}, own_model(drafter), drafter)


@dataclass(kw_only=True)
class MethodSettings(PairSettings):
    """What every command that compares ways of decoding is told of them."""

    drafters: Annotated[
        list[str] | None, Option("--drafter", help=f"Drafter to compare: {SPEC}; may be given several times.")
    ] = None
    baselines: Annotated[
        list[str] | None,
        Option(
            "--baseline",
            help="transformers' own speculation to compare: hf-assisted, hf-confidence (both need --draft), "
            "hf-prompt-lookup; or another package's: economize-draft, economize-lookup, economize-hybrid, flashspec. "
            "May be given several times. `bench` takes all of transformers' by default, and always plain decoding.",
        ),
    ] = None

    forwards: Annotated[
        str,
        Option(
            help="How drafters' forwards run: auto, eager, captured, or bitwise; in the last plain decoding runs so, "
            "too, and all texts are equal."
        ),
    ] = "auto"

    def methods(self, pair: Pair, specs: Iterable[str]) -> list[Method]:
        """A method for each SPEC, of those given several times one."""
        loading = self.of_drafts() | {"target": pair.target}
        methods = [build_method(spec, pair.draft, **loading) for spec in dict.fromkeys(specs)]
        rules = Rules(forwards=self.forwards)  # type: ignore[arg-type]
        for method in methods:
            if method.drafter is not None or (method.name == PLAIN and rules.binding):
                method.kwargs["speculation"] = {"forwards": rules.forwards}
        return methods


def _baseline(spec: str, name: str, options: dict[str, Any], draft: PreTrainedModel | None) -> Method:
    defaults = HF_DEFAULTS.get(name, RIVALS.get(name, {}))
    if unknown := sorted(set(options) - set(defaults)):
        raise SpeculationError(f"unknown option {unknown} of {name!r}; its options are {sorted(defaults) or '(none)'}")
    options = defaults | options
    if name in RIVALS:
        return rival(spec, name, options, draft)
    if name in NEEDS_DRAFT:
        draft = required_draft(spec, draft)
        return Method(spec, {"assistant_model": draft}, draft, draft_options=options, single_row=True)
    return Method(spec, options, single_row=name != PLAIN)
