"""Speculative Streaming: which tokens of which streams are drafted."""

import math
from typing import Any

import pytest
import torch
from stream_models import GAMMA, streams_of, target_of

from hf_specdec import StreamingDrafter
from hf_specdec.budget import Cost, Evidence
from hf_specdec.drafters.streaming import likeliest_nodes, product_tree
from hf_specdec.drafters.streaming.tree import joined, level_by_level
from hf_specdec.drafters.streaming.tuner import TreeTuner
from hf_specdec.protocol import Draft, Verdict


@pytest.fixture(scope="module")
def target() -> Any:
    return target_of("Llama")


def test_the_likeliest_nodes_are_the_likeliest() -> None:
    """Against all nodes of the product, sorted by the product of their chances."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        chances = torch.rand(3, 3, generator=generator).div(3).tolist()
        nodes = product_tree(3, 3)
        value: list[float] = []
        for node in nodes:
            value.append(chances[node.stream][node.rank] * (value[node.parent] if node.parent >= 0 else 1.0))
        found = likeliest_nodes(chances, 12)
        assert [round(v, 12) for v, _ in found] == [round(v, 12) for v in sorted(value, reverse=True)[:12]]
        tree = level_by_level([node for _, node in found])
        assert all(node.parent < i for i, node in enumerate(tree))
        assert sorted(node.stream for node in tree) == [node.stream for node in tree]
        paths = {tuple(path(tree, i)) for i in range(12)}
        assert paths == {tuple(path([n for _, n in found], i)) for i in range(12)}


def test_streams_make_a_tree_that_copies_can_join() -> None:
    """Each node once, with the chance that the streams give it."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        chances = torch.rand(3, 3, generator=generator).div(3).tolist()
        likeliest = likeliest_nodes(chances, 15)
        tokens = torch.randperm(9, generator=generator).view(3, 3).tolist()
        evidence = [[Evidence.of(f"stream {j}", rank) for rank in range(3)] for j in range(3)]
        tree = joined(likeliest, tokens, evidence)
        assert tree.survival() == pytest.approx([chance for chance, _ in likeliest])
        assert tree.evidence == [(evidence[node.stream][node.rank],) for _, node in likeliest]
        assert tree.tokens == [tokens[node.stream][node.rank] for _, node in likeliest]


def path(nodes: Any, i: int) -> list[int]:
    ranks: list[int] = []
    while i >= 0:
        ranks, i = [nodes[i].rank, *ranks], nodes[i].parent
    return ranks


def test_a_chance_is_learned_from_what_is_accepted(target: Any) -> None:
    """An oracle of two ranks: the tuner's figures go to what is true."""
    tuner = TreeTuner(StreamingDrafter(num_streams=2, num_candidates=2, tree="product").config, do_sample=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(600):
        nodes = tuner.tree(True, Cost(), 1)
        first = int(torch.rand((), generator=generator) < 0.3)  # rank 0 is right 70% of the time, rank 1 otherwise
        draft = Draft(torch.zeros(1, len(nodes), dtype=torch.long), [len(nodes)], [[n.parent for n in nodes]])
        verdict = Verdict([0], [2], [1], [[0, 0]], [False], 7, 1.0, draft=draft, paths=[[first]])
        tuner.observe(verdict, [nodes])
    assert math.isclose(tuner.chances[0][0], 0.7, abs_tol=0.15) and math.isclose(tuner.chances[0][1], 0.3, abs_tol=0.15)
    assert max(tuner.chances[1]) < 0.05


def test_what_was_never_measured_is_drafted_all_the_same(target: Any) -> None:
    """A table that training had nothing for is taken from the other one."""
    for tables in ({"acceptance": [[0.5, 0.2]] * GAMMA}, {"acceptance_sampled": [[0.5, 0.2]] * GAMMA}, {}):
        for sampled in (False, True):
            tuner = TreeTuner(streams_of(target, **tables).config, sampled)
            assert tuner.chances[0][:2] == ([0.5, 0.2] if tables else [0.5, 0.5 * 0.35]) and tuner.tree(True, Cost(), 1)


def test_a_tree_that_did_not_pay_is_tried_again(target: Any) -> None:
    tuner, cost = TreeTuner(streams_of(target).config, do_sample=False), Cost()
    for _ in range(9):
        for width, seconds in ((1, 0.01), (13, 2.0)):
            cost.observe_forward(1, width, seconds)
    sizes = [len(tuner.tree(True, cost, 1)) for _ in range(200)]
    assert 0 in sizes[10:60] and any(sizes[60:80]) and any(sizes[120:140])
