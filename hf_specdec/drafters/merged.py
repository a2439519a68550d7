"""From merged trees to a `Draft`."""

from collections.abc import Sequence

import torch

from ..budget import Tree
from ..protocol import Draft


def draft_of(trees: Sequence[Tree], chosen: Sequence[Sequence[int]], device: torch.device) -> Draft:
    """The chosen nodes of each row's tree, each after its parent, as point masses; a chain where every row has one."""
    cut = [tree.cut(nodes) for tree, nodes in zip(trees, chosen, strict=True)]
    draft = Draft.from_lists([tokens for tokens, _ in cut], device)
    width = draft.tokens.shape[1]
    chain = list(range(-1, width - 1))
    if any(parents != chain[: len(parents)] for _, parents in cut):
        draft.parents = [parents + [-1] * (width - len(parents)) for _, parents in cut]
    return draft
