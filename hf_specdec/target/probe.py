"""What a model can do, found out by trying: three tiny forwards, compared with plain ones, once per model.

A model that ignores a 4-D mask (ALiBi), or whose cache rolls back wrongly, gives other logits; it never gets the
chance to change a text.
"""

import weakref
from enum import IntEnum

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .cache import is_adoptable
from .runner import LockstepRunner, RaggedRunner, prefill, takes_ragged_inputs


class Support(IntEnum):
    """How much of the engine a model can run under; each includes those below."""

    PLAIN = 0
    LOCKSTEP = 1
    RAGGED = 2


_known: "weakref.WeakKeyDictionary[PreTrainedModel, dict[str, Support]]" = weakref.WeakKeyDictionary()


def support(model: PreTrainedModel) -> Support:
    """The best way to run this model, remembered as long as it keeps its attention, dtype and mode."""
    per_model = _known.setdefault(model, {})
    state = f"{getattr(model.config, '_attn_implementation', '')} {model.dtype} {model.training}"
    if state not in per_model:
        with torch.no_grad():
            per_model[state] = _probe(model)
    return per_model[state]


def _probe(model: PreTrainedModel) -> Support:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.tensor([[7, 3, 11, 5, 2, 13, 17], [4, 9, 6, 1, 8, 10, 12]], device=model.device) % vocabulary
    # The second row is padded on the left by two tokens.
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    try:
        expected = _plain(model, ids, mask)
        if not _agree(_lockstep(model, ids, mask), expected):
            return Support.PLAIN
    except Exception:  # whatever a model raises here, plain decoding is the answer
        return Support.PLAIN
    try:
        return Support.RAGGED if _agree(_ragged(model, ids, mask), expected) else Support.LOCKSTEP
    except Exception:
        return Support.LOCKSTEP


def _kwargs(model: PreTrainedModel, mask: Tensor) -> dict:
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    kwargs = {"attention_mask": mask, "past_key_values": DynamicCache(config=model.config), "use_cache": True}
    return kwargs | ({"position_ids": positions} if takes_ragged_inputs(model, {}) else {})


def _plain(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits after columns 4, 5 and 6 [B, 3, V], from one forward without a history."""
    return prefill(model, ids, _kwargs(model, mask), None).logits[:, -3:]


def _lockstep(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """The same by a prefill of 4 columns, two wrong forwards rolled back, and the right one."""
    kwargs = _kwargs(model, mask[:, :4])
    prefill(model, ids[:, :4], kwargs, None)
    runner = LockstepRunner(model, kwargs["past_key_values"], kwargs, ids[:, :4])
    runner.forward(ids[:, :1])
    runner.forward(ids[:, :2])
    runner.truncate([4, 4])
    return runner.forward(ids[:, 4:]).logits


def _ragged(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """The same with rows that advance unevenly, over slots filled with large garbage."""
    kwargs = _kwargs(model, mask[:, :3])
    prefill(model, ids[:, :3], kwargs, None)
    if not is_adoptable(kwargs["past_key_values"]):
        raise TypeError("not a plain attention cache")
    runner = RaggedRunner(model, kwargs["past_key_values"], kwargs, 3)
    for layer in runner.cache.layers:
        layer.keys[:, :, 3:], layer.values[:, :, 3:] = 50.0, 50.0
    runner.forward(ids[:, 3:5], counts=[1, 2])
    first = runner.forward(torch.stack([ids[0, 4:7], ids[1, [5, 6, 6]]]), counts=[3, 2]).logits
    runner.truncate([4, 4])
    second = runner.forward(ids[:, 4:7]).logits
    return torch.stack([first[0], second[1]])


def _agree(got: Tensor, expected: Tensor) -> bool:
    """Equal up to rounding of the model's dtype, relative to the spread of the logits."""
    tolerance = 1e-3 if expected.dtype == torch.float32 else 0.1
    got, expected = got.float(), expected.float()
    scale = (expected - expected.mean(-1, keepdim=True)).abs().max()
    return bool((got - expected).abs().max() <= tolerance * scale)
