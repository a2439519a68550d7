"""Speculative Streaming: which tokens of which streams are drafted."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy_drafters as drafters
from stream_models import GAMMA, streams_of, target_of

from hf_specdec.budget import Cost
from hf_specdec.drafters.nodes import Node, likeliest_nodes
from hf_specdec.drafters.trees import TreeSession
from hf_specdec.protocol import Draft, Sequences, Verdict


@pytest.fixture(scope="module")
def target() -> Any:
    return target_of("Llama")


def product_of(places: int, ranks: int) -> list[Node]:
    """Every candidate of each place behind every one of the place before."""
    nodes: list[Node] = []
    above = [-1]
    for place in range(places):
        level = [Node(parent, place, rank) for parent in above for rank in range(ranks)]
        above = list(range(len(nodes), len(nodes) + len(level)))
        nodes += level
    return nodes


def test_the_likeliest_nodes_are_the_likeliest() -> None:
    """Against all nodes of the product, sorted by the product of their chances."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        chances = torch.rand(3, 3, generator=generator).div(3).tolist()
        nodes = product_of(3, 3)
        value: list[float] = []
        for node in nodes:
            value.append(chances[node.place][node.rank] * (value[node.parent] if node.parent >= 0 else 1.0))
        found = likeliest_nodes(chances, 12)
        assert [round(v, 12) for v, _ in found] == [round(v, 12) for v in sorted(value, reverse=True)[:12]]
        assert all(node.parent < i for i, (_, node) in enumerate(found))


@pytest.mark.parametrize("closed", [{1, 2}, {0}, {(1, 0), (0, 2)}], ids=str)
def test_nothing_stands_behind_what_does_not_go_on(closed: set[Any]) -> None:
    """Candidates of some ranks, or of some places and ranks."""

    def goes_on(node: Node) -> bool:
        return closed.isdisjoint({node.rank, (node.place, node.rank)})

    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        chances = torch.rand(3, 3, generator=generator).div(3).tolist()
        value: dict[int, float] = {-1: 1.0}
        for i, node in enumerate(nodes := product_of(3, 3)):
            if node.parent < 0 or (node.parent in value and goes_on(nodes[node.parent])):
                value[i] = value[node.parent] * chances[node.place][node.rank]
        found = likeliest_nodes(chances, 12, goes_on)
        del value[-1]
        assert [v for v, _ in found] == pytest.approx(sorted(value.values(), reverse=True)[:12])
        assert all(node.parent < 0 or goes_on(found[node.parent][1]) for _, node in found)


def path(nodes: list[Node], i: int) -> list[int]:
    ranks: list[int] = []
    while i >= 0:
        ranks, i = [nodes[i].rank, *ranks], nodes[i].parent
    return ranks


def session_of(target: Any, trees: bool = True, rows: int = 1, **options: Any) -> TreeSession:
    """One that does not look at what streams say."""
    prompt = torch.ones(rows, 3, dtype=torch.long)
    context = drafters.context(target=target, trees=trees, prompt_ids=prompt, prompt_mask=prompt)
    session: Any = streams_of(target, copies=False, **options).start(context)
    session.seen, steps = False, session.steps
    steps._runner = SimpleNamespace(rides=False, states=None, streams_at=lambda ends: ends)
    steps.ends, steps.rows = torch.zeros(rows, steps.streams.gamma, 32), list(range(rows))
    return session


def unseen(session: TreeSession, rows: int = 1) -> list[Node]:
    """The nodes of a round, whatever they say."""
    text = [[3, 5, 8]] * rows
    with torch.no_grad():
        session.propose(Sequences(torch.tensor(text), [3] * rows, list(range(rows)), text), [9] * rows)
    return list(session.unseen)


def judged(session: TreeSession, nodes: Any, path: list[int], lengths: int | None = None, kept: Any = None) -> None:
    """The session is told what became of nodes that were drafted before their tokens were seen."""
    length = len(nodes) if lengths is None else lengths
    draft = Draft(torch.zeros(1, len(nodes), dtype=torch.long), [length], [[n.parent for n in nodes]])
    tokens = [[0] * (len(path) + 1)]
    verdict = Verdict([0], [2], [len(path)], tokens, [False], 7, 1.0, draft=draft, paths=[path], nodes=kept)
    session.unseen = nodes
    session.observe(verdict)


def chances(session: Any) -> list[list[float]]:
    steps = session.steps

    def chance(place: int, rank: int) -> float:
        return session.acceptance.chance(steps.evidence(place, rank)[-1], steps.guess(place, rank))

    return [[chance(place, rank) for rank in range(steps.candidates)] for place in range(steps.streams.gamma)]


def test_a_chance_is_learned_from_what_is_accepted(target: Any) -> None:
    """An oracle of two ranks: the figures go to what is true."""
    session = session_of(target, num_streams=2, num_candidates=2, num_nodes=6)
    generator = torch.Generator().manual_seed(0)
    nodes = unseen(session)
    product = product_of(2, 2)
    assert {tuple(path(nodes, i)) for i in range(6)} == {tuple(path(product, i)) for i in range(6)}
    roots = [i for i, node in enumerate(nodes) if node.parent < 0]
    for _ in range(600):
        first = int(torch.rand((), generator=generator) < 0.3)  # rank 0 is right 70% of the time, rank 1 otherwise
        judged(session, nodes, [roots[first]])
    learned = chances(session)
    assert math.isclose(learned[0][0], 0.7, abs_tol=0.15) and math.isclose(learned[0][1], 0.3, abs_tol=0.15)
    assert max(learned[1]) < 0.05


def test_what_was_not_verified_teaches_nothing(target: Any) -> None:
    """Nodes that were cut, and those behind a node that was pruned in mid-forward."""
    for how in ({"lengths": 1}, {"kept": torch.tensor([[-1, 1, -1, -1, -1, -1]])}):
        session = session_of(target, num_streams=2, num_candidates=2, num_nodes=6)
        before, nodes = chances(session), unseen(session)
        for _ in range(20):
            judged(session, nodes, [0], **how)
        assert chances(session)[1] == before[1] and chances(session)[0][0] > before[0][0]


def test_what_was_never_measured_is_drafted_all_the_same(target: Any) -> None:
    """A table that training had nothing for is taken from the other one."""
    for tables in ({"acceptance": [[0.5, 0.2]] * GAMMA}, {"acceptance_sampled": [[0.5, 0.2]] * GAMMA}, {}):
        config = streams_of(target, **tables).config
        for sampled in (False, True):
            assert config.shares(sampled)[0][:2] == ([0.5, 0.2] if tables else [0.5, 0.5 * 0.35])
        assert unseen(session_of(target, **tables))


@pytest.mark.parametrize("rows", [1, 4])
def test_without_trees_the_likeliest_chain_is_drafted(target: Any, rows: int) -> None:
    """As far as it pays, or as far as the user says."""
    tables = {"acceptance": [[0.9, 0.05]] * GAMMA}
    for count, expected in (("auto", GAMMA), (2, 2), (0, 0), (9, GAMMA)):
        session = session_of(target, trees=False, rows=rows, num_nodes=count, **tables)
        session.context.cost = wide_forwards(rows, 0.01)
        assert unseen(session, rows) == product_of(GAMMA, 1)[:expected]
    session = session_of(target, trees=False, rows=rows, **tables)
    session.context.cost = wide_forwards(rows, 2.0)
    assert session.control is not None
    for _ in range(2):
        session.control.cost.observe(GAMMA, 1e-5, 1e-5)
    assert not unseen(session, rows)


def wide_forwards(rows: int, seconds: float) -> Cost:
    """Of a target that takes 10 ms for one token in a row, and so many seconds for more."""
    cost = Cost()
    for _ in range(9):
        for width, each in ((13, seconds), (7, seconds), (1, 0.01)):
            cost.observe_forward(rows, width, each)
    return cost
