"""A call with beams."""

from collections.abc import Callable
from typing import Any, cast

import torch

from ..beams import search_beams, why_not
from ..decoding.guard import GuardedDrafter
from ..errors import SpeculationError
from ..judge.rules import Rules
from ..schedule import AnyDrafter
from .settings import setting


def with_beams(
    original: Callable[..., Any], model: Any, named: dict[str, Any], drafter: AnyDrafter, beams: int, rules: Rules
) -> Any:
    """Beam search is transformers' own, over a target that looks ahead."""
    draft = getattr(drafter, "draft_model", None)
    states = [setting(model, named, name) for name in ("output_hidden_states", "output_attentions")]
    reason = why_not(model, draft, any(states), named.get("past_key_values") is not None)
    if not reason and rules != Rules():
        reason = f"{rules} are of drafts that are judged one by one"
    if reason:
        raise SpeculationError(f"num_beams={beams}: {reason}, or use num_beams=1")
    ends = setting(model, named, "eos_token_id")
    ends = ends.flatten().tolist() if isinstance(ends, torch.Tensor) else ends
    ends = {ends} - {None} if not isinstance(ends, (list, tuple)) else set(ends)
    window = getattr(getattr(drafter, "config", None), "num_draft_tokens", "auto")
    output, stats = search_beams(original, model, cast(Any, draft), window, beams, ends, named)
    GuardedDrafter(drafter).report(stats)
    if not isinstance(output, torch.Tensor):
        output.speculation = stats
    return output
