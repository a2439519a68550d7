"""Measure: all methods decode each prompt in turn, in rotated order, so that drift of the machine cancels out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from torch import Tensor

from ...errors import warn
from ...hub import made_for
from ...hub.measured import facts
from ...target.devices import input_device
from ..instruments.audit import Audit
from ..instruments.ends import end_tokens
from ..instruments.provenance import peak_memory_bytes, reset_peak_memory
from ..loading.chat import batch, prompt_ids
from ..loading.models import Pair
from ..loading.prompts import WARM_UP_TEXT, Prompt
from ..loading.sampling import sampling_at
from .decoding import Generation, decode
from .method import Method
from .methods import PLAIN, USUAL
from .plan import Settings, Unit
from .results import Measurement, Results
from .summary import summarize

T = TypeVar("T")


class Bench:
    """The loaded models and methods of a run."""

    def __init__(self, settings: Settings, pair: Pair, passes: list[list[Method]]) -> None:
        """
        Args:
            passes: the methods of each repetition, plain decoding first. A drafter learns from what it has written:
                repetitions have drafters of their own where that is not to count.
        """
        self.settings, self.passes = settings, passes
        self.tokenizer, self.target = pair.tokenizer, pair.target
        self.device = input_device(pair.target)

    @classmethod
    def load(cls, settings: Settings) -> "Bench":
        """Models and methods as the settings name them.

        Raises:
            SpeculationError: bad settings, or models that do not load.
        """
        settings.check()
        pair = settings.load()
        baselines = settings.baselines
        if baselines is None:
            baselines = [name for name in USUAL if pair.draft is not None or name in (PLAIN, "hf-prompt-lookup")]
        specs = [PLAIN, *baselines, *(settings.drafters or [])]
        return cls(settings, pair, [settings.methods(pair, specs) for _ in range(settings.repeats)])

    def about(self) -> dict[str, Any]:
        """Which target and which drafters these are, for whoever shows the figures elsewhere."""
        drafters = {method.name: facts(method.drafter.config) for method in self.passes[0] if method.drafter}
        return {"target": made_for(self.target, self.tokenizer), "drafters": drafters}

    def run(self, results: Results, units: list[Unit], save: Callable[[Results], None] = lambda _: None) -> None:
        """Measure every unit that `results` does not hold yet; `save` is called after each."""
        held = {measurement.unit for measurement in results.measurements}
        missing = [unit for unit in units if unit.key not in held]
        if missing:
            self.warm_up(missing[0], (method for methods in self.passes for method in methods))
        for number, unit in enumerate(missing):
            results.measurements += self.measure(unit, rotation=number)
            results.runs = summarize(results.measurements, self.settings.seed)
            save(results)

    def measure(self, unit: Unit, rotation: int = 0) -> list[Measurement]:
        """All methods and repetitions of one unit, turn by turn, as far as they fit into the target's context.

        The turns before stand in the prompt with plain decoding's answers, the same for all methods.
        """
        whole: dict[tuple[str, int], Measurement] = {}
        while unit.prompts and (inputs := self.tokenize(unit)) is not None:
            made = self._take_turns(unit, inputs, rotation + unit.turn)
            plain = made[0][1].rows
            audit = Audit(self.target, inputs["input_ids"][:1], plain[0], **self.options(unit))
            for repeat, one in made:
                new = _measurement(unit, one, repeat)
                if unit.temperature == 0:
                    new.same_text = one.rows == plain
                    new.difference = _difference(one, audit, unit.turn) if len(plain) == 1 and repeat == 0 else None
                key = new.method, repeat
                whole[key] = whole[key].then(new) if key in whole else new
            unit = unit.after([self._text(row) for row in plain])
        return list(whole.values())

    def _take_turns(self, unit: Unit, inputs: dict[str, Tensor], rotation: int) -> list[tuple[int, Generation]]:
        """Repetition and generation of all methods, in their own order: the first is plain decoding's."""
        found: list[tuple[int, Generation]] = []
        for repeat, methods in enumerate(self.passes):
            methods = [method for method in methods if unit.batch_size == 1 or not method.single_row]
            made = [self.generate(method, unit, inputs) for method in _rotated(methods, rotation + repeat)]
            found += [(repeat, one) for one in sorted(made, key=lambda one: methods.index(one.method))]
        return found

    def warm_up(self, unit: Unit, methods: Iterable[Method]) -> None:
        """Each method once, on text of no importance: no first call of a kernel or of a drafter is measured."""
        inputs = self.tokenize(replace(unit, prompts=[Prompt((WARM_UP_TEXT,))] * len(unit.prompts)))
        if inputs is None:
            return
        for method in methods:
            if unit.batch_size == 1 or not method.single_row:
                options = self.options(unit) | {"max_new_tokens": min(16, self.settings.max_new_tokens)}
                decode(self.target, method, inputs, **options)

    def tokenize(self, unit: Unit) -> dict[str, Tensor] | None:
        """Ids and mask; None, with a warning, where they do not fit into the target's context."""
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

    def options(self, unit: Unit) -> dict[str, Any]:
        """Of `generate`."""
        options: dict[str, Any] = {"max_new_tokens": self.settings.max_new_tokens}
        options |= sampling_at(unit.temperature, self.settings.top_k)
        if self.tokenizer.pad_token_id is not None:
            options["pad_token_id"] = self.tokenizer.pad_token_id
        return options

    def generate(self, method: Method, unit: Unit, inputs: dict[str, Tensor]) -> Generation:
        """One call of a method. Every repetition has the same seed."""
        reset_peak_memory(self.device)
        made = decode(self.target, method, inputs, self.settings.seed + unit.index, **self.options(unit))
        made.peak_memory_bytes = peak_memory_bytes(self.device)
        return made

    def _text(self, row: list[int]) -> str:
        """What was said, without the tokens that end it."""
        ends = end_tokens(self.target)
        return self.tokenizer.decode([token for token in row if token not in ends], skip_special_tokens=True)


def _measurement(unit: Unit, made: Generation, repeat: int) -> Measurement:
    return Measurement(
        dataset=unit.dataset,
        prompt=unit.index,
        batch_size=unit.batch_size,
        temperature=unit.temperature,
        method=made.method.name,
        repeat=repeat,
        same_text=None,
        difference=None,
        peak_memory_bytes=made.peak_memory_bytes,
        stats=made.stats,
    )


def _difference(made: Generation, audit: Audit, turn: int) -> dict[str, Any] | None:
    """Where a single row's text leaves plain's."""
    found = audit.difference(made.rows[0])
    return asdict(found) | {"near_tie": found.near_tie, "turn": turn} if found else None


def _rotated(items: Sequence[T], by: int) -> list[T]:
    by %= len(items)
    return [*items[by:], *items[:by]]
