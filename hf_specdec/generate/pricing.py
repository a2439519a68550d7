"""`set_costs`: what a call goes by when it weighs drafts. A machine measures it when it first meets a target and a
drafter, in short calls that nobody sees, and keeps it in a file: the same call drafts the same in a new process, with a
drafter that was used before, and on a busy machine."""

import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationConfig
from transformers.generation import StoppingCriteriaList

from ..budget import Cost, Prices
from ..clock import real
from ..drafters.base import Drafter
from ..engine.call import Call
from ..engine.generation import costs_of
from ..engine.guard import GuardedDrafter
from ..engine.paying import record_of
from ..files import digest, kept_in, write_whole
from ..target.attention import attention_of
from ..target.captured import MOST_AHEAD
from ..target.devices import input_device
from ..target.inputs import position_limit
from ..target.ranks import ranks_of
from ..version import __version__
from .hidden_calls import EveryWidth, Until

READ = 128
"""tokens of a prompt, in any order, behind which is measured: nothing is copied from them"""
WIDTHS = (1, 8, 32, 2, 16, 4)
"""tokens per row of the forwards that are measured, the most telling first"""
MOST = 256
"""tokens of all rows of such a forward"""
TIMES, STEPS = 5, 6
"""of each width, and of a draft's step"""
FEW, ROUNDS = 8, 48
"""tokens of a call in which a drafter drafts: of one that is soon known, and of another one"""
SECONDS = 0.7
"""after which each of both calls ends once it has told the least"""
FAULTS = 256
"""pages of memory per forward, beyond which times are of the system: it gives them anew to each, and later to none"""
NEVER = 2**31 - 1
"""a token that ends no text"""

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

_known: dict[str, Prices | None] = {}
_lock = threading.Lock()


def set_costs(call: Call, guarded: GuardedDrafter, captured: bool) -> Cost:
    """What the target's forwards take in this call. The drafter is told what its own steps take.

    Args:
        captured: whether the target's forwards are.
    """
    drafter, observed, prices = guarded.drafter, costs_of(call, guarded, captured), None
    try:
        if isinstance(drafter, Drafter):
            prices = _prices_for(call, drafter, captured, observed)
    except Exception:  # of a drafter of somebody's own, or a model that wants more than a text
        prices = None
    return observed if prices is None else prices.cost()


def _prices_for(call: Call, drafter: Drafter, captured: bool, observed: Cost) -> Prices | None:
    """None where the call goes by the clock. The drafter's own are set, or observed again."""
    rows, prices = len(call.input_ids), None
    if not (call.rules.adapt or hinders(call, drafter)):
        with _lock:  # one after the other: a machine that measures two things at once measures neither
            prices = _prices(call, drafter, captured, observed)
    draft, rounds = (None, None) if prices is None else (prices.draft, prices.rounds)
    steps = drafter.draft_cost(call.target, rows, call.draws, draft is not None)
    if draft is not None:
        steps.set_to(*draft)
    record_of(drafter, id(call.target), call.draws, rows).set_to(rows, rounds)
    return prices


def hinders(call: Call, drafter: Drafter) -> bool:
    """Whether a call goes by the clock in any case: one of several ranks, which go by the first one's; an
    encoder-decoder's; and a drafter with an order of its own, whose worker is no faster than the machine is. Beside
    them calls that only make forwards."""
    own_order = type(drafter).schedule is not Drafter.schedule
    return own_order or isinstance(drafter, EveryWidth) or call.source is not None or ranks_of(call.target) is not None


def _prices(call: Call, drafter: Drafter, captured: bool, observed: Cost) -> Prices | None:
    """As they are known, or else measured; None where they cannot be."""
    about = [_machine(call.target), _parts(call.target), _parts(drafter), call.rules.forwards, captured, call.draws]
    name = digest([*about, len(call.input_ids)])[:32]
    if name in _known:
        return _known[name]
    file = kept_in("prices") / f"{name}.json"
    found: Prices | None
    try:
        found = Prices.from_json(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        _known[name] = None  # where it raises it is not tried again
        found = _measured(call, drafter, observed)
        if found is not None and found.agreed:
            with suppress(OSError):  # where nothing can be written the next process measures
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, json.dumps(found.as_json()))
    _known[name] = found
    return found


def _machine(target: Any) -> list[Any]:
    device = input_device(target)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return [name, torch.get_num_threads(), os.cpu_count(), torch.__version__, transformers.__version__, __version__]


def _parts(of: Any) -> list[Any]:
    """What decides how long something takes: its modules and their shapes, and a drafter's options."""
    if isinstance(of, nn.Module):
        shapes = Counter(
            f"{type(part).__name__} {[(*held.shape, str(held.dtype)) for held in part.parameters(recurse=False)]}"
            for part in of.modules()
        )
        attention = attention_of(of) if hasattr(of, "config") else None  # type: ignore[arg-type]
        return [attention, *sorted(shapes.items())]
    inside = [_parts(part) for part in vars(of).values() if isinstance(part, (nn.Module, Drafter))]
    return [type(of).__name__, repr(of), *inside]


def _measured(call: Call, drafter: Drafter, cost: Cost) -> Prices | None:
    """By two calls like this one, but for the length: forwards of all widths without a drafter, then the drafter."""
    target, rows, draws = call.target, len(call.input_ids), call.draws
    mine = drafter.untaught()
    steps, record = mine.draft_cost(target, rows, draws, False), record_of(mine, id(target), draws, rows)
    widths = [width for width in WIDTHS if width == 1 or rows * width <= MOST]

    def forwards_are_told(_: int, late: bool) -> bool:
        times, most = (2, widths[:3]) if late else (TIMES, widths)
        return all(cost.times(rows, width) >= times for width in most)

    def drafter_is_told(tokens: int, late: bool) -> bool:
        asked = bool(record.plain or record.drafted or steps.of(1))
        steps.enough = 2 if late else STEPS
        return tokens >= (FEW if steps.step is not None or not asked else ROUNDS)

    before = _faults()
    if not drafter.brings_runner:
        _decode(call, EveryWidth(None, widths), forwards_are_told)
    forwards = sum(cost.times(rows, width) for width in widths)
    if input_device(target).type == "cpu" and _faults() - before > FAULTS * forwards:
        return None
    _decode(call, mine, drafter_is_told)
    steps.enough = 2  # where it seldom drafted
    return Prices.of(rows, cost, steps, record.rounds(rows))


def _faults() -> int:
    """Pages of memory that this process has got so far."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _decode(call: Call, drafter: Drafter, told: Callable[[int, bool], bool]) -> None:
    """A call behind tokens of the prompt that leaves no trace in the user's random numbers.

    Args:
        told: whether it may end after so many tokens, and whether it has taken long.
    """
    target, device, wanted, began = call.target, input_device(call.target), call.config, real()
    limit = position_limit(target)
    most, read = min(max(call.most_columns, READ + MOST), READ + MOST_AHEAD, limit), min(READ, limit // 2)
    chosen = torch.randint(call.input_ids.shape[1], (read,), generator=torch.Generator().manual_seed(0))
    ids = call.input_ids.to(device)[:, chosen.to(device)]
    ends = {"max_length": most, "eos_token_id": NEVER, "pad_token_id": call.pad_token_id}
    draws = {name: getattr(wanted, name) for name in ("temperature", "top_k", "top_p") if wanted.do_sample}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(do_sample=wanted.do_sample, **ends, **draws),
            assistant_model=drafter,
            speculation=asdict(call.rules) | {"adapt": True},
            stopping_criteria=StoppingCriteriaList([Until(lambda tokens: told(tokens, real() - began > SECONDS))]),
        )
