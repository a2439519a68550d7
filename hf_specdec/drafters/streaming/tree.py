"""Which tokens of which streams are drafted: the tree that promises most tokens per second (§3.2.2, and beyond it)."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar


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


def most_valuable(chances: Sequence[float], seconds: Callable[[int], float]) -> int:
    """How many of the likeliest nodes give most tokens per second, (1 + Σ chance) / T(1 + nodes); may be none.

    Args:
        chances: of all of them, the likeliest first.
        seconds: T, duration of a forward by its width.
    """
    best, speed, tokens = 0, 1 / seconds(1), 1.0
    for count, chance in enumerate(chances, 1):
        tokens += chance
        if tokens / seconds(count + 1) > speed:
            best, speed = count, tokens / seconds(count + 1)
    return best


class Joined(NamedTuple):
    """A node of a tree of streams and a copy."""

    parent: int
    token: int
    chance: float
    stream: Node | None
    """the streams' node that it is; None where it is copied only"""


def joined(
    likeliest: Sequence[tuple[float, Node]], tokens: Sequence[Sequence[int]], copied: Sequence[int], alpha: float
) -> list[Joined]:
    """Streams and a copy in one tree, each node once, the likeliest first and after its parent.

    Args:
        likeliest: of the streams, from `likeliest_nodes`.
        tokens: [γ][k] what the candidates are.
        copied: a chain behind the root.
        alpha: how often a copied token is right where those before it were.
    """
    nodes = [Joined(node.parent, tokens[node.stream][node.rank], chance, node) for chance, node in likeliest]
    at = {(node.parent, node.token): i for i, node in enumerate(nodes)}
    parent, chance = -1, 1.0
    for token in copied:
        chance *= alpha
        child = at.setdefault((parent, token), len(nodes))
        if child == len(nodes):
            nodes.append(Joined(parent, token, chance, None))
        else:  # both say so
            chance = max(chance, nodes[child].chance)
            nodes[child] = nodes[child]._replace(chance=chance)
        parent = child
    order = sorted(range(len(nodes)), key=lambda i: -nodes[i].chance)  # stable: a parent stays before its child
    return renumbered(nodes, order)


NodeT = TypeVar("NodeT", Node, Joined)


def level_by_level(nodes: Sequence[NodeT]) -> list[NodeT]:
    """The same tree, its nodes in order of depth: the first ones of it are a shallower tree."""
    depths: list[int] = []
    for node in nodes:
        depths.append(1 + (depths[node.parent] if node.parent >= 0 else 0))
    return renumbered(nodes, sorted(range(len(nodes)), key=depths.__getitem__))


def renumbered(nodes: Sequence[NodeT], order: Sequence[int]) -> list[NodeT]:
    """The nodes in another order, which has parents before their children."""
    place = {-1: -1} | {old: new for new, old in enumerate(order)}
    return [nodes[i]._replace(parent=place[nodes[i].parent]) for i in order]
