"""The seam to transformers: a wrapper around the public `GenerationMixin.generate`.

A call that names one of our drafters runs our engine through `custom_generate`, transformers' own hook; every other
call goes to the original untouched. No other room wraps `generate`.
"""

import copy
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig
from transformers.generation import StoppingCriteriaList, StopStringCriteria

from ..drafters.base import Drafter
from ..engine.call import Call, PlainDecodingNeeded
from ..engine.generation import decode
from ..engine.no_drafts import NoDrafts
from ..errors import SpeculationError, shown, warn
from ..hub import check_made_for
from ..hub.flag import drafter_from_flag
from ..hub.registry import drafter_types, reader_for
from ..schedule import AnyDrafter
from ..target.packing import look_at
from ..verify.rules import Rules
from .calls import calls
from .layers import beneath, is_there, put_around, take_away
from .plain import decoded_plainly
from .pricing import set_costs
from .settings import UPSTREAM_TYPES, by_name, own_draft, refuse, setting, speculation, understood

_active = False
"""whether calls are looked at; else our functions hand everything on"""
OWN_MODELS = {"cut_llama": "hf_specdec.drafters.draft_model.cut"}
"""`model_type` of a config.json → the module whose import registers it with transformers' auto classes"""

FLAG = ("speculation_type", "speculation")
MODELS = "transformers.modeling_utils"


def register() -> None:
    """Make `model.generate` understand drafters and `speculation_type`. Harmless when repeated; what another library
    has taken away is put back."""
    global _active
    _active = True
    for owner, name, wrap in _wrapped_functions():
        put_around(owner, name, wrap)


def unregister() -> None:
    """Put back what was there. Where another library has wrapped ours since, that stays, and ours hands calls on."""
    global _active
    _active = False
    for owner, name, _ in _wrapped_functions():
        take_away(owner, name)


def _with_options(original: Callable[..., None]) -> Callable[..., None]:
    """Keep `speculation` in a config made from a model's: transformers drops unknown fields of those on load. Each call
    makes a config: where our layer around `generate` is gone, that is noticed."""

    @functools.wraps(original)
    def __init__(self: GenerationConfig, **kwargs: Any) -> None:
        original(self, **kwargs)
        if not _active:
            return
        if not is_there(GenerationMixin, "generate"):
            register()
            warn(
                "another library had taken hf_specdec's layer around model.generate away; it is back. A call that is "
                "being made may be decoded plainly, which affects its speed only"
            )
        if kwargs.get("speculation") is not None:
            self.speculation = kwargs["speculation"]

    return __init__


def _knowing(original: Any) -> Any:
    """A model of ours is registered, and the way to load one with a flag is there, once they are needed: auto classes
    and the code of models take longer to import than all of this package."""

    @classmethod  # type: ignore[misc]
    @functools.wraps(original.__func__)
    def get_config_dict(cls: type[PreTrainedConfig], *args: Any, **kwargs: Any) -> Any:
        config, unused = original.__func__(cls, *args, **kwargs)
        if _active and (module := OWN_MODELS.get(str(config.get("model_type")))):
            importlib.import_module(module)
        if _active and not unused.keys().isdisjoint(FLAG):
            importlib.import_module(MODELS)
            register()
            if not kwargs.get("_from_auto"):  # a model's class is loading, and hands the flag to its generation config
                unused = {name: value for name, value in unused.items() if name not in FLAG}
        return config, unused

    return get_config_dict


def _flagged(original: Any) -> Any:
    """`from_pretrained(..., speculation_type=...)` puts the flag into the model's generation config: harnesses that
    load models themselves hand such settings on, and know nothing of generation configs."""

    @classmethod  # type: ignore[misc]
    @functools.wraps(original.__func__)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        flag = {name: kwargs.pop(name) for name in FLAG if _active and name in kwargs}
        loaded = original.__func__(cls, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if flag and not model.can_generate():
            raise SpeculationError(
                f"{' and '.join(flag)} cannot be set for {type(model).__name__}, which does not generate; leave "
                "it out, or load the model with AutoModelForCausalLM"
            )
        for name, value in flag.items():
            setattr(model.generation_config, name, value)
        return loaded

    return from_pretrained


def _told(original: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' continuous batching knows nothing of drafters: say so, rather than ignore the flag."""

    @functools.wraps(original)
    def init_continuous_batching(self: Any, generation_config: GenerationConfig | None = None, **kwargs: Any) -> Any:
        kind = speculation(self, {"generation_config": generation_config})[0] if _active else None
        if kind not in (None, "none", *UPSTREAM_TYPES):
            warn(
                f"transformers' continuous batching does not draft: speculation_type={kind!r} is left out, and "
                "requests are decoded plainly. The text is not affected; hf_specdec.BatchDecoder drafts for "
                "requests that come and go"
            )
        return original(self, generation_config, **kwargs)

    return init_continuous_batching


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    parameters = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = by_name(parameters[1:], args, kwargs)
        look_at(self)
        if not _active or getattr(named.get("custom_generate"), "func", None) is _decode:
            return original(self, *args, **kwargs)
        if isinstance(assistant := named.get("assistant_model"), type) and issubclass(assistant, Drafter):
            raise SpeculationError(
                f"assistant_model must be a drafter, got the class {assistant.__name__}; make one: "
                f"{assistant.__name__}(...)"
            )
        if isinstance(named.get("custom_generate"), str):  # a recipe from the Hub, ours among them, comes back here
            return original(self, *args, **kwargs)
        kind, options, rules = speculation(self, named)
        nobody_drafts = not isinstance(assistant, Drafter) and kind in (None, *UPSTREAM_TYPES)
        if nobody_drafts and not rules.by_engine and not named.get("speculation"):
            try:
                return original(self, *args, **kwargs)
            except ValueError:
                if assistant is not None and kind is None and _rows(self, named) > 1:
                    reader = reader_for(assistant)
                    _hint_at_batches("draft_model" if reader is None else reader.config_class.drafter_type)
                raise
        return _generate(original, self, named, kind, options, rules)

    return generate


@functools.cache  # once per process and type
def _hint_at_batches(kind: str) -> None:
    warn(
        "transformers' own assisted generation takes one row at a time; for a batch use hf_specdec: "
        f'generate(..., assistant_model=draft, speculation_type="{kind}")'
    )


def _rows(model: Any, named: dict[str, Any]) -> int:
    """How many rows a call decodes."""
    given = [named[name] for name in ("inputs", "input_ids") if named.get(name) is not None]
    return len(given[0]) * (setting(model, named, "num_return_sequences") or 1) if given else 1


def _generate(
    original: Callable[..., Any], model: Any, named: dict[str, Any], kind: str | None, options: Any, rules: Rules
) -> Any:
    """One call that asks for speculation, or switches it off."""
    flag, said = named.get("speculation_type"), named.get("speculation")
    given = Rules.split(said)[1]
    named = {name: value for name, value in named.items() if name not in FLAG}
    assistant = named.pop("assistant_model", None)
    drafter: AnyDrafter
    nobody = kind == "none" or (kind in (None, *UPSTREAM_TYPES) and not isinstance(assistant, Drafter))
    if nobody and not rules.by_engine:
        if kind != "none" and (given or set(said or ()) - {"sampling", "forwards"}):
            raise SpeculationError(
                f"speculation={said} has no effect with speculation_type={kind!r}; name another "
                "speculation_type, or pass assistant_model=<a drafter>"
            )
        return original(model, **named, assistant_model=None if isinstance(assistant, Drafter) else assistant)
    if nobody:
        drafter = _nobody(kind, assistant, rules)
    elif isinstance(assistant, Drafter):
        if given or flag not in (None, assistant.config.drafter_type):
            what = f"speculation={shown(given)}" if given else f"speculation_type={flag!r}"
            raise SpeculationError(
                f"{what} cannot be combined with assistant_model=<a {type(assistant).__name__}>: its type and options "
                f"are set when it is created. A call may set {', '.join(Rules.names())}, in speculation={{...}}"
            )
        drafter = assistant
    else:
        if assistant is None:
            assistant, named = own_draft(model, named)
        drafter = cast(Drafter, drafter_from_flag(model, str(kind), options, assistant))
    chosen = drafter.for_target(model) if isinstance(drafter, Drafter) else drafter
    try:
        with understood(chosen, named):
            return _drafted(original, model, named, chosen, rules)
    finally:
        drafter.last_stats = chosen.last_stats


def _drafted(original: Callable[..., Any], model: Any, named: dict[str, Any], drafter: AnyDrafter, rules: Rules) -> Any:
    """A call for which somebody drafts."""
    refuse(model, named)
    if isinstance(drafter, Drafter):
        check_made_for(drafter.config.target, model)
        drafter.check_target(model)
    streamer = named.pop("streamer", None)
    plain = dict(named)
    _take_over_stop_strings(model, named)
    decoding = functools.partial(_decode, calls(streamer, named, rules), drafter)
    try:
        return original(model, **named, custom_generate=decoding)
    except PlainDecodingNeeded as reason:
        if binding := rules.binding:
            raise SpeculationError(
                f"{binding} needs speculation, which cannot serve this call: {reason}; or leave {binding} out"
            ) from None
        call = reason.call
        return decoded_plainly(
            lambda: original(model, **plain, streamer=streamer),
            drafter,
            str(reason),
            call.input_ids.shape[1],
            call.stopping.eos,
        )


def _nobody(kind: str | None, assistant: Any, rules: Rules) -> NoDrafts:
    """For coupled sampling, or forwards of the engine's own, without drafts.

    Raises:
        SpeculationError: transformers' own speculation would draft, which knows nothing of them.
    """
    if kind in UPSTREAM_TYPES or (assistant is not None and kind is None):
        option = rules.binding or f"forwards={rules.forwards!r}"
        raise SpeculationError(
            f"{option} does not work with transformers' own assisted generation; name a drafter of "
            "hf_specdec, for example speculation_type='draft_model'"
        )
    return NoDrafts()


def _take_over_stop_strings(model: Any, named: dict[str, Any]) -> None:
    """transformers builds the criterion for `stop_strings` on its own routes only."""
    strings = setting(model, named, "stop_strings")
    tokenizer = named.pop("tokenizer", None)
    if strings is None:
        return
    if tokenizer is None:
        raise SpeculationError("stop_strings needs the target's tokenizer: generate(..., tokenizer=tokenizer)")
    config = named.get("generation_config")
    if getattr(getattr(model, "generation_config", None), "stop_strings", None) is not None or config is None:
        named["stop_strings"] = None  # said outright: transformers fills in what is only left out
    else:  # in a copy: beside a config, transformers warns of every argument
        named["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
        named.pop("stop_strings", None)
    criteria = named.get("stopping_criteria") or []
    named["stopping_criteria"] = StoppingCriteriaList(
        [*criteria, StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)]
    )


def prepared(model: Any, streamer: Any, **named: Any) -> Call:
    """What `model.generate` would decode for these arguments, without decoding it.

    Raises:
        SpeculationError, ValueError: what speculation, or transformers, refuses.
    """
    *_, rules = speculation(model, named)
    named = {name: value for name, value in named.items() if name not in FLAG}
    refuse(model, named)
    if rules.forwards != "auto":
        raise SpeculationError(
            f"forwards={rules.forwards!r} is not taken per request, as all rows share them; set it when BatchDecoder "
            "is created: BatchDecoder(model, drafter, forwards=...)"
        )
    if (beams := setting(model, named, "num_beams") or 1) > 1:
        raise SpeculationError(f"num_beams={beams} is not supported by BatchDecoder; use model.generate")
    _take_over_stop_strings(model, named)
    made: list[Call] = []
    as_call = calls(streamer, named, rules)

    def custom_generate(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(as_call(*args, **kwargs))
        return made[0].input_ids

    beneath(GenerationMixin, "generate")(model, **named, custom_generate=custom_generate)
    return made[0]


def drafter_for(model: Any, drafter: Any, generation_config: GenerationConfig | None) -> Drafter | None:
    """A drafter, or that over a draft model, or the one of this type, or the one that a flag asks for; None where
    nobody asks for any.

    Raises:
        SpeculationError: it is for another target.
    """
    kind, options, _ = speculation(model, {"generation_config": generation_config})
    if isinstance(drafter, str) and drafter in drafter_types():
        kind, options, drafter = drafter, options if kind == drafter else None, None
    if not isinstance(drafter, Drafter):
        if isinstance(drafter, (str, Path)):
            raise SpeculationError(
                f"drafter must be a drafter, a draft model or a type such as 'auto', got {str(drafter)!r}; load one "
                "with Drafter.from_pretrained, or set speculation_type in generation_config"
            )
        kind = "draft_model" if drafter is not None and kind is None else kind
        if kind in (None, "none", *UPSTREAM_TYPES):
            return None
        drafter = cast(Drafter, drafter_from_flag(model, str(kind), options, drafter))
    drafter = drafter.for_target(model)
    check_made_for(drafter.config.target, model)
    drafter.check_target(model)
    return drafter


def _decode(as_call: Callable[..., Call], drafter: AnyDrafter, *args: Any, **kwargs: Any) -> Any:
    """What is passed as `custom_generate`."""
    return decode(as_call(*args, **kwargs), drafter, set_costs)


def _wrapped_functions() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Public functions of transformers, and what is put around each; those of models once these are imported."""
    functions = [
        (GenerationMixin, "generate", _wrapped),
        (GenerationMixin, "init_continuous_batching", _told),
        (GenerationConfig, "__init__", _with_options),
        (PreTrainedConfig, "get_config_dict", _knowing),
    ]
    models = sys.modules.get(MODELS)
    return functions if models is None else [*functions, (models.PreTrainedModel, "from_pretrained", _flagged)]
