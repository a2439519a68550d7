"""Parts of plain decoding that a class or a library has changed: where the engine does not call them, a call is decoded
plainly. And other libraries that put themselves around `generate`."""

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import models
import pytest
import torch
from compare import PROMPTS, Sides
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

import hf_specdec
from hf_specdec import BatchDecoder, PromptLookupDrafter, SpeculationError, SpeculationWarning
from hf_specdec.target.inputs import CACHE
from hf_specdec.target.stock import ASKED, OF_COMPILING, STEPS, changed_cache, why_plain

LENGTHS = pytest.mark.parametrize("lengths", [[9], PROMPTS], ids=["one row", "four rows"])
THERE = [name for name in STEPS if hasattr(GenerationMixin, name)]
"""steps of this version of transformers"""


# ------------------------------------------------------------------ steps


class Steps(LlamaForCausalLM):
    """The step comes back with the outputs, and goes into the next forward."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        generation_steps: int | None = None,
        **kwargs: Any,
    ) -> Any:
        outputs = super().forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs
        )
        step = generation_steps or 0
        outputs.logits = outputs.logits.roll(step % 5, -1)
        outputs["generation_steps"] = step + 1
        return outputs

    def prepare_inputs_for_generation(self, input_ids: Any, generation_steps: Any = None, **kwargs: Any) -> Any:
        prepared = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return prepared | {"generation_steps": generation_steps}

    def _update_model_kwargs_for_generation(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        updated = super()._update_model_kwargs_for_generation(outputs, *args, **kwargs)
        return updated | {"generation_steps": outputs["generation_steps"]}


@LENGTHS
def test_what_a_class_carries_from_step_to_step_is_carried(lengths: list[int]) -> None:
    model = Steps(models.llama().config).eval()
    model.load_state_dict(models.llama().state_dict())
    sides = Sides(model, lengths)
    with pytest.warns(SpeculationWarning, match="Steps has a _update_model_kwargs_for_generation of its own"):
        assert torch.equal(sides.ours(), sides.plain)
    with pytest.raises(SpeculationError, match="_update_model_kwargs_for_generation of its own"):
        BatchDecoder(model, PromptLookupDrafter())


def of_the_class(model: Any, name: str, changed: Callable[..., Any], _: pytest.MonkeyPatch) -> None:
    model.__class__ = type("Own", (type(model),), {name: changed})


def of_the_object(model: Any, name: str, changed: Callable[..., Any], _: pytest.MonkeyPatch) -> None:
    setattr(model, name, MethodType(changed, model))


def of_the_process(_: Any, name: str, changed: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GenerationMixin, name, changed)


@pytest.mark.parametrize("where", [of_the_class, of_the_object, of_the_process])
@pytest.mark.parametrize("name", THERE)
def test_a_step_of_ones_own_is_taken(name: str, where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = models.llama(), []
    stock = getattr(GenerationMixin, name)

    @functools.wraps(stock)  # as wrappers that pretend to be what they wrap
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return stock(self, *args, **kwargs)

    assert not why_plain(model)
    where(model, name, changed, monkeypatch)
    sides = Sides(model, [9])
    needed = len(calls)
    calls.clear()
    with pytest.warns(SpeculationWarning, match=f"has a {name} of its own"):
        assert torch.equal(sides.ours(), sides.plain)
    assert len(calls) == needed


def test_the_list_of_steps_is_that_of_this_version() -> None:
    """What plain decoding calls on the model is known: a new step would be left out silently."""
    asked: set[str] = set()
    for step in (GenerationMixin._sample, getattr(GenerationMixin, "_prefill", None)):
        tree = ast.parse(textwrap.dedent(inspect.getsource(step))) if step else ast.parse("")
        own = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        asked |= {node.attr for node in own if isinstance(node.value, ast.Name) and node.value.id == "self"}
    assert asked - {*STEPS, *ASKED, *OF_COMPILING} <= {"config", "__call__", "device"}


def test_compiled_parts_are_decoded_plainly() -> None:
    """They would be compiled for each width, and give up, or raise, after some."""
    sides = Sides(models.llama(), [9])
    sides.model.model.layers[1].mlp.forward = torch.compile(sides.model.model.layers[1].mlp.forward, backend="eager")
    with pytest.warns(SpeculationWarning, match="has compiled modules"):
        assert torch.equal(sides.ours(), sides.plain)


# ------------------------------------------------------------------ caches


class Rounding(DynamicCache):
    """Keys in few bits, those of a forward on one grid."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **more: Any) -> Any:
        step = key_states.abs().max() / 7
        return super().update((key_states / step).round() * step, value_states, layer_idx, *rest, **more)


class Evicting(DynamicLayer):
    """Of all keys the last twelve, after each forward."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        found = super().update(*args, **kwargs)
        self.keys, self.values = self.keys[:, :, -12:], self.values[:, :, -12:]
        return found


def with_layers_of_its_own(config: Any) -> Any:
    cache = DynamicCache(config=config)
    cache.layers = [Evicting() for _ in cache.layers]
    return cache


def with_a_method_of_its_own(config: Any) -> Any:
    cache = DynamicCache(config=config)
    cache.layers[0].update = MethodType(Evicting.update, cache.layers[0])  # type: ignore[method-assign]
    return cache


@pytest.mark.parametrize("make", [lambda c: Rounding(config=c), with_layers_of_its_own, with_a_method_of_its_own])
def test_a_cache_that_does_more_than_hold_is_used_plainly(make: Callable[[Any], Any]) -> None:
    model = models.llama()
    assert not changed_cache(DynamicCache(config=model.config)) and changed_cache(make(model.config))
    if make is with_a_method_of_its_own:  # whose `super()` is of another class
        return
    options = {**models.prompts([20]), "max_new_tokens": 12, "do_sample": False}
    plain = model.generate(**options, **{CACHE: make(model.config)})
    with pytest.warns(SpeculationWarning, match="with methods that are not transformers' own"):
        drafted = model.generate(**options, **{CACHE: make(model.config)}, assistant_model=PromptLookupDrafter())
    assert torch.equal(drafted, plain)


def test_a_cache_class_that_was_changed_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = DynamicLayer.update
    monkeypatch.setattr(DynamicLayer, "update", lambda self, *args, **kwargs: stock(self, *args, **kwargs))
    sides = Sides(models.llama(), [9])
    with pytest.warns(SpeculationWarning, match="DynamicLayer with methods that are not"):
        assert torch.equal(sides.ours(), sides.plain)


@pytest.mark.parametrize("given", [1, 9, 19])
def test_ids_shorter_than_the_cache_need_a_mask(given: int) -> None:
    """Plain decoding fails deep inside; with a mask of all columns they are what is new."""
    model, ids = models.llama(), models.prompts([20])["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}

    def text(**more: Any) -> Tensor:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, **{CACHE: cache})
        return model.generate(ids[:, :given], **options, **{CACHE: cache}, **more)

    with pytest.raises(SpeculationError, match=f"input_ids has {given} tokens and {CACHE} holds 20; pass the whole"):
        text(assistant_model=PromptLookupDrafter())
    mask = torch.ones(1, 20 + given, dtype=torch.long)
    assert torch.equal(text(attention_mask=mask, assistant_model=PromptLookupDrafter()), text(attention_mask=mask))


# ------------------------------------------------------------------ around generate


@pytest.fixture
def sides() -> Iterator[Sides]:
    """Whatever a test puts around `generate` is gone behind it."""
    hf_specdec.unregister()
    stock = GenerationMixin.generate
    hf_specdec.register()
    yield Sides(models.llama(), [9])
    hf_specdec.unregister()
    GenerationMixin.generate = stock
    hf_specdec.register()


def traced(calls: list[str], wraps: bool) -> Callable[..., Any]:
    """Put a tracer around what is there, and give what was there."""
    there = GenerationMixin.generate

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("traced")
        return there(self, *args, **kwargs)

    GenerationMixin.generate = functools.wraps(there)(generate) if wraps else generate
    return there


@pytest.mark.parametrize("wraps", [True, False])
def test_a_tracer_around_ours_stays_when_we_leave(sides: Sides, wraps: bool) -> None:
    calls: list[str] = []
    traced(calls, wraps)
    tracer = GenerationMixin.generate
    for _ in range(2):
        assert torch.equal(sides.ours(), sides.plain) and sides.stats.drafted_tokens and calls == ["traced"]
        calls.clear()
        hf_specdec.unregister()
        assert GenerationMixin.generate is tracer
        assert torch.equal(sides.run(), sides.plain) and calls == ["traced"]
        with pytest.raises(SpeculationError, match=r"layer around it is not there.*call hf_specdec\.register\(\)"):
            sides.ours()
        hf_specdec.register()
        assert GenerationMixin.generate is tracer, "ours is within it"
        calls.clear()


@pytest.mark.parametrize("wraps", [True, False])
def test_a_tracer_below_ours_is_called(sides: Sides, wraps: bool) -> None:
    calls: list[str] = []
    hf_specdec.unregister()
    traced(calls, wraps)
    hf_specdec.register()
    assert torch.equal(sides.ours(), sides.plain) and calls == ["traced"]
    with BatchDecoder(sides.model, sides.drafter) as decoder:
        decoder.submit(sides.prompts["input_ids"], **sides.settings).result(60)
    assert calls == ["traced"] * 2
    hf_specdec.unregister()
    sides.run()
    assert calls == ["traced"] * 3


def test_a_library_that_takes_our_layer_away_does_so_once(sides: Sides) -> None:
    """It restores what it had found before us."""
    for how in ("a drafter", "a flag", "registering"):
        hf_specdec.unregister()
        before = traced([], False)
        hf_specdec.register()
        GenerationMixin.generate = before
        if how == "registering":
            hf_specdec.register()
        elif how == "a drafter":
            with pytest.warns(SpeculationWarning, match="taken hf_specdec's layer"), pytest.raises(SpeculationError):
                sides.ours()
        else:
            with pytest.warns(SpeculationWarning, match="taken hf_specdec's layer"):
                GenerationConfig(speculation_type="prompt_lookup")
        assert torch.equal(sides.ours(), sides.plain) and sides.stats.drafted_tokens


def test_another_copy_of_the_package_takes_the_place_of_the_first(sides: Sides) -> None:
    """As in a notebook that imports it anew."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "hf_specdec"}
    for name in kept:
        del sys.modules[name]
    try:
        import hf_specdec as again

        drafter = again.PromptLookupDrafter()
        assert torch.equal(sides.run(assistant_model=drafter), sides.plain) and drafter.last_stats.drafted_tokens
        assert torch.equal(sides.run(speculation_type="prompt_lookup"), sides.plain)
        again.unregister()
        assert GenerationMixin.generate.__module__.startswith("transformers")
    finally:
        sys.modules.update(kept)


def test_every_function_of_ours_hands_calls_on_once_we_are_gone(sides: Sides) -> None:
    """A tracer around each keeps ours in place."""
    ours = GenerationConfig.__init__

    def traced_init(self: Any, **kwargs: Any) -> None:
        ours(self, **kwargs)

    GenerationConfig.__init__ = traced_init  # type: ignore[method-assign]
    try:
        hf_specdec.unregister()
        config = GenerationConfig(speculation={"num_draft_tokens": 3}, _from_model_config=True)
        assert sides.run(generation_config=config).shape[0] == 1
    finally:
        GenerationConfig.__init__ = ours  # type: ignore[method-assign]
        hf_specdec.register()
