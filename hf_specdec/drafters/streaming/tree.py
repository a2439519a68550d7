"""Which tokens of which streams are drafted: the tree that promises most tokens per second (§3.2.2, and beyond it)."""

from collections.abc import Sequence

from ...budget import Evidence, Tree
from ..trees import Node


def joined(
    likeliest: Sequence[tuple[float, Node]],
    tokens: Sequence[Sequence[float]],
    evidence: Sequence[Sequence[Sequence[Evidence]]],
) -> Tree:
    """The streams' nodes, in their order, as a tree that others can join.

    Args:
        likeliest: from `likeliest_nodes`.
        tokens: [γ][k] what the candidates are.
        evidence: [γ][k] what each of them is counted under.
    """
    tree, place = Tree(), {-1: (-1, 1.0)}
    for i, (survives, node) in enumerate(likeliest):
        parent, chance = place[node.parent]
        token = int(tokens[node.place][node.rank])
        place[i] = tree.add(parent, token, survives / chance, *evidence[node.place][node.rank]), survives
    return tree


def level_by_level(nodes: Sequence[Node]) -> list[Node]:
    """The same tree, its nodes in order of depth: the first ones of it are a shallower tree."""
    depths: list[int] = []
    for node in nodes:
        depths.append(1 + (depths[node.parent] if node.parent >= 0 else 0))
    order = sorted(range(len(nodes)), key=depths.__getitem__)
    place = {-1: -1} | {old: new for new, old in enumerate(order)}
    return [nodes[i]._replace(parent=place[nodes[i].parent]) for i in order]
