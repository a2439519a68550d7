"""What a `generate` call was asked for, and which of it speculation does not serve."""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from ..drafters import HybridDrafter
from ..drafters.draft_model import ModelDrafter, Translated, early_exit
from ..errors import SpeculationError
from ..hub.registry import drafter_types
from ..schedule import AnyDrafter
from ..target.inputs import CACHE, cached_columns
from ..verify.rules import Rules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UPSTREAM_TYPES = ("dflash",)
"""values of `speculation_type` that are transformers' own"""
OTHER_MODES: dict[str, Any] = {
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "force_words_ids": None,
    "constraints": None,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "token_healing": False,
}
"""refused, as another way of decoding: each with the value that asks for nothing"""

OTHER_SPECULATION: dict[str, Any] = {
    "assistant_confidence_threshold": 0.4,
    "assistant_early_exit": None,
    "assistant_ensemble_weight": None,
    "assistant_lookbehind": 10,
    "max_matching_ngram_size": None,
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "prompt_lookup_num_tokens": None,
    "target_lookbehind": 10,
    "use_mtp": False,
}
"""refused, as transformers' own speculation: each with the value that transformers fills in by itself (its pipelines
do), which asks for nothing"""


def by_name(parameters: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a call was given, the cache by the name that transformers has for it: both are taken, as they are there. A
    parameter of `generate` that is None, as it is by default, is none that was given."""
    named = dict(zip(parameters, args, strict=False)) | kwargs
    named = {name: value for name, value in named.items() if value is not None or name not in parameters}
    if "past_key_values" in named:
        named.setdefault(CACHE, named.pop("past_key_values"))
    return named


def speculation(model: Any, named: dict[str, Any]) -> tuple[str | None, Any, Rules]:
    """The two fields: of the call, else of the config passed, else of the model's own. A drafter's options go with its
    type; rules of verification stand until they are overridden.

    Returns:
        The `speculation_type`; a drafter's options, a dict or what was given in place of one; the rules.

    Raises:
        SpeculationError: a rule with a value that is none of those allowed.
    """
    kind = named.get("speculation_type")
    given, options = Rules.split(named.get("speculation"))
    for config in (named.get("generation_config"), getattr(model, "generation_config", None)):
        theirs, rest = Rules.split(getattr(config, "speculation", None))
        given = theirs | given
        if kind is None:
            kind = getattr(config, "speculation_type", None)
            options = options or (rest if kind else None)
    rules = Rules(**given)
    if rules.coupled and not setting(model, named, "do_sample"):  # nothing is drawn
        rules = dataclasses.replace(rules, sampling="independent")
    return kind, options, rules


def setting(model: Any, named: dict[str, Any], name: str) -> Any:
    """A `generate` setting: the call's, else the passed config's, else the model's own."""
    if named.get(name) is not None:
        return named[name]
    config = named.get("generation_config")
    if config is not None and getattr(config, name, None) is not None:
        return getattr(config, name)
    return getattr(getattr(model, "generation_config", None), name, None)


def own_draft(model: Any, named: dict[str, Any]) -> tuple["PreTrainedModel | None", dict[str, Any]]:
    """The draft that `assistant_early_exit` asks for, if it does, the target's own first layers; and the call's
    settings without it.

    Raises:
        SpeculationError: as `early_exit`.
    """
    layers = setting(None, named, "assistant_early_exit")
    if layers is None:
        return None, named
    named = {name: value for name, value in named.items() if name != "assistant_early_exit"}
    if getattr(named.get("generation_config"), "assistant_early_exit", None) is not None:
        named["generation_config"] = config = copy.deepcopy(named["generation_config"])
        config.assistant_early_exit = None
    return early_exit(model, layers), named


def refuse(model: Any, named: dict[str, Any]) -> None:
    """Settings that speculation does not serve: one clear error, before any forward."""
    for name, nothing in OTHER_MODES.items():
        if (value := setting(model, named, name)) not in (None, nothing):
            raise SpeculationError(
                f"{name}={str(value)[:80]} asks for another way of decoding, which cannot be combined with "
                'speculation; leave it out, or pass speculation_type="none"'
            )
    if named.get("synced_gpus") or _is_sharded(model):
        raise SpeculationError(
            "synced_gpus=True (implied by FSDP and ZeRO-3 over several processes) is not supported with speculation; "
            "leave the drafter out"
        )
    for name, nothing in OTHER_SPECULATION.items():  # what the model's own config says of them is not of this call
        if (value := setting(None, named, name)) not in (None, nothing):
            raise SpeculationError(
                f"{name}={value} is an option of transformers' own speculation and has no effect with a "
                f"drafter; leave it out. Drafters are named by speculation_type ({', '.join(drafter_types())}), "
                f"their options by speculation={{...}}, for example num_draft_tokens"
            )
    for name in ("use_model_defaults", "custom_generate"):
        if named.get(name) is not None:
            raise SpeculationError(f"{name} cannot be combined with speculation; leave it out")
    ids = named.get("inputs") if named.get("inputs") is not None else named.get("input_ids")
    alone = named.get("inputs_embeds") is None and not model.config.is_encoder_decoder
    if ids is not None and alone and (ids.ndim != 2 or ids.shape[1] == 0):
        raise SpeculationError(
            f"input_ids must have the shape [batch, tokens], with 1 token or more, got shape {tuple(ids.shape)}"
        )
    held, mask = 0 if named.get(CACHE) is None else cached_columns(named[CACHE]), named.get("attention_mask")
    if ids is not None and alone and ids.shape[1] < held and (mask is None or mask.shape[1] < held + ids.shape[1]):
        raise SpeculationError(
            f"input_ids has {ids.shape[1]} tokens and {CACHE} holds {held}; pass the whole text, or what is new with "
            f"an attention_mask of all {held + ids.shape[1]} columns"
        )


def owner_of_draft(drafter: AnyDrafter) -> ModelDrafter | None:
    """The drafter whose `draft` is drafted with: itself, or the one within a hybrid; None without a draft model."""
    owner = drafter.model_drafter if isinstance(drafter, HybridDrafter) else drafter
    return owner if isinstance(owner, ModelDrafter) else None


@contextmanager
def understood(drafter: AnyDrafter, named: dict[str, Any]) -> Iterator[None]:
    """Where a call names the draft's tokenizer, take it out of the call: the draft is translated within the block.

    Raises:
        SpeculationError: there is no draft model, or the target's tokenizer is not given.
    """
    if (theirs := named.pop("assistant_tokenizer", None)) is None:
        yield
        return
    tokenizer, owner = named.get("tokenizer"), owner_of_draft(drafter)
    if tokenizer is None or owner is None:
        what = "the target's tokenizer (tokenizer=...)" if tokenizer is None else "a draft model"
        raise SpeculationError(f"assistant_tokenizer needs {what}; pass both, or leave it out")
    before = owner.draft
    owner.draft = Translated(owner.draft_model, tokenizer, theirs)
    try:
        yield
    finally:
        owner.draft = before


def _is_sharded(model: Any) -> bool:
    """Whether every forward is a collective one, so that all processes must make the same number of them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return torch.distributed.get_world_size() > 1 and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))
