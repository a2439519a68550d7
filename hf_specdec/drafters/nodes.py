"""Nodes of trees that are chosen by their chances, whatever their tokens say."""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """The candidate `rank` (from 0) of the place `place` (from 0), behind the node `parent` (-1 the last accepted
    token)."""

    parent: int
    place: int
    rank: int


def likeliest_nodes(
    chances: Sequence[Sequence[float]], most: int, goes_on: Callable[[Node], bool] = lambda node: True
) -> list[tuple[float, Node]]:
    """The `most` likeliest nodes of the full product, each after its parent, with their chance to be accepted.

    Args:
        chances: [γ][k] how often a candidate is right where all before it were.
        goes_on: whether any node stands behind this one.
    """
    order = itertools.count()
    heap = [(-chance, next(order), Node(-1, 0, rank)) for rank, chance in enumerate(chances[0])]
    heapq.heapify(heap)
    found: list[tuple[float, Node]] = []
    while heap and len(found) < most:
        negative, _, node = heapq.heappop(heap)
        if not negative < 0:
            break
        found.append((-negative, node))
        if node.place + 1 < len(chances) and goes_on(node):
            parent, place = len(found) - 1, node.place + 1
            for rank, chance in enumerate(chances[place]):
                heapq.heappush(heap, (negative * chance, next(order), Node(parent, place, rank)))
    return found


def tested_behind(nodes: Sequence[Node], accepted: Iterable[tuple[int, int | None]]) -> Iterator[tuple[Node, bool]]:
    """Of a row's verified nodes those that hang on an accepted one, and whether each was right.

    Args:
        accepted: -1 for the root, or an accepted node, with the one that was accepted behind it, if one was.
    """
    for parent, right in accepted:
        yield from ((node, i == right) for i, node in enumerate(nodes) if node.parent == parent)
