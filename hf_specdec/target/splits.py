"""Attention over long texts with few rows: the keys are cut into splits, which are attended side by side.

A kernel's block of work is one head of one row, and walks over all of its keys: with eight heads most of a GPU idles.
Splits stand beside each other as if they were further heads, and what they give is merged by the logarithms of their
sums, which is exact up to rounding (Flash-Decoding). No key or value is copied.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..errors import shown, warn
from ..transfer import moved

LONG = 2048
"""keys, from which on they are split"""
SHORTEST = 512
"""keys of a split"""
QUERIES = 64
"""of a head that are one block of work"""


@cache
def _of_cuda(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


MULTIPROCESSORS: dict[str, Callable[[torch.device], int]] = {"cuda": _of_cuda}
"""how many blocks of work a device takes at once, by kind of device; elsewhere nothing is split"""


def splits_for(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> int:
    """How many splits fill the device, a power of two; 1 where that gains nothing, or cannot be done. The first time
    that there are more it is tried whether they are right, so that must not be in a recording.

    Args:
        query: [B, H, Q, size].
        key, value: [B, H, S, size], of one size or two.
        mask: additive, [B or 1, 1, any, S].
    """
    rows, heads, slots, size = key.shape
    multiprocessors = MULTIPROCESSORS.get(key.device.type)
    if multiprocessors is None or slots < LONG or slots & (slots - 1):
        return 1
    blocks = rows * heads * -(-query.shape[2] // QUERIES)
    most = min(multiprocessors(key.device) // blocks, slots // SHORTEST)
    if most < 2 or not _can_be_split(query, key, value, mask):
        return 1
    return 1 << (most.bit_length() - 1) if _are_right(key.device, key.dtype, size, value.shape[3]) else 1


def _can_be_split(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Whether all is of one dtype, and the heads of keys and values lie one behind the other, so that views will do;
    and nobody has switched the kernel off."""
    in_line = all(each.stride(0) == each.shape[1] * each.stride(1) for each in (key, value))
    alike = {query.dtype, key.dtype, value.dtype} == {mask.dtype} and mask.shape[3] == key.shape[2]
    return in_line and alike and torch.backends.cuda.mem_efficient_sdp_enabled()


def split_mask(mask: Tensor, rows: int, heads: int, splits: int) -> Tensor:
    """An additive mask [B or 1, 1, Q, S] for `attend_in_splits`: [B · H, splits, Q, S / splits]. What it hides stays
    finite in kernels that multiply by log2(e), as whole splits are hidden from some."""
    parts = mask.clamp_min(torch.finfo(mask.dtype).min / 2).unflatten(3, (splits, -1)).transpose(2, 3)
    return parts.expand(rows, heads, -1, -1, -1).flatten(0, 1)


def attend_in_splits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """[B, H, Q, size], what `scaled_dot_product_attention` gives, in float32 at least: merged and not rounded yet.

    Args:
        query: [B, H, Q, size].
        key, value: [B, H, S, size], where heads lie one behind the other, with or without room between them.
        mask: as `split_mask` gives it.
        scale: of the products; None for the usual one.
    """
    return merged(*splits_of(query, key, value, mask, scale)).unflatten(0, query.shape[:2])


def splits_of(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """The same before it is merged, [B · H, splits, Q, size] with the logarithms of the sums [B · H, splits, Q]."""
    splits, width = mask.shape[1:3]
    queries = query.flatten(0, 1)[:, None].expand(-1, splits, -1, -1)
    keys, values = (each.unflatten(2, (splits, -1)).flatten(0, 1) for each in (key, value))
    seen, logs = attended(queries, keys, values, mask, scale)
    return seen, logs[:, :, :width]


def merged(seen: Tensor, logs: Tensor) -> Tensor:
    """[B · H, Q, size] of what `splits_of` gives."""
    weights = logs[..., None].softmax(1)  # 0 for what is hidden, whose logarithm lies far below all others
    return (seen * weights).sum(1)


def attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> tuple[Any, Any]:
    """And the logarithm of each query's sum, [B, H, Q or more] in float32 at least."""
    if key.device.type == "cpu":
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return attention(query, key, value, attn_mask=mask, scale=scale)  # type: ignore[no-any-return]
    seen, logs, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, scale=scale)
    return seen, logs


@cache
def _are_right(device: torch.device, dtype: torch.dtype, *sizes: int) -> bool:
    """Whether splits give here what attention gives without them, tried once.

    Args:
        sizes: of the heads of keys and of values.
    """
    try:
        differs = _differs(device, dtype, *sizes)
    except Exception as error:  # of a kernel that is missing, or asks for something else
        differs = f"it raised {shown(error)}"
    if differs:
        warn(f"attention over long texts is not split on {device} in {dtype}: {differs}. The text is not affected")
    return not differs


@torch.no_grad()
def _differs(device: torch.device, dtype: torch.dtype, size: int, value_size: int) -> str:
    """How splits of small random tensors differ; empty if they do not. The last splits are hidden from some, and the
    products lie far apart, so that a wrong weight shows."""
    splits, slots, drawn = 4, 256, torch.Generator("cpu").manual_seed(0)

    def made(*shape: int) -> Tensor:
        return moved(torch.randn(shape, generator=drawn, device="cpu").to(dtype), device)

    query, key, value = made(2, 2, 5, size), made(2, 2, 2 * slots, size), made(2, 2, 2 * slots, value_size)
    key, value, scale = key[:, :, :slots], value[:, :, :slots], 3 * size**-0.5
    hidden = made(2, 1, 5, slots) < 0
    hidden[1, ..., slots // splits :] = True
    mask = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    plain = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    split = attend_in_splits(query, key, value, split_mask(mask, 2, 2, splits), scale).to(dtype)
    furthest = moved((split - plain).abs().amax().double(), torch.device("cpu")).item()
    return "" if furthest <= max(4 * torch.finfo(dtype).eps, 1e-4) else f"a trial is off by {furthest:.1g}"
