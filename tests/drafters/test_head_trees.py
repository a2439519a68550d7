"""Heads propose trees, alone and joined by copies, in `generate` and for rows that come and go."""

import functools
import itertools
import math
from typing import Any

import models
import pytest
import torch
from batch_requests import REQUESTS, TARGET, plain, texts
from head_pairs import HEADS, LENGTHS, PAIRS, SMALL, drafting_goes_on, small
from heads_alone import first_candidates
from sampled_triples import FEWER, LEVEL, NEW, PROMPT, SETTINGS, VOCAB, joint, p_value, sample
from toy_heads import ToyHeadDrafter

from hf_specdec import (
    BatchDecoder,
    Drafter,
    DraftModelDrafter,
    HybridDrafter,
    MtpDrafter,
    PearlDrafter,
    PromptLookupDrafter,
    SpeculationError,
)
from hf_specdec.budget import MOST_NODES
from hf_specdec.drafters.heads.steps import HeadSteps
from hf_specdec.drafters.trees import TreeSession
from hf_specdec.protocol import Draft

__all__ = ["drafting_goes_on", "small"]
pytestmark = pytest.mark.usefixtures("no_decoder_is_left")
ANSWERS = 1_000
KINDS: dict[str, Any] = {"alone": lambda head: head, "with copies": HybridDrafter}


def repeating(lengths: list[int]) -> dict[str, Any]:
    """Prompts whose second half is the first, so that there is something to copy."""
    inputs = models.prompts(lengths)
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        n = int(mask.sum()) // 2
        if n:
            ids[-n:] = ids[-2 * n : -n]
    return inputs


def known(target: Any, inputs: dict[str, Any], new: int) -> tuple[list[list[int]], Any]:
    """Plain decoding's texts without padding, and its output."""
    out = target.generate(**inputs, max_new_tokens=new, do_sample=False, pad_token_id=0)
    starts = inputs["attention_mask"].argmax(1).tolist()
    return [row[start:] for row, start in zip(out.tolist(), starts, strict=True)], out


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [0, 2])
@pytest.mark.parametrize("right", [True, False], ids=["oracle", "adversary"])
@pytest.mark.parametrize("lengths", [[9], [9, 4, 7, 12]], ids=str)
def test_heads_read_the_targets_states(lengths: list[int], right: bool, again: int, kind: str) -> None:
    target, inputs = models.llama(), repeating(lengths)
    said, out = known(target, inputs, 40)
    head = ToyHeadDrafter(said, right, again=again)
    drafter = KINDS[kind](head)
    ours = target.generate(**inputs, max_new_tokens=40, do_sample=False, pad_token_id=0, assistant_model=drafter)
    assert torch.equal(ours, out)
    assert drafter.last_stats.accepted_tokens > 20 * len(lengths) if right else head.rows
    assert not any("dropped" in note for note in drafter.last_stats.notes), drafter.last_stats.notes


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [0, 2])
@pytest.mark.parametrize("right", [True, False], ids=["oracle", "adversary"])
@pytest.mark.parametrize("rows", [1, 4])
def test_rows_that_come_and_go(rows: int, right: bool, again: int, kind: str) -> None:
    asked = list(zip(texts(), [new for _, new in REQUESTS], strict=True))
    said = [ids + plain(TARGET, ids, new) for ids, new in asked]
    head = ToyHeadDrafter(said, right, again=again)
    with BatchDecoder(TARGET, KINDS[kind](head), max_rows=rows) as decoder:
        answers = [decoder.submit(ids, max_new_tokens=new, do_sample=False) for ids, new in asked]
        for answer, ids, text in zip(answers, texts(), said, strict=True):
            assert answer.result(60) == text[len(ids) :]
    assert not any("dropped" in note for note in decoder.stats.notes), decoder.stats.notes
    assert decoder.stats.drafted_tokens and (max(head.rows) > 1) is (rows > 1)
    assert decoder.stats.accepted_tokens > 40 or not right


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("pair", PAIRS)
def test_real_heads_for_rows_that_come_and_go(pair: str, rows: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft is what the heads draft over that row's text alone."""
    target, head = PAIRS[pair]()
    asked = [(ids, new) for ids, (_, new) in zip(texts(), REQUESTS, strict=True) if len(ids) > 1][:6]
    said = [ids + plain(target, ids, new) for ids, new in asked]
    drafts: list[tuple[list[int], list[int]]] = []
    propose = TreeSession.propose

    def recording(self: Any, sequences: Any, room: list[int]) -> Draft:
        _, firsts = first_candidates(propose, self, sequences, room)
        fed = []
        for b, tokens in enumerate(sequences.tokens):
            if firsts[b]:
                drafts.append((list(tokens), firsts[b]))
            text = next(text for text in said if text[: len(tokens)] == list(tokens))
            right = len(tokens) % 3
            fed.append([*text[len(tokens) :][:right], 1, 2][: room[b]])
        return Draft.from_lists(fed)

    monkeypatch.setattr(TreeSession, "propose", recording)
    with BatchDecoder(target, KINDS[kind](head), max_rows=rows) as decoder:
        answers = [decoder.submit(ids, max_new_tokens=new, do_sample=False) for ids, new in asked]
        for answer, (ids, _), text in zip(answers, asked, said, strict=True):
            assert answer.result(60) == text[len(ids) :]
    assert len(drafts) > 20 and not any("dropped" in note for note in decoder.stats.notes), decoder.stats.notes
    for text, drafted in drafts:
        assert drafted == HEADS[type(head)].alone(target, head, torch.tensor([text]))[: len(drafted)]


@pytest.mark.grid
@pytest.mark.parametrize("forwards", ["eager", "captured"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_greedy_text_with_copies_is_the_targets(pair: str, lengths: list[int], forwards: str) -> None:
    target, head = PAIRS[pair]()
    inputs = repeating(lengths) | {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0}
    plainly, drafter = target.generate(**inputs), HybridDrafter(head)
    for _ in range(2):
        ours = target.generate(**inputs, assistant_model=drafter, speculation={"forwards": forwards})
        assert torch.equal(ours, plainly)
    assert drafter.last_stats is not None and drafter.last_stats.draft_calls > 0
    assert any(head.config.drafter_type in name for name in drafter.last_stats.sources)


@pytest.mark.eager
@pytest.mark.parametrize("pair", ["GLM-4-MoE, 3", "EAGLE-3, SafeAILab"])
def test_a_draft_is_a_chain_and_what_is_likely_beside_it(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = PAIRS[pair]()
    seen: list[int] = []
    propose = TreeSession.propose

    def looking(self: Any, sequences: Any, room: list[int]) -> Draft:
        draft = propose(self, sequences, room)
        for tree, chain, offered in [(each.tree, each.chain, each.offered) for each in self.grown]:
            nodes = tree.along(chain)
            assert len(nodes) == len(chain)
            assert {tree.parents[node] for node in offered} <= {-1, *nodes}, "nothing stands behind a second choice"
            seen.append(len(offered) - len(nodes))
        return draft

    monkeypatch.setattr(TreeSession, "propose", looking)
    options = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    target.generate(**models.prompts([9]), **options, assistant_model=head)
    assert max(seen) >= 6


@pytest.mark.eager
@pytest.mark.parametrize("lengths", [[9], [9, 4, 7, 12]], ids=str)
def test_a_draft_of_a_block_is_its_likeliest_nodes(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against all paths of candidates, sorted by the product of their chances. Nothing stands behind an end."""
    target, head = PAIRS["DFlash, mixed"]()
    inputs = models.prompts(lengths)
    end = int(target.generate(**inputs, do_sample=False, max_new_tokens=20, pad_token_id=0)[0, -1])
    steps: list[Any] = []
    compared: list[int] = []
    several, propose = HeadSteps.several, TreeSession.propose

    def noting(self: Any, count: int) -> Any:
        steps.append(several(self, count))
        return steps[-1]

    def comparing(self: Any, sequences: Any, room: list[int]) -> Draft:
        steps.clear()
        draft = propose(self, sequences, room)
        for b, (tree, offered) in enumerate((each.tree, each.offered) for each in self.grown):
            places = [
                place
                for found in steps
                for place in zip(found.tokens[b].tolist(), found.chances[b].tolist(), strict=True)
            ][: room[b]]
            chance = {
                (i, token): self.acceptance.calibrated([self.steps.said(i, rank)], [estimate])[0][1]
                for i, place in enumerate(places)
                for rank, (token, estimate) in enumerate(zip(*place, strict=True))
            }
            paths = [
                path for i in range(len(places)) for path in itertools.product(*(place[0] for place in places[: i + 1]))
            ]
            paths = [path for path in paths if end not in path[:-1]]
            likeliest = sorted((math.prod(chance[at] for at in enumerate(path)) for path in paths), reverse=True)
            survival = tree.survival()
            assert [survival[node] for node in offered] == pytest.approx(likeliest[:MOST_NODES])
            for node in offered:
                assert survival[node] == pytest.approx(math.prod(chance[at] for at in enumerate(tree.text(node))))
            compared.append(len(offered))
        return draft

    monkeypatch.setattr(HeadSteps, "several", noting)
    monkeypatch.setattr(TreeSession, "propose", comparing)
    target.generate(
        **inputs, do_sample=False, max_new_tokens=20, pad_token_id=0, eos_token_id=end, assistant_model=head
    )
    assert not any("dropped" in note for note in head.last_stats.notes), head.last_stats.notes
    assert max(compared) == MOST_NODES and len(set(compared)) > 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[9], [9, 4, 7, 12]], ids=str)
@pytest.mark.usefixtures("width_costs_nothing")
def test_behind_second_choices_of_a_block_more_is_accepted(lengths: list[int], kind: str) -> None:
    """Whether anything is drafted there is no matter to the text."""
    target, inputs = models.llama(), models.prompts(lengths)
    said, out = known(target, inputs, 40)
    call = inputs | {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    accepted = []
    for independent in (False, True):
        drafter = KINDS[kind](ToyHeadDrafter(said, gamma=6, doubts=True, independent=independent))
        assert torch.equal(target.generate(**call, assistant_model=drafter), out)
        accepted.append(drafter.last_stats.accepted_tokens / drafter.last_stats.target_calls)
    assert accepted[1] > 1.5 * accepted[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 4])
def test_blocks_for_rows_that_come_and_go(rows: int, kind: str) -> None:
    asked = list(zip(texts(), [new for _, new in REQUESTS], strict=True))
    said = [ids + plain(TARGET, ids, new) for ids, new in asked]
    head = ToyHeadDrafter(said, gamma=5, doubts=True, independent=True)
    with BatchDecoder(TARGET, KINDS[kind](head), max_rows=rows) as decoder:
        answers = [decoder.submit(ids, max_new_tokens=new, do_sample=False) for ids, new in asked]
        for answer, ids, text in zip(answers, texts(), said, strict=True):
            assert answer.result(60) == text[len(ids) :]
    assert not any("dropped" in note for note in decoder.stats.notes), decoder.stats.notes
    assert decoder.stats.accepted_tokens > 20


@pytest.mark.grid
@pytest.mark.parametrize("settings", ["temperature", "penalties"])
@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.usefixtures("width_costs_nothing")
def test_sampled_text_with_copies_has_the_targets_distribution(small: Any, kind: str, settings: str) -> None:
    """The power is that of test_distribution's tests."""
    told, processors = SETTINGS[settings]
    drafter = HybridDrafter(SMALL[kind](small))
    counts = sample(small, drafter, FEWER, **told)
    assert drafter.last_stats is not None and drafter.last_stats.accepted_tokens > 0 < drafter.last_stats.rejections
    assert p_value(counts, joint(small, processors)) > LEVEL


@pytest.mark.grid
@pytest.mark.parametrize("way", KINDS)
@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.usefixtures("width_costs_nothing")
def test_rows_that_come_and_go_are_drawn_from_the_targets_distribution(small: Any, kind: str, way: str) -> None:
    """A χ² distance of 0.2 is seen in 999 of 1,000 tests (by the formula of test_the_power_is_as_stated)."""
    told, processors = SETTINGS["temperature"]
    torch.manual_seed(0)
    with BatchDecoder(small, KINDS[way](SMALL[kind](small)), max_rows=64, max_waiting=ANSWERS) as decoder:
        options = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0} | told
        answers = [decoder.submit(PROMPT[0].tolist(), **options) for _ in range(ANSWERS)]
        said = torch.tensor([answer.result(120)[-3:] for answer in answers])
    assert decoder.stats.accepted_tokens and decoder.stats.rejections
    cells = said @ torch.tensor([VOCAB**2, VOCAB, 1])
    assert p_value(torch.bincount(cells, minlength=VOCAB**3), joint(small, processors)) > LEVEL


def calls(target: Any, drafter: Any, **inputs: Any) -> int:
    """Of the target, once what can be learned was learned."""
    for _ in range(2):
        target.generate(**inputs, max_new_tokens=60, do_sample=False, pad_token_id=0, assistant_model=drafter)
    return drafter.last_stats.target_calls


@pytest.mark.parametrize("right", [True, False], ids=["oracle", "adversary"])
@pytest.mark.usefixtures("width_costs_nothing")
def test_copies_and_a_head_need_no_more_calls_than_either(right: bool) -> None:
    """A text of a small vocabulary repeats itself."""
    target = models.llama(vocab=8)
    inputs = models.prompts([12], 8)
    said, _ = known(target, inputs, 60)
    made = functools.partial(ToyHeadDrafter, said, right)
    both = calls(target, HybridDrafter(made()), **inputs)
    assert both <= calls(target, made(), **inputs)
    assert both <= calls(target, PromptLookupDrafter(), **inputs)


@pytest.mark.usefixtures("width_costs_nothing")
def test_an_oracle_accepts_no_less_with_copies() -> None:
    target = models.llama()
    inputs = repeating([14])
    said, _ = known(target, inputs, 60)
    alone, both = ToyHeadDrafter(said), HybridDrafter(ToyHeadDrafter(said))
    assert calls(target, both, **inputs) <= calls(target, alone, **inputs)


@pytest.mark.parametrize("pair", ["DFlash, mixed", "published DFlash, full", "EAGLE-3, speculators"])
def test_a_head_within_a_hybrid_is_saved_and_loaded(pair: str, tmp_path: Any) -> None:
    target, head = PAIRS[pair]()
    HybridDrafter(head, num_branches=2).save_pretrained(tmp_path, target=target)
    loaded = Drafter.from_pretrained(tmp_path)
    assert isinstance(loaded, HybridDrafter) and loaded.config.num_branches == 2
    inputs = models.prompts([9]) | {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    assert torch.equal(target.generate(**inputs, assistant_model=loaded), target.generate(**inputs))
    assert loaded.last_stats is not None and loaded.last_stats.draft_calls > 0
    flag = {"speculation_type": "hybrid", "speculation": {"drafter": str(tmp_path)}}
    assert torch.equal(target.generate(**inputs, **flag), target.generate(**inputs))
    named = {"speculation_type": "hybrid", "assistant_model": head.draft_model}
    assert torch.equal(target.generate(**inputs, **named), target.generate(**inputs))


@pytest.mark.parametrize("pair", ["DFlash, mixed", "published DFlash, full", "EAGLE-3, speculators"])
@pytest.mark.parametrize("drafter", [DraftModelDrafter, PearlDrafter])
def test_a_head_is_no_draft_model_by_itself(drafter: Any, pair: str) -> None:
    head = PAIRS[pair]()[1]
    with pytest.raises(SpeculationError, match=f"not by itself; use {type(head).__name__} or HybridDrafter"):
        drafter(head.draft_model)


def test_layers_of_the_target_are_not_saved(tmp_path: Any) -> None:
    with pytest.raises(SpeculationError, match=r"HybridDrafter\(MtpDrafter\(\)\) cannot be saved"):
        HybridDrafter(MtpDrafter()).save_pretrained(tmp_path)


def test_a_head_that_was_not_made_for_the_target_is_refused() -> None:
    with pytest.raises(SpeculationError, match="has no layers for multi-token prediction"):
        models.llama().generate(**models.prompts([5]), assistant_model=HybridDrafter(MtpDrafter()), max_new_tokens=3)
