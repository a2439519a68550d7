"""What verdicts tell of the target's likeliest tokens, and the hybrid's use of it."""

import warnings
from typing import Any

import compare
import pytest
import torch
import toy_drafters as drafters
from continuations import BATCHES
from models import llama, prompts

from hf_specdec import HybridDrafter, SpeculationWarning
from hf_specdec.budget import Acceptance, Evidence, Tree
from hf_specdec.drafters.sources.recycled import FIRST, LEAST, Recycled
from hf_specdec.protocol import Forward, Sequences, Verdict
from hf_specdec.session import DraftSession
from hf_specdec.verify.judging import Judge
from hf_specdec.verify.processing import Processing
from hf_specdec.verify.randomness import Randomness
from hf_specdec.verify.trial import Trial

COUNT = 3


def leading_to(draft: Any, b: int) -> list[list[int]]:
    """The drafted tokens that lead to each node of a row, itself included."""
    found: list[list[int]] = []
    for node, token in enumerate(draft.tokens[b, : draft.lengths[b]].tolist()):
        parent = node - 1 if draft.parents is None else int(draft.parents[b][node])
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


@pytest.mark.grid
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", ["chain", "tree", "draws", "drawn tree"])
@pytest.mark.parametrize("batch", BATCHES)
def test_successors_are_what_the_target_says_behind_each_token(batch: str, shape: str, sampled: bool) -> None:
    """Of every token that was fed, drafted ones that were rejected included; a forward over the text alone agrees."""
    model = llama()
    sides = compare.Sides(model, BATCHES[batch], do_sample=sampled, eos_token_id=None, pad_token_id=0)
    future = drafters.Future(sides.plain)

    def unigram(last: torch.Tensor) -> torch.Tensor:
        return model.lm_head(model.model.embed_tokens(last))

    toy: Any = {
        "chain": lambda: drafters.noisy(future, 4, 97),
        "tree": lambda: drafters.bushy(future, 4, 97),
        "draws": lambda: drafters.with_logits(unigram, 3),
        "drawn tree": lambda: drafters.with_logits(unigram, 3, 2),
    }[shape]()
    seen: list[tuple[list[int], list[int]]] = []
    start = toy.start

    def watched(context: Any) -> DraftSession:
        session = start(context)
        session.likeliest = COUNT
        propose, observe = session.propose, session.observe
        texts: list[list[list[int]]] = []

        def proposing(sequences: Sequences, room: list[int]) -> Any:
            texts[:] = [[list(tokens) for tokens in sequences.tokens]]
            return propose(sequences, room)

        def observing(verdict: Verdict) -> None:
            if any(verdict.drafted):
                for b, told in enumerate(verdict.likeliest):
                    fed = [[], *leading_to(verdict.draft, b)]
                    assert len(told) == len(fed)
                    for (token, found), path in zip(told, fed, strict=True):
                        text = [*texts[0][b], *path]
                        assert token == text[-1]
                        seen.append((text, found))
            observe(verdict)

        session.propose, session.observe = proposing, observing
        return session

    toy.start = watched
    torch.manual_seed(0)
    sides.run(assistant_model=toy)
    assert len(seen) > 20
    for text, found in seen:
        logits = model(torch.tensor([text])).logits[0, -1]
        assert len(found) == COUNT
        torch.testing.assert_close(logits[found], logits.topk(COUNT).values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("wish", [-1, 65, 1.5, "all", None, True])
def test_a_number_of_successors_that_is_none(wish: Any) -> None:
    sides = compare.Sides(llama())
    toy = drafters.noisy(drafters.Future(sides.plain), 4, 97)
    toy.session_class = type("Wishing", (drafters.ToySession,), {"likeliest": wish})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpeculationWarning)
        assert torch.equal(sides.run(assistant_model=toy), sides.plain)
    said = [str(w.message) for w in caught if issubclass(w.category, SpeculationWarning)]
    assert len(said) == 1 and "likeliest" in said[0] and "whole number" in said[0]


def test_more_than_there_are_tokens_is_all_of_them() -> None:
    target, options = llama(vocab=8), {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**prompts([5], 8), **options)
    toy = drafters.noisy(drafters.Future(plain), 4, 8)
    toy.session_class = type("Greedy", (drafters.ToySession,), {"likeliest": 64})
    assert torch.equal(target.generate(**prompts([5], 8), **options, assistant_model=toy), plain)
    (session,) = toy.sessions
    assert all(len(found) == 8 for verdict in session.verdicts for _, found in verdict.likeliest[0])


def test_only_places_that_count_are_told_of() -> None:
    """Of uneven chains the last places of the shorter ones are padding's; pruned nodes have none."""
    text = Sequences(torch.tensor([[5], [5]]), [1, 1], [0, 1], [[5], [5]])
    logits = torch.zeros(2, 3, 9)
    for b in range(2):
        for place in range(3):
            logits[b, place, 3 * b + place] = 1.0

    def behind(answered: Any = None, nodes: Any = None) -> Any:
        draft, judge = drafters.Draft.from_lists([[6, 7]] * 2), Judge(Processing([]), None, False, Randomness(0), None)
        trial = Trial(draft, Forward(logits, nodes), text, answered, successors=1)
        return [result.likeliest for result in judge.verify(trial)]

    whole = [(5, [3]), (6, [4]), (7, [5])]
    assert behind() == [[(5, [0]), (6, [1]), (7, [2])], whole]
    assert behind([1, 2]) == [[(5, [0]), (6, [1])], whole]
    assert behind(nodes=torch.tensor([[1, -1], [0, 1]])) == [[(5, [0]), (7, [1])], whole]


def context(**more: Any) -> Any:
    return type("Host", (), {"eos_token_ids": frozenset({9}), "forbids": None, "vocab_size": 97, **more})


def told(pairs: dict[int, list[int]], stopped: bool = False) -> Verdict:
    return Verdict([0], [0], [0], [[1]], [stopped], 1, 1.0, likeliest=[list(pairs.items())])


def joined(recycled: Recycled, last: int, room: int = 5) -> Tree:
    tree = Tree()
    recycled.join([tree], Sequences(torch.tensor([[last]]), [1], [0], [[last]]), [room])
    return tree


def test_what_stood_behind_a_token_last_is_thought_of_when_it_comes_again() -> None:
    recycled = Recycled(context(), Acceptance(), 2)
    recycled.observe(told({5: [6, 7], 6: [8, 5]}))
    recycled.observe(told({5: [4, 7]}))
    tree = joined(recycled, 5)
    assert [tree.tokens[node] for node in tree.children(-1)] == [4, 7]
    assert tree.chances == [FIRST, FIRST / 2]
    assert not len(joined(recycled, 3)) and not len(joined(recycled, 5, room=0))


def test_behind_the_end_of_a_text_nothing_is_thought_of() -> None:
    recycled = Recycled(context(), Acceptance(), 1)
    recycled.observe(told({5: [9], 9: [5]}))
    assert joined(recycled, 5).tokens == [9] and not len(joined(recycled, 9))


def test_chains_of_successors_end_where_hardly_anything_gets() -> None:
    """A token that follows itself: without a bound the tree would be as deep as there is room."""
    acceptance = Acceptance()
    recycled = Recycled(context(), acceptance, 1)
    recycled.observe(told({5: [5]}))
    depth = len(joined(recycled, 5, room=99))
    assert FIRST ** (depth - 1) >= LEAST > FIRST**depth
    for _ in range(500):
        acceptance.observe(Evidence.of(Recycled.name), True)
    assert len(joined(recycled, 5, room=40)) == 40


def test_rows_that_have_ended_are_forgotten() -> None:
    recycled = Recycled(context(), Acceptance(), 1)
    recycled.observe(told({5: [6]}))
    recycled.observe(told({7: [8]}, stopped=True))
    assert not recycled.known


def test_a_draft_model_that_is_never_right_is_helped_out() -> None:
    """The target repeats itself in pairs of tokens that no copy has told of yet; plain text all the same."""
    target, options = (
        llama(vocab=8),
        {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "pad_token_id": 0},
    )
    accepted = {}
    for recycled in (0, 4):
        drafter = HybridDrafter(llama(vocab=8, seed=1), num_recycled=recycled, num_draft_tokens=1, num_candidates=1)
        counted = 0
        for seed in range(4):
            inputs = prompts([4, 9], 8, seed=seed)
            plain = target.generate(**inputs, **options)
            assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), plain)
            counted += drafter.last_stats.accepted_tokens
        assert (recycled > 0) is any(Recycled.name in name for name in drafter.last_stats.sources)
        accepted[recycled] = counted
    assert accepted[4] > accepted[0]
