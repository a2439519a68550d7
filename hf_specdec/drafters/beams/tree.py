"""`TreeModel`: a model over one tree of texts per prompt. Beams that share a prefix share its slots in the cache."""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...target.devices import input_device
from ...target.grouped import grouped_attention
from ...target.inputs import CACHE
from ...target.masks import as_bias
from ...transfer import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Path = tuple[int, ...]
"""the new tokens down to a node; () is the prompt's end"""


class TreeModel:
    """Reads prompts, then nodes behind those that it holds; forgets all but some of them."""

    def __init__(self, model: "PreTrainedModel", ids: Tensor, mask: Tensor) -> None:
        """Reads the prompts.

        Args:
            ids: [B, P] left-padded.
            mask: [B, P] 1 where they are not padding.
        """
        self.model, self.device = model, input_device(model)
        vocab = model.config.get_text_config(decoder=True).vocab_size
        self.vocab = vocab
        self.cache = DynamicCache(config=model.config)
        self.base = mask.bool().to(self.device)
        """[B, K] slots that every node of a row sees"""
        self.lengths = self.base.sum(1).tolist()
        rows = len(ids)
        self.slots: list[dict[Path, int]] = [{} for _ in range(rows)]
        """of each row's nodes, but for those that all others hang on"""
        self.settled: list[Path] = [()] * rows
        """down to which a row's text is one line, in `base`"""
        positions = (self.base.long().cumsum(-1) - 1).clamp_min(0)
        padded = None if bool(self.base.all()) else self.base.long()
        last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        known = ids.to(self.device).clamp(0, vocab - 1)
        self.prompt = self._run(known, padded, positions, **last)[:, -1].clone()
        """logits [B, V] behind the prompts"""

    def holds(self, row: int, path: Path) -> bool:
        """Whether a node has been read."""
        return path in self.slots[row] or path == self.settled[row][: len(path)]

    def read(self, nodes: Sequence[Sequence[Path]]) -> Tensor:
        """Logits [B, T, V] behind nodes of every row, parents before children; each one's parent is held, or before it.
        What stands in a row past its nodes is undefined."""
        width, end = max(map(len, nodes)), self.base.shape[1]
        seen = torch.cat([self.base, self.base.new_zeros(len(nodes), width)], dim=1)
        allowed = seen[:, None].repeat(1, width, 1)
        tokens, positions = [], []
        for b, paths in enumerate(nodes):
            for i, path in enumerate(paths):
                self.slots[b][path] = end + i
                above = [self.slots[b][path[:n]] for n in range(len(self.settled[b]) + 1, len(path) + 1)]
                allowed[b, i, above] = True
            for i in range(len(paths), width):  # padding sees something: itself
                allowed[b, i, end + i] = True
            spare = [0] * (width - len(paths))
            tokens.append([path[-1] for path in paths] + spare)
            positions.append([self.lengths[b] - 1 + len(path) for path in paths] + spare)
        bias = as_bias(allowed, torch.zeros_like(allowed), {"full_attention": None}, self.model.dtype)
        ids = to_device(tokens, self.device).clamp(0, self.vocab - 1)
        logits = self._run(ids, bias, to_device(positions, self.device))
        self.base = seen  # the new slots are nobody's yet but those that see them
        return logits

    def keep(self, leaves: Sequence[Sequence[Path]]) -> None:
        """Of each row only what leads to these nodes; what leads to all of them is settled."""
        chosen, counts = [], []
        for b, ends in enumerate(leaves):
            shared = _common(ends)
            line = [self.slots[b][shared[:n]] for n in range(len(self.settled[b]) + 1, len(shared) + 1)]
            below = sorted({path[:n] for path in ends for n in range(len(shared) + 1, len(path) + 1)}, key=len)
            kept = self.base[b].nonzero()[:, 0].tolist() + line
            chosen.append(kept + [self.slots[b][path] for path in below])
            counts.append(len(kept))
            self.slots[b] = {path: len(kept) + i for i, path in enumerate(below)}
            self.settled[b] = shared
        width = max(map(len, chosen))
        index = to_device([row + [0] * (width - len(row)) for row in chosen], self.device).view(-1, width)
        for layer in self.cache.layers:
            mine = index.to(layer.keys.device)[:, None, :, None].expand(-1, layer.keys.shape[1], -1, -1)
            layer.keys = layer.keys.gather(2, mine.expand(-1, -1, -1, layer.keys.shape[3]))
            layer.values = layer.values.gather(2, mine.expand(-1, -1, -1, layer.values.shape[3]))
        self.base = torch.arange(width, device=self.device) < to_device(counts, self.device)[:, None]

    @grouped_attention()
    def _run(self, ids: Tensor, mask: Any, positions: Tensor, **more: Any) -> Tensor:
        over = {"attention_mask": mask, "position_ids": positions, CACHE: self.cache, "use_cache": True}
        return self.model(input_ids=ids, **over | more, return_dict=True).logits


def _common(paths: Sequence[Path]) -> Path:
    """The longest text that all of them begin with."""
    first, last = min(paths), max(paths)
    same = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(same, min(len(first), len(last)))]
