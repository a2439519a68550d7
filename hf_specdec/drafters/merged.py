"""From merged trees to a `Draft`."""

from collections.abc import Sequence

import torch

from ..budget import Tree
from ..protocol import Draft


def draft_of(trees: Sequence[Tree], chosen: Sequence[Sequence[int]], device: torch.device) -> Draft:
    """The chosen nodes of each row's tree, each after its parent, as point masses; a chain where every row has one."""
    cut = [tree.cut(nodes) for tree, nodes in zip(trees, chosen, strict=True)]
    if all(parents == list(range(-1, len(parents) - 1)) for _, parents in cut):
        return Draft.from_lists([tokens for tokens, _ in cut], device)
    return Draft.from_trees(cut, device)
