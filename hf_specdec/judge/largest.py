"""The largest of many scores: on a CPU torch looks at them one by one, 45 µs for a vocabulary of 49,152.

The largest of every block are found many at a time; what is sought stands in the blocks where these are largest.
"""

import torch
from torch import Tensor

BLOCK = 128
"""scores"""
MANY = 32 * BLOCK
"""scores, below which there is nothing to gain"""


def argmax(scores: Tensor) -> Tensor:
    """`scores.argmax(-1)`, the first of equals, of scores [..., V]."""
    if not _pays(scores, 1):
        return scores.argmax(-1)
    columns, found = _where(scores, 1)
    return columns.gather(1, found.argmax(-1, keepdim=True)).view(scores.shape[:-1])


def topk(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`scores.topk(count)` of scores [..., V], the largest first: values (in float32) and indices, [..., count]."""
    if not _pays(scores, count):
        values, places = scores.topk(count)
        return values.float(), places
    shape = *scores.shape[:-1], count
    columns, found = _where(scores, count)
    values, places = found.topk(count)
    return values.view(shape), columns.gather(1, places).view(shape)


def _pays(scores: Tensor, count: int) -> bool:
    return scores.device.type == "cpu" and scores.shape[-1] >= MANY and count <= BLOCK // 4


def _where(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of scores [..., V], as N rows, the columns of the blocks that hold the `count` largest, in ascending order within
    each, and what stands there in float32 [N, count · BLOCK]. The last block may be shorter: what is not there is less
    than anything."""
    rows = scores.reshape(-1, scores.shape[-1]).float()  # half precision is slower, here, too
    n, size = rows.shape
    whole = size // BLOCK * BLOCK
    largest = rows[:, :whole].view(n, -1, BLOCK).amax(-1)
    if whole < size:
        largest = torch.cat([largest, rows[:, whole:].amax(-1, keepdim=True)], 1)
    blocks = largest.argmax(-1, keepdim=True) if count == 1 else largest.topk(count).indices
    columns = (blocks[..., None] * BLOCK + torch.arange(BLOCK)).view(n, -1)
    found = rows.gather(1, columns.clamp(max=size - 1))
    return columns, found if whole == size else found.masked_fill(columns >= size, -torch.inf)
