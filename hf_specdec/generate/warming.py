"""`warm_up`: what calls replay is recorded before the first of them."""

from typing import Any

from torch import Tensor
from tqdm import tqdm
from transformers.generation import StoppingCriteriaList

from ..drafters.base import Drafter
from ..drafters.draft_model import Translated
from ..errors import SpeculationError
from ..target.buffers import WIDTHS
from ..target.devices import input_device
from ..target.recorded import at_once, recorded_since, recordings
from .hidden_calls import EveryWidth, Until
from .settings import owner_of_draft

NOTHING = "nothing was recorded: only a GPU records forwards, in calls whose forwards are captured"
EACH_WIDTH = 1 + 2 * len(WIDTHS)
"""tokens, of which the prompt's forward gives one, in which each width comes up as a chain and as a tree"""
OWN_TOKENS = 32
"""that the drafter itself drafts for: the shapes of its own forwards"""


def warm_up(model: Any, drafter: Drafter | None = None, **call: Any) -> str:
    """Record the forwards that `model.generate(**call, assistant_model=drafter)` will replay on a GPU, all at once.
    Without a warm-up each shape is recorded when a call meets it for the second time.

    Recordings serve all calls of as many rows, up to the next power of two, and of as many columns.

    Args:
        model: the target.
        drafter: whose own forwards are recorded, too; None for the target's alone.
        call: arguments of `generate`, with `input_ids` and the `max_new_tokens` (or `max_length`) of later calls.

    Returns:
        What was recorded, and in how many seconds; or why nothing was.

    Raises:
        SpeculationError: there is no prompt.
    """
    if not isinstance(call.get("input_ids", call.get("inputs")), Tensor):
        raise SpeculationError(
            "warm_up needs an example of a call: warm_up(model, drafter, **inputs, max_new_tokens=512)"
        )
    drafter = None if drafter is None else drafter.for_target(model)
    criteria = call.pop("stopping_criteria", None) or []
    before, every = len(recordings), EveryWidth(drafter)

    def run(target: Any, one: Drafter, tokens: int, **instead: Any) -> None:
        ends = StoppingCriteriaList([*criteria, Until(lambda said: said >= tokens)])
        target.generate(**call | instead, assistant_model=one, stopping_criteria=ends)

    with tqdm(desc="recording forwards", unit=" shapes", leave=False) as bar, at_once(bar.update):
        run(model, every, EACH_WIDTH)
        if drafter is not None and (draft := _captured_draft(drafter)) is not None:
            # Drawn: what is likeliest would be judged in the same recordings, and a draft judges nothing.
            run(draft, EveryWidth(), EACH_WIDTH, **_readable(draft, call) | {"do_sample": True})
        if drafter is not None:
            run(model, drafter, OWN_TOKENS)
    assert every.last_stats is not None
    why = next((note for note in every.last_stats.notes if "not captured" in note), "")
    return recorded_since(before) or why or NOTHING


def _captured_draft(drafter: Drafter) -> Any:
    """Its draft model; None where that is translated or works beside the target: such forwards are not captured."""
    owner = owner_of_draft(drafter)
    captured = owner is not None and type(drafter).schedule is Drafter.schedule
    return owner.draft if owner is not None and captured and not isinstance(owner.draft, Translated) else None


def _readable(draft: Any, call: dict[str, Any]) -> dict[str, Any]:
    """The call's tensors where a draft model is, with ids that it has."""
    device, vocab = input_device(draft), draft.config.get_text_config(decoder=True).vocab_size
    moved = {name: value.to(device) for name, value in call.items() if isinstance(value, Tensor)}
    return {n: v.clamp(max=vocab - 1) if n in ("input_ids", "inputs") else v for n, v in moved.items()}
