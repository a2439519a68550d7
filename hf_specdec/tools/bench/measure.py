"""Measure: all methods decode each prompt in turn, in rotated order, so that drift of the machine cancels out."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...errors import warn
from ...hub import made_for
from ...hub.measured import facts
from ...target.devices import input_device
from ..instruments.audit import Audit
from ..instruments.bare import Kind, bare_seconds, time_bare_forwards
from ..instruments.ends import end_tokens, until_end
from ..instruments.meter import Forward, Meter, metered
from ..instruments.pacing import paced
from ..instruments.provenance import peak_memory_bytes, reset_peak_memory
from ..instruments.synthetic import synthetic_acceptance
from ..loading.chat import batch, prompt_ids
from ..loading.prompts import WARM_UP_TEXT, Prompt
from ..loading.sampling import sampling_at
from ..showing.pretended import pretended_costs
from .methods import BASELINES, PLAIN, Method, build_method
from .plan import Settings, Unit
from .results import Measurement, Results
from .summary import summarize

T = TypeVar("T")


@dataclass
class Generation:
    """One `generate` call."""

    method: Method
    repeat: int
    rows: list[list[int]]
    """new tokens per row, up to its end of text"""
    meter: Meter
    acceptance: dict[str, Any]
    """the fields of `Measurement` that say what was drafted and accepted"""
    peak_memory: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))


class Bench:
    """The loaded models and methods of a run."""

    def __init__(self, settings: Settings) -> None:
        settings.check()
        self.settings = settings
        pair = settings.load()
        self.device = input_device(pair.target)
        self.tokenizer, self.target, self.draft = pair.tokenizer, pair.target, pair.draft
        baselines = settings.baselines
        if baselines is None:
            baselines = [name for name in BASELINES if self.draft is not None or name in (PLAIN, "hf-prompt-lookup")]
        specs = dict.fromkeys([PLAIN, *baselines, *(settings.drafters or [])])
        # A drafter may learn from what it has written: each repetition has its own, which meets each prompt once.
        loading = settings.of_drafts() | {"target": self.target}
        self.passes = [[build_method(spec, self.draft, **loading) for spec in specs] for _ in range(settings.repeats)]

    def about(self) -> dict[str, Any]:
        """Which target and which drafters these are, for whoever shows the figures elsewhere."""
        drafters = {method.name: facts(method.drafter.config) for method in self.passes[0] if method.drafter}
        pretended = pretended_costs(asdict(self.settings))
        return {"target": made_for(self.target, self.tokenizer), "drafters": drafters, "pretended": pretended}

    def run(
        self, results: Results, units: list[Unit], save: Callable[[Results], None], done: Callable[[], None]
    ) -> None:
        """Measure every unit that `results` does not hold yet; `save` and `done` are called after each."""
        held = {measurement.unit for measurement in results.measurements}
        with ExitStack() as stack:
            for model, pace in ((self.target, self.settings.pace_target), (self.draft, self.settings.pace_draft)):
                if model is not None and pace:
                    stack.enter_context(paced(model, pace))
            missing = [unit for unit in units if unit.key not in held]
            if missing:
                self._warm_up(missing[0])
            for number, unit in enumerate(missing):
                results.measurements += self.measure(unit, rotation=number)
                results.runs = summarize(results.measurements, self.settings.seed)
                save(results)
                done()

    def measure(self, unit: Unit, rotation: int = 0) -> list[Measurement]:
        """All methods and repetitions of one unit, turn by turn, as far as they fit into the target's context.

        The turns before stand in the prompt with plain decoding's answers, the same for all methods.
        """
        measured: list[Measurement] = []
        while unit.prompts and (inputs := self.tokenize(unit)) is not None:
            new, plain = self._measure_turn(unit, inputs, rotation + unit.turn)
            measured += new
            unit = unit.after([self._text(row) for row in plain])
        return measured

    def _measure_turn(
        self, unit: Unit, inputs: dict[str, Tensor], rotation: int
    ) -> tuple[list[Measurement], list[list[int]]]:
        """All methods and repetitions of one turn, and plain decoding's tokens in the first of them."""
        reference = self._reference(unit, inputs)
        measured: list[Measurement] = []
        plain: list[list[int]] = []
        for repeat, methods in enumerate(self.passes):
            methods = [method for method in methods if unit.batch_size == 1 or not method.single_row]
            generations = [
                self.generate(method, unit, inputs, reference, repeat=repeat)
                for method in _rotated(methods, rotation + repeat)
            ]
            generations.sort(key=lambda generation: methods.index(generation.method))
            tables = self._bare_tables(generations, inputs["input_ids"])
            step = tables[generations[0].method.name].get(("target", len(inputs["input_ids"]), 1))
            plain = plain or generations[0].rows
            audit = Audit(self.target, inputs["input_ids"][:1], plain[0], **self.options(unit))
            measured += [
                self._measurement(unit, inputs["input_ids"], g, tables[g.method.name], step, plain, audit)
                for g in generations
            ]
        return measured, plain

    def _warm_up(self, unit: Unit) -> None:
        """Each method once, on text of no importance: no first call of a kernel or of a drafter is measured."""
        inputs = self.tokenize(replace(unit, prompts=[Prompt((WARM_UP_TEXT,))] * len(unit.prompts)))
        if inputs is None:
            return
        for method in (method for methods in self.passes for method in methods):
            if unit.batch_size == 1 or not method.single_row:
                self.generate(method, unit, inputs, max_new_tokens=min(16, self.settings.max_new_tokens))

    def tokenize(self, unit: Unit) -> dict[str, Tensor] | None:
        raw, system = self.settings.raw, self.settings.system
        rows = [prompt_ids(self.tokenizer, prompt, raw, system) for prompt in unit.prompts]
        inputs = batch(rows, self.tokenizer.pad_token_id, self.device)
        room = getattr(self.target.config.get_text_config(), "max_position_embeddings", None)
        length = inputs["input_ids"].shape[1] + self.settings.max_new_tokens
        if room is not None and length > room:
            what = f"{unit.dataset} {unit.index}" + (f" from turn {unit.turn + 1} on" if unit.turn else "")
            warn(
                f"{what} left out: with its new tokens it needs {length} positions, and the target has {room}. "
                "Lower max_new_tokens to keep it"
            )
            return None
        return inputs

    def _reference(self, unit: Unit, inputs: dict[str, Tensor]) -> list[int] | None:
        """For synthetic acceptance: the prompt and plain decoding's continuation."""
        if self.settings.synthetic_acceptance is None:
            return None
        return inputs["input_ids"][0].tolist() + self.generate(self.passes[0][0], unit, inputs).rows[0]

    def options(self, unit: Unit) -> dict[str, Any]:
        options: dict[str, Any] = {"max_new_tokens": self.settings.max_new_tokens} | sampling_at(unit.temperature)
        if self.tokenizer.pad_token_id is not None:
            options["pad_token_id"] = self.tokenizer.pad_token_id
        return options

    def generate(
        self,
        method: Method,
        unit: Unit,
        inputs: dict[str, Tensor],
        reference: list[int] | None = None,
        repeat: int = 0,
        **options: Any,
    ) -> Generation:
        """One metered call of a method. Every repetition has the same seed."""
        settings = self.settings
        with ExitStack() as stack:
            stack.enter_context(method.prepared())
            if reference is not None and settings.synthetic_acceptance is not None and method.draft is not None:
                share = settings.synthetic_acceptance
                stack.enter_context(synthetic_acceptance(method.draft, reference, share, settings.seed + unit.index))
            torch.manual_seed(settings.seed + unit.index)
            reset_peak_memory(self.device)
            with metered(self.target, method.draft) as meter:
                output = self.target.generate(**inputs, **(self.options(unit) | options), **method.kwargs)
            memory = peak_memory_bytes(self.device)
        columns = inputs["input_ids"].shape[1]
        rows = [until_end(self.target, row) for row in output[:, columns:].tolist()]
        return Generation(method, repeat, rows, meter, _acceptance(method, meter, columns, rows), memory)

    def _text(self, row: list[int]) -> str:
        """What was said, without the tokens that end it."""
        ends = end_tokens(self.target)
        return self.tokenizer.decode([token for token in row if token not in ends], skip_special_tokens=True)

    def _bare_tables(self, generations: list[Generation], ids: Tensor) -> dict[str, dict[Kind, float]]:
        """Bare times of all forwards made, by method: drafters' with this package's attention, others' with
        transformers' own. Methods share the target's, and each draft model's."""
        tables: dict[str, dict[Kind, float]] = {}
        for ours in (False, True):
            mine = [g for g in generations if (g.method.drafter is not None) is ours]
            of_target = time_bare_forwards({"target": self.target}, _forwards(mine), ids, ours)
            for draft in {id(g.method.draft): g.method.draft for g in mine}.values():
                users = [g for g in mine if g.method.draft is draft]
                of_draft = {} if draft is None else time_bare_forwards({"draft": draft}, _forwards(users), ids, ours)
                tables |= {g.method.name: of_target | of_draft for g in users}
        return tables

    def _measurement(
        self,
        unit: Unit,
        ids: Tensor,
        generation: Generation,
        table: dict[Kind, float],
        step: float | None,
        plain: list[list[int]],
        audit: Audit,
    ) -> Measurement:
        meter, greedy = generation.meter, unit.temperature == 0
        rows = ids.shape[0]
        return Measurement(
            dataset=unit.dataset,
            prompt=unit.index,
            batch_size=unit.batch_size,
            temperature=unit.temperature,
            method=generation.method.name,
            repeat=generation.repeat,
            tokens=generation.tokens,
            seconds=meter.seconds,
            prefill_seconds=meter.prefill_seconds,
            draft_seconds=meter.total("draft"),
            verify_seconds=meter.total("target"),
            bare_seconds=bare_seconds(meter.forwards, table),
            target_step_seconds=step,
            draft_step_seconds=table.get(("draft", rows, 1)) if generation.acceptance["draft_calls"] else None,
            target_calls=len(meter.of("target")),
            **generation.acceptance,
            same_text=generation.rows == plain if greedy else None,
            difference=_difference(generation, audit) if greedy else None,
            peak_memory_bytes=generation.peak_memory,
            turn=unit.turn,
        )


def _forwards(generations: Sequence[Generation]) -> list[Forward]:
    """All that they made."""
    return [forward for generation in generations for forward in generation.meter.forwards]


def _difference(generation: Generation, audit: Audit) -> dict[str, Any] | None:
    """Where a single row's text leaves plain's; looked up once, in the first repetition."""
    if len(generation.rows) > 1 or generation.repeat:
        return None
    found = audit.difference(generation.rows[0])
    return asdict(found) | {"near_tie": found.near_tie} if found else None


def _acceptance(method: Method, meter: Meter, prompt: int, rows: list[list[int]]) -> dict[str, Any]:
    """What was drafted and accepted: from the drafter's statistics, or, for transformers' loops, from its forwards."""
    stats = method.drafter.last_stats if method.drafter is not None else None
    if stats is not None:
        tested = stats.accepted_tokens + stats.rejections
        known = stats.acceptance_count > 0
        return {
            "draft_calls": stats.draft_calls,
            "row_steps": stats.row_steps,
            "drafted_per_position": _by_position(stats.drafted_per_position),
            "accepted_per_position": _by_position(stats.accepted_per_position),
            "acceptance_sum": stats.acceptance_sum if known else float(stats.accepted_tokens),
            "acceptance_count": stats.acceptance_count if known else tested,
        }
    rounds = meter.accepted_per_round(prompt, len(rows[0])) if len(rows) == 1 else []
    longest = max((drafted for drafted, _ in rounds), default=0)
    return {
        "draft_calls": len(meter.of("draft")),
        "row_steps": len(rounds) or sum(map(len, rows)),  # in a batch only plain decoding gets here
        "drafted_per_position": [sum(drafted > i for drafted, _ in rounds) for i in range(longest)],
        "accepted_per_position": [sum(accepted > i for _, accepted in rounds) for i in range(longest)],
        "acceptance_sum": float(sum(accepted for _, accepted in rounds)),
        "acceptance_count": sum(accepted + (accepted < drafted) for drafted, accepted in rounds),
    }


def _by_position(counts: dict[int, int]) -> list[int]:
    return [counts.get(i, 0) for i in range(max(counts, default=-1) + 1)]


def _rotated(items: Sequence[T], by: int) -> list[T]:
    by %= len(items)
    return [*items[by:], *items[:by]]
