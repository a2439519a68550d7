"""A way to decode, by its short form SPEC, and what one `generate` call with it comes to.

A SPEC is a drafter's (`loading.drafters`), or one of `BASELINES`, which may have options, too:
`draft_model:num_draft_tokens=5`, `hf-assisted:num_assistant_tokens=3`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typer import Option

from ...drafters import Drafter
from ...errors import SpeculationError
from ..instruments.ends import until_end
from ..instruments.meter import Meter, metered
from ..loading.drafters import SPEC, load_drafter, own_model, parse_options, required_draft
from ..loading.models import Pair, PairSettings

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
    """One way of decoding prompts."""

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

    def generate(self, target: PreTrainedModel, inputs: Mapping[str, Any], **options: Any) -> list[list[int]]:
        """The new tokens of each row, padding included.

        Args:
            inputs: `input_ids` [B, P] and `attention_mask`.
            options: of `generate`; those of the method come before them.
        """
        with self.prepared():
            output: Any = target.generate(**inputs, **options | self.kwargs)
        return output[:, inputs["input_ids"].shape[1] :].tolist()

    def prepared(self) -> AbstractContextManager[None]:
        """Sets the options that live in the draft's generation config, and takes them back."""
        return _generation_options(self.draft, self.draft_options) if self.draft is not None else nullcontext()


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
            "hf-prompt-lookup; may be given several times. `bench` takes all by default, and always plain decoding.",
        ),
    ] = None

    def methods(self, pair: Pair, specs: Iterable[str]) -> list[Method]:
        """A method for each SPEC, of those given several times one."""
        loading = self.of_drafts() | {"target": pair.target}
        return [build_method(spec, pair.draft, **loading) for spec in dict.fromkeys(specs)]


@dataclass
class Acceptance:
    """What a generation drafted and accepted, by the names of `Measurement`'s fields."""

    draft_calls: int
    row_steps: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    acceptance_sum: float
    acceptance_count: int


@dataclass
class Generation:
    """One `generate` call of a method."""

    method: Method
    rows: list[list[int]]
    """new tokens per row, up to the end of its text"""
    meter: Meter
    acceptance: Acceptance

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.rows))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verification, the target's own included; 1 for plain decoding."""
        return 1 + sum(self.acceptance.accepted_per_position) / max(self.acceptance.row_steps, 1)


def decode(
    target: PreTrainedModel, method: Method, inputs: Mapping[str, Tensor], seed: int = 0, **options: Any
) -> Generation:
    """One metered call of a method.

    Args:
        inputs: `input_ids` [B, P] and `attention_mask`.
        seed: of sampling.
        options: of `generate`.
    """
    torch.manual_seed(seed)
    with metered(target, method.draft) as meter:
        rows = method.generate(target, inputs, **options)
    rows = [until_end(target, row) for row in rows]
    return Generation(method, rows, meter, _acceptance(method, meter, inputs["input_ids"].shape[1], rows))


def _acceptance(method: Method, meter: Meter, prompt: int, rows: Sequence[Sequence[int]]) -> Acceptance:
    """From the drafter's statistics, or, for transformers' loops, from the target's forwards."""
    stats = method.drafter.last_stats if method.drafter is not None else None
    if stats is not None:
        known = stats.acceptance_count > 0
        return Acceptance(
            draft_calls=stats.draft_calls,
            row_steps=stats.row_steps,
            drafted_per_position=_by_position(stats.drafted_per_position),
            accepted_per_position=_by_position(stats.accepted_per_position),
            acceptance_sum=stats.acceptance_sum if known else float(stats.accepted_tokens),
            acceptance_count=stats.acceptance_count if known else stats.accepted_tokens + stats.rejections,
        )
    rounds = meter.accepted_per_round(prompt, len(rows[0])) if len(rows) == 1 else []
    longest = max((drafted for drafted, _ in rounds), default=0)
    return Acceptance(
        draft_calls=len(meter.of("draft")),
        row_steps=len(rounds) or sum(map(len, rows)),  # only plain decoding takes a batch
        drafted_per_position=[sum(drafted > i for drafted, _ in rounds) for i in range(longest)],
        accepted_per_position=[sum(accepted > i for _, accepted in rounds) for i in range(longest)],
        acceptance_sum=float(sum(accepted for _, accepted in rounds)),
        acceptance_count=sum(accepted + (accepted < drafted) for drafted, accepted in rounds),
    )


def _by_position(counts: Mapping[int, int]) -> list[int]:
    return [counts.get(i, 0) for i in range(max(counts, default=-1) + 1)]


def _baseline(spec: str, name: str, options: dict[str, Any], draft: PreTrainedModel | None) -> Method:
    defaults = HF_DEFAULTS.get(name, {})
    if unknown := sorted(set(options) - set(defaults)):
        raise SpeculationError(f"unknown option {unknown} of {name!r}; its options are {sorted(defaults) or '(none)'}")
    options = defaults | options
    if name in NEEDS_DRAFT:
        draft = required_draft(spec, draft)
        return Method(spec, {"assistant_model": draft}, draft, draft_options=options, single_row=True)
    return Method(spec, options, single_row=name != PLAIN)


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
