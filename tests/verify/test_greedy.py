"""What is found with a recorded forward is what the host would find in its logits."""

import random

import pytest
import torch
from models import llama

from hf_specdec.protocol import FedTree
from hf_specdec.target.buffers import Buffers
from hf_specdec.target.inbox import Inbox
from hf_specdec.target.masks import tree_shape
from hf_specdec.verify.greedy import GreedyFinder, Told
from hf_specdec.verify.verification import follow

VOCAB, WIDTH, ROWS = 3, 16, 4


@pytest.fixture(scope="module")
def buffers() -> Buffers:
    model, ids = llama(), torch.zeros(1, 2, dtype=torch.long)
    return Buffers(model(ids, use_cache=True).past_key_values, ROWS, 64, torch.device("cpu"))


def drafts(seed: int, is_tree: bool) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Tokens that are fed, with equal siblings among them, the parents of each, and how many count."""
    draw = random.Random(seed)
    width = draw.randint(1, WIDTH)
    tokens = [[draw.randrange(VOCAB) for _ in range(width)] for _ in range(ROWS - 1)]
    parents = [[draw.randint(max(0, i - 4), i - 1) if is_tree and i else i - 1 for i in range(width)] for _ in tokens]
    return tokens, [[-1, *row[1:]] for row in parents], [draw.randint(0, width - 1) for _ in tokens]


@pytest.mark.parametrize("is_tree", [True, False], ids=["tree", "chain"])
def test_accepted_nodes_are_those_of_the_walk(is_tree: bool, buffers: Buffers) -> None:
    longest = 0
    for seed in range(150):
        tokens, parents, counted = drafts(seed, is_tree)
        inbox = Inbox.of(buffers, WIDTH, is_tree, True)
        inbox.fill(tokens, [0] * ROWS, counted, parents if is_tree else None)
        logits = torch.rand(ROWS, WIDTH, VOCAB, generator=torch.Generator().manual_seed(seed))
        choices = logits.argmax(-1).tolist()
        found = GreedyFinder(VOCAB, 2)(logits, inbox.tokens, inbox.counted, inbox.tree())
        for b, (fed, above, count) in enumerate(zip(tokens, parents, counted, strict=True)):
            told = Told.of(found.told[b].tolist(), WIDTH)
            nodes = [parent - 1 for parent in above[1 : count + 1]] if is_tree else None
            path = follow(fed[1 : count + 1], nodes, choices[b][: count + 1])
            kept = [0, *(node + 1 for node in path)]
            assert told.sound and told.path == path and int(found.n[b]) == len(path)
            assert told.tokens == [choices[b][place] for place in kept]
            assert told.drafted[: len(fed) - 1] == fed[1:]
            assert found.kept[b].tolist()[: len(kept)] == kept
            assert found.last[b].tolist() == [fed[0], *told.tokens][-2:]
            assert told.likeliest == logits[b].topk(2)[1].flatten().tolist()
            longest = max(longest, len(path))
    assert longest >= 3


def test_of_an_unsound_draft_nothing_is_accepted(buffers: Buffers) -> None:
    logits = torch.zeros(ROWS, 4, VOCAB)
    for wrong in (-1, VOCAB):
        inbox = Inbox.of(buffers, 4, False, True)
        inbox.fill([[0, 0, 0, 0], [0, 0, wrong, 0]], [0] * ROWS, [3, 2], None)
        told = GreedyFinder(VOCAB)(logits, inbox.tokens, inbox.counted, None).told
        assert [Told.of(row, 4)[:3] for row in told[:2].tolist()] == [(False, [], [0])] * 2
        inbox.fill([[0, 0, 0, 0], [0, 0, wrong, 0]], [0] * ROWS, [3, 1], None)  # it is not counted
        told = GreedyFinder(VOCAB)(logits, inbox.tokens, inbox.counted, None).told
        assert [Told.of(row, 4).path for row in told[:2].tolist()] == [[0, 1, 2], [0]]


def test_who_sees_whom_is_found_from_the_parents(buffers: Buffers) -> None:
    for seed in range(40):
        tokens, parents, _ = drafts(seed, True)
        roots = [[parent if (i + seed) % 7 else -1 for i, parent in enumerate(row)] for row in parents]
        inbox = Inbox.of(buffers, WIDTH, True, True)
        inbox.fill(tokens, [0] * ROWS, [], roots)
        tree = inbox.tree()
        assert isinstance(tree, FedTree)
        filled = [row + [0] * (WIDTH - len(row)) for row in roots]
        seen, depth = tree_shape(filled, torch.device("cpu"))
        assert torch.equal(tree.seen[: len(roots)], seen) and torch.equal(tree.depth[: len(roots)], depth)
