"""A call with beams."""

from collections.abc import Callable
from typing import Any, cast

import torch

from ..drafters.beams import Search, search_beams, why_not
from ..drafters.draft_model import Translated
from ..engine.guard import GuardedDrafter
from ..errors import SpeculationError
from ..schedule import AnyDrafter
from ..target.inputs import CACHE
from ..verify.rules import Rules
from .plain import decoded_plainly
from .settings import owner_of_draft, setting


def with_beams(
    original: Callable[..., Any], model: Any, named: dict[str, Any], drafter: AnyDrafter, beams: int, rules: Rules
) -> Any:
    """Beam search is transformers' own, over a target that looks ahead."""
    draft = getattr(drafter, "draft_model", None)
    own = [
        f"{name}={getattr(rules, name)!r}" for name in Rules.names() if getattr(rules, name) != getattr(Rules(), name)
    ]
    reason = f"{', '.join(own)} does not work with beam search" if own else _not_served(model, named)
    if isinstance(getattr(owner_of_draft(drafter), "draft", None), Translated):
        reason = reason or "beam search needs a draft model with the target's tokenizer, and this one is translated"
    reason = reason or why_not(model, draft)
    if reason and not drafter.because:
        raise SpeculationError(f"num_beams={beams}: {reason}; leave the drafter out, or use num_beams=1")
    ends = setting(model, named, "eos_token_id")
    ends = ends.flatten().tolist() if isinstance(ends, torch.Tensor) else ends
    ends = {ends} - {None} if not isinstance(ends, (list, tuple)) else set(ends)
    if named.get("inputs_embeds") is not None:
        reason = "beam search with a drafter needs token ids, and the prompt is inputs_embeds"
    if reason:
        ids = named.get("input_ids") if named.get("input_ids") is not None else named.get("inputs")
        columns = 0 if ids is None else ids.shape[1]
        columns = 1 if model.config.is_encoder_decoder else columns  # a decoder begins with a token of its own
        return decoded_plainly(lambda: original(model, **named), drafter, reason, columns, ends)
    window = getattr(getattr(drafter, "config", None), "num_draft_tokens", "auto")
    search = Search(beams, window, ends, setting(model, named, "pad_token_id"), _most(model, named))
    output, stats = search_beams(original, model, cast(Any, draft), search, named)
    GuardedDrafter(drafter).report(stats)
    if not isinstance(output, torch.Tensor):
        output.speculation = stats
    return output


def _not_served(model: Any, named: dict[str, Any]) -> str:
    """What of a call only a model can answer that is asked step by step; empty where it is nothing."""

    def asked(name: str) -> Any:
        return setting(model, named, name)

    if asked("output_hidden_states") or asked("output_attentions"):
        return "output_hidden_states and output_attentions are not supported with a drafter"
    if named.get(CACHE) is not None or asked("cache_implementation") not in (None, "dynamic", "static"):
        return "a cache of your own is not supported with a drafter"
    if named.get("position_ids") is not None or asked("prefill_chunk_size") is not None:
        return "position_ids and prefill_chunk_size are not supported with a drafter"
    if asked("guidance_scale") not in (None, 1, 1.0):
        return "guidance_scale is not supported with a drafter"
    return ""


def _most(model: Any, named: dict[str, Any]) -> int:
    """New tokens that a text may have."""
    if (most := setting(model, named, "max_new_tokens")) is not None:
        return int(most)
    ids = named.get("inputs") if named.get("inputs") is not None else named.get("input_ids")
    return int(setting(model, named, "max_length") or 20) - (0 if ids is None else ids.shape[1])
