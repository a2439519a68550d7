"""Which tokens of which streams are drafted: the tree that promises most tokens per second (§3.2.2, and beyond it)."""

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ...budget import Evidence, Tree


class Node(NamedTuple):
    """A drafted token: of stream `stream` (from 0) the candidate `rank` (from 0), behind `parent` (-1 the root)."""

    parent: int
    stream: int
    rank: int


def product_tree(gamma: int, k: int) -> list[Node]:
    """Every candidate of each stream behind every one of the stream before: Σ k^g nodes for g = 1 … γ."""
    nodes: list[Node] = []
    above = [-1]
    for stream in range(gamma):
        level = [Node(parent, stream, rank) for parent in above for rank in range(k)]
        above = list(range(len(nodes), len(nodes) + len(level)))
        nodes += level
    return nodes


def likeliest_nodes(chances: Sequence[Sequence[float]], most: int) -> list[tuple[float, Node]]:
    """The `most` likeliest nodes of the full product, each after its parent, with their chance to be accepted.

    Args:
        chances: [γ][k] how often a candidate is right where all before it were.
    """
    order = itertools.count()
    heap = [(-chance, next(order), -1, 0, rank) for rank, chance in enumerate(chances[0])]
    heapq.heapify(heap)
    found: list[tuple[float, Node]] = []
    while heap and len(found) < most:
        negative, _, parent, stream, rank = heapq.heappop(heap)
        if not negative < 0:
            break
        found.append((-negative, Node(parent, stream, rank)))
        if stream + 1 < len(chances):
            for r, chance in enumerate(chances[stream + 1]):
                heapq.heappush(heap, (negative * chance, next(order), len(found) - 1, stream + 1, r))
    return found


def joined(
    likeliest: Sequence[tuple[float, Node]],
    tokens: Sequence[Sequence[float]],
    evidence: Sequence[Sequence[Sequence[Evidence]]],
) -> Tree:
    """The streams' nodes, in their order, as a tree that copies can join.

    Args:
        likeliest: from `likeliest_nodes`.
        tokens: [γ][k] what the candidates are.
        evidence: [γ][k] what each of them is counted under.
    """
    tree, place = Tree(), {-1: (-1, 1.0)}
    for i, (survives, node) in enumerate(likeliest):
        parent, chance = place[node.parent]
        token = int(tokens[node.stream][node.rank])
        place[i] = tree.add(parent, token, survives / chance, *evidence[node.stream][node.rank]), survives
    return tree


def level_by_level(nodes: Sequence[Node]) -> list[Node]:
    """The same tree, its nodes in order of depth: the first ones of it are a shallower tree."""
    depths: list[int] = []
    for node in nodes:
        depths.append(1 + (depths[node.parent] if node.parent >= 0 else 0))
    order = sorted(range(len(nodes)), key=depths.__getitem__)
    place = {-1: -1} | {old: new for new, old in enumerate(order)}
    return [nodes[i]._replace(parent=place[nodes[i].parent]) for i in order]
