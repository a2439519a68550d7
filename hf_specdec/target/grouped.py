"""Attention where query heads share keys and values.

Stock attention copies every key and value once for each query head of its group where several tokens have a mask, so
that a forward over uneven rows moves several times what a plain step does. Here the query heads of a group stand behind
each other as if they were further tokens of one head: what is computed is the same, and nothing is copied. On a CPU a
single token without a mask goes this way, too, as the kernel is slow for one; and where rows are of very different
lengths, each looks at its own slots, rather than all at as many as the longest has. On a GPU long texts are split.
Where all is to round alike, keys are gathered (`near`).
Only this package's own forwards go this way; any other call of the model is left as it was.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .attention import is_stock
from .compiled import compiles
from .near import Parts, attend_near
from .splits import attend_in_splits, split_mask, splits_for

NAME = "sdpa"
SPECIAL = frozenset(("position_bias", "softcap", "s_aux", "cache", "output_attentions"))
"""arguments that only stock attention knows what to do with"""

A_CALL = 400
"""slots of a row that take as long to look at as one more call of the kernel takes"""

T = TypeVar("T")
Attention = Callable[..., tuple[Tensor, Tensor | None]]


class _Here(threading.local):
    """Of this thread."""

    depth = 0
    masks: tuple[Tensor, Any, Any] | None = None
    """the mask that was met last, for what, and what it is then: all layers share it"""
    ends: Sequence[int] = ()
    """[B] slots behind which a row sees nothing; empty where nobody says"""
    near: Tensor | None = None
    """[B, T, NEAR] slots of each token's last keys, if they are to be gathered: what masks say of these follows behind
    all slots"""


_here = _Here()
_lock = threading.Lock()
_open = 0
"""blocks of all threads; while there is none transformers' function has its place to itself"""


def _alone() -> None:
    """In a forked process there are no blocks but its own thread's."""
    global _lock, _open
    _lock, _open = threading.Lock(), _here.depth
    if "transformers.modeling_utils" in sys.modules:
        _put_back(_registered())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_alone)


def attending(model: Any, ends: Sequence[int] = (), near: Tensor | None = None) -> AbstractContextManager[None]:
    """`grouped_attention` for a forward of this model. One that is compiled would be compiled anew in each block."""
    return nullcontext() if compiles(model) else grouped_attention(ends, near)


@contextmanager
def grouped_attention(ends: Sequence[int] = (), near: Tensor | None = None) -> Iterator[None]:
    """Forwards of this thread within the block copy no keys and values, if they attend by transformers' own function:
    what somebody has put in its place is called as it is.

    Args:
        ends: [B] slots behind which each row sees nothing; empty where it may see all.
        near: as `near_slots` gives it, where keys are to be gathered.
    """
    global _open
    before = _here.ends, _here.near
    _here.ends, _here.near = ends, near
    functions = _registered()
    with _lock:
        _open += 1
        if is_stock(stock := functions[NAME]):
            functions.register(NAME, _grouped(stock))
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1
        _here.masks, (_here.ends, _here.near) = None, before
        with _lock:
            _open -= 1
            _put_back(functions)


def _put_back(functions: Any) -> None:
    """transformers' function, where the last block has ended."""
    if not _open and (stock := getattr(functions[NAME], "stock", None)) is not None:
        functions.register(NAME, stock)


def _registered() -> Any:
    """Attention functions of all of transformers by name, without those that go before them in one of its tables.
    Importing them takes long, and whoever has a model has done it."""
    from transformers.modeling_utils import AttentionInterface

    return AttentionInterface()


def _grouped(stock: Attention) -> Attention:
    """What takes the place of transformers' attention function within a block."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, heads, size] of a query [B, heads, T, size], keys and values [B, fewer heads, S, size] and a mask
        [B, 1, T, S]; None for a single token that sees all."""
        rows, heads, width, size = query.shape
        groups = heads // key.shape[1]
        special = options.get("dropout") or any(_given(options[name]) for name in SPECIAL.intersection(options))
        groupable = attention_mask.shape[1] == 1 if attention_mask is not None else width == 1 and _is_slow_alone(key)
        if not _here.depth or special or not groupable:
            return stock(module, query, key, value, attention_mask, **options)
        scale = options.get("scaling")
        if _here.near is not None and attention_mask is not None:
            return _by_distance(query, key, value, attention_mask, _here.near, scale), None
        together = query.reshape(rows, -1, groups * width, size)
        splits = 1 if attention_mask is None else splits_for(together, key, value, attention_mask)
        if groups == splits == 1:
            return stock(module, query, key, value, attention_mask, **options)
        if attention_mask is None:
            seen = scaled_dot_product_attention(together, key, value, scale=scale)
        elif splits > 1:
            mask = _once(attention_mask, _in_splits, groups, *key.shape[:2], splits)
            seen = attend_in_splits(together, key, value, mask, scale)
        else:
            mask = _once(attention_mask, _for_all, groups)
            looks = [
                scaled_dot_product_attention(
                    together[row], key[row, :, :end], value[row, :, :end], attn_mask=mask[row, :, :, :end], scale=scale
                )
                for row, end in _looks(key)
            ]
            seen = looks[0] if len(looks) == 1 else torch.cat(looks)
        by_token = seen.unflatten(2, (groups, width)).permute(0, 3, 1, 2, 4)
        by_token = by_token.to(query.dtype, memory_format=torch.contiguous_format)  # one copy, if it has another dtype
        return by_token.reshape(rows, width, heads, -1).contiguous(), None

    attend.stock = stock  # type: ignore[attr-defined]
    return attend


def _by_distance(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, near: Tensor, scale: float | None) -> Tensor:
    """As `attend` gives it, of a mask [B, 1, T, S + NEAR]. The query heads of a group stand beside each other."""
    (heads, slots), width = key.shape[1:3], query.shape[2]
    together = query.unflatten(1, (heads, -1)).transpose(2, 3).flatten(2, 3)
    splits = splits_for(together, key, value, mask[..., :slots])
    parts = _once(mask, Parts.of, query.shape[1] // heads, heads, slots, splits, slots=near)
    seen = attend_near(together, key, value, parts, scale)
    by_token = seen.unflatten(2, (width, -1)).transpose(1, 2)
    return by_token.to(query.dtype, memory_format=torch.contiguous_format).flatten(2, 3)


def _given(option: object) -> bool:
    return option is not None and option is not False


def _is_slow_alone(key: Tensor) -> bool:
    """Whether a single token looks faster at keys [B, heads, slots, size] where it is not alone. Kernels of
    accelerators line its heads up by themselves, and many cores are kept busy by all heads alone."""
    return key.device.type == "cpu" and key.shape[0] * key.shape[1] >= torch.get_num_threads()


def _looks(key: Tensor) -> list[tuple[slice, int]]:
    """Which rows look at how many of the slots [B, heads, slots, size] together."""
    ends, slots = _here.ends, key.shape[2]
    known = len(ends) == len(key) and max(ends) == slots and key.device.type == "cpu"
    if not known or sum(ends) + A_CALL * len(ends) > slots * len(ends):
        return [(slice(None), slots)]
    return [(slice(row, row + 1), end) for row, end in enumerate(ends)]


def _once(mask: Tensor, make: Callable[..., T], *sizes: int, **beside: Tensor) -> T:
    """What a mask, and what comes with it, is made into, once for all layers."""
    if _here.masks is None or _here.masks[0] is not mask or _here.masks[1] != (make, sizes):
        _here.masks = mask, (make, sizes), make(mask, *sizes, **beside)
    return _here.masks[2]  # type: ignore[no-any-return]


def _for_all(mask: Tensor, groups: int) -> Tensor:
    """[B, 1, groups · T, S]."""
    return mask.expand(-1, groups, -1, -1).flatten(1, 2)[:, None]


def _in_splits(mask: Tensor, groups: int, *split: int) -> Tensor:
    """Split, by rows, heads of keys and the number of splits."""
    return split_mask(_for_all(mask, groups), *split)
