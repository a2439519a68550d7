"""A call with beams."""

from collections.abc import Callable
from typing import Any, cast

import torch

from ..beams import search_beams, why_not
from ..clock import now
from ..decoding.call import plain_stats
from ..decoding.guard import GuardedDrafter
from ..drafters.draft_model.ahead import reading_ahead
from ..drafters.draft_model.translating import translation
from ..errors import SpeculationError, warn
from ..judge.rules import Rules
from ..schedule import AnyDrafter
from ..target.inputs import CACHE
from .settings import setting


def with_beams(
    original: Callable[..., Any], model: Any, named: dict[str, Any], drafter: AnyDrafter, beams: int, rules: Rules
) -> Any:
    """Beam search is transformers' own, over a target that looks ahead."""
    draft = getattr(drafter, "draft_model", None)
    own = [
        f"{name}={getattr(rules, name)!r}" for name in Rules.names() if getattr(rules, name) != getattr(Rules(), name)
    ]
    reason = f"{', '.join(own)} is for drafts that are judged one by one" if own else _not_served(model, named)
    if draft is not None and translation(draft) is not None:
        reason = reason or "beams are drafted in the target's own tokens, and the draft model is translated"
    reason = reason or why_not(model, draft)
    if reason:
        raise SpeculationError(f"num_beams={beams}: {reason}; leave the drafter out, or use num_beams=1")
    ends = setting(model, named, "eos_token_id")
    ends = ends.flatten().tolist() if isinstance(ends, torch.Tensor) else ends
    ends = {ends} - {None} if not isinstance(ends, (list, tuple)) else set(ends)
    if named.get("inputs_embeds") is not None:
        return _plainly(original, model, named, drafter, ends)
    window = getattr(getattr(drafter, "config", None), "num_draft_tokens", "auto")
    padding, most = setting(model, named, "pad_token_id"), _most(model, named)
    output, stats = search_beams(original, model, cast(Any, draft), window, beams, ends, padding, most, named)
    if reading_ahead(cast(Any, draft)) is not None:
        stats.notes.append("the draft model did not read ahead: beams are drafted several texts at a time")
    GuardedDrafter(drafter).report(stats)
    if not isinstance(output, torch.Tensor):
        output.speculation = stats
    return output


def _plainly(
    original: Callable[..., Any], model: Any, named: dict[str, Any], drafter: AnyDrafter, ends: set[int]
) -> Any:
    why = "beams are drafted from token ids, and the prompt is inputs_embeds"
    warn(f"plain decoding: {why}")
    began, ids = now(), named.get("input_ids")
    output = original(model, **named)
    told = plain_stats(output, 0 if ids is None else ids.shape[1], ends, now() - began, why)
    GuardedDrafter(drafter).report(told)
    return output


def _not_served(model: Any, named: dict[str, Any]) -> str:
    """What of a call only a model can answer that is asked step by step; empty where it is nothing."""

    def asked(name: str) -> Any:
        return setting(model, named, name)

    if asked("output_hidden_states") or asked("output_attentions"):
        return "hidden states and attentions are those of single steps"
    if named.get(CACHE) is not None or asked("cache_implementation") not in (None, "dynamic", "static"):
        return "a tree of texts has a cache of its own"
    if named.get("position_ids") is not None or asked("prefill_chunk_size") is not None:
        return "position_ids and prefill_chunk_size do not go with a tree of texts"
    if asked("guidance_scale") not in (None, 1, 1.0):
        return "guidance_scale asks the model beside the beams"
    return ""


def _most(model: Any, named: dict[str, Any]) -> int:
    """New tokens that a text may have."""
    if (most := setting(model, named, "max_new_tokens")) is not None:
        return int(most)
    ids = named.get("inputs") if named.get("inputs") is not None else named.get("input_ids")
    return int(setting(model, named, "max_length") or 20) - (0 if ids is None else ids.shape[1])
