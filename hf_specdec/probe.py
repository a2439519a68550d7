"""What a model can do, found out by trying: three tiny forwards, compared with plain ones, once per model.

A model that ignores a 4-D mask (ALiBi), or whose cache rolls back wrongly, gives other logits; it never gets the
chance to change a text.
"""

import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .protocol import Runner
from .target.cache import is_adoptable
from .target.inputs import takes_ragged_inputs
from .target.lockstep import LockstepRunner, prefill
from .target.ragged import RaggedRunner


class Support(IntEnum):
    """How much of the engine a model can run under; each includes those below."""

    PLAIN = 0
    LOCKSTEP = 1
    RAGGED = 2


class Ability(NamedTuple):
    """What was found out about a model."""

    support: Support
    vocab_size: int
    """of its logits"""


_known: "weakref.WeakKeyDictionary[PreTrainedModel, dict[str, Ability]]" = weakref.WeakKeyDictionary()

IDS = ((7, 3, 11, 5, 2, 13, 17), (4, 9, 6, 1, 8, 10, 12))
PADDING = 2
"""columns of it on the left of the second row"""


def support(model: PreTrainedModel) -> Support:
    """The best way to run this model, remembered as long as it keeps its attention, dtype and mode."""
    return ability(model).support


def ability(model: PreTrainedModel) -> Ability:
    """What this model can do, likewise."""
    per_model = _known.setdefault(model, {})
    kind = model.device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    state = f"{getattr(model.config, '_attn_implementation', '')} {model.dtype} {model.training} {cast}"
    if state not in per_model:
        with torch.no_grad():
            per_model[state] = _probe(model)
    return per_model[state]


def _probe(model: PreTrainedModel) -> Ability:
    ids, mask = _inputs(model)
    vocab = model.config.get_text_config(decoder=True).vocab_size
    try:
        expected = _plain(model, ids, mask)
        vocab = expected.shape[-1]
        if not agree(_lockstep(model, ids, mask), expected):
            return Ability(Support.PLAIN, vocab)
    except Exception:  # whatever a model raises here, plain decoding is the answer
        return Ability(Support.PLAIN, vocab)
    try:
        fine = agree(_ragged(model, ids, mask), expected)
        return Ability(Support.RAGGED if fine else Support.LOCKSTEP, vocab)
    except Exception:
        return Ability(Support.LOCKSTEP, vocab)


def runner_agrees(model: PreTrainedModel, wrap: Callable[[Runner], Runner]) -> bool:
    """Whether a runner of a drafter's own leaves the target's logits as they are.

    Args:
        wrap: makes it, around the engine's runner over a prompt of 2 rows and 4 columns.
    """
    ids, mask = _inputs(model)
    with torch.no_grad():
        expected = _plain(model, ids, mask)
        runner = wrap(RaggedRunner(model, _kwargs(model, mask[:, :4]), ids[:, :4]))
        runner.prefill()
        runner.forward(ids[:, :2])  # rolled back: nothing of it may stay
        runner.truncate([4, 4])
        answer = runner.forward(ids[:, 4:6])
        # What was pruned cannot be compared.
        places = 2 if answer.nodes is None else 1
        return agree(answer.logits[:, :places], expected[:, :places])


def _inputs(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.tensor(IDS, device=model.device) % vocabulary
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return ids, mask


def _kwargs(model: PreTrainedModel, mask: Tensor) -> dict:
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    kwargs = {"attention_mask": mask, "past_key_values": DynamicCache(config=model.config), "use_cache": True}
    return kwargs | ({"position_ids": positions} if takes_ragged_inputs(model, {}) else {})


def _plain(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits after columns 4, 5 and 6 [B, 3, V], from one forward without a history."""
    return prefill(model, ids, _kwargs(model, mask), None, all_logits=True).logits[:, -3:]


def _lockstep(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """The same by a prefill of 4 columns, two wrong forwards rolled back, and the right one."""
    runner = LockstepRunner(model, _kwargs(model, mask[:, :4]), ids[:, :4])
    runner.prefill()
    runner.forward(ids[:, :1])
    runner.forward(ids[:, :2])
    runner.truncate([4, 4])
    return runner.forward(ids[:, 4:]).logits


def _ragged(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """The same with rows that advance unevenly, over slots filled with large garbage."""
    kwargs = _kwargs(model, mask[:, :3])
    runner = RaggedRunner(model, kwargs, ids[:, :3])
    prefill(model, ids[:, :3], kwargs, None)
    if not is_adoptable(kwargs["past_key_values"]):
        raise TypeError("not a plain attention cache")
    runner.adopt()
    for layer in runner.cache.layers:
        layer.keys[:, :, 3:], layer.values[:, :, 3:] = 50.0, 50.0
    runner.forward(ids[:, 3:5], counts=[1, 2])
    first = runner.forward(torch.stack([ids[0, 4:7], ids[1, [5, 6, 6]]]), counts=[3, 2]).logits
    runner.truncate([4, 4])
    second = runner.forward(ids[:, 4:7]).logits
    return torch.stack([first[0], second[1]])


def agree(got: Tensor, expected: Tensor) -> bool:
    """Equal up to rounding of the model's dtype, relative to the spread of the logits."""
    tolerance = 1e-3 if expected.dtype == torch.float32 else 0.1
    got, expected = got.float(), expected.float()
    scale = (expected - expected.mean(-1, keepdim=True)).abs().max()
    return bool((got - expected).abs().max() <= tolerance * scale)
