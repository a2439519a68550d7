"""Beam search: transformers' own sequences and scores, in fewer calls of the target."""

from typing import Any

import models
import pytest
import torch
from close_drafts import close_to

from hf_specdec import DraftModelDrafter, HybridDrafter, PromptLookupDrafter, SpeculationError
from hf_specdec.drafters.beams import recalled
from hf_specdec.drafters.beams import search as beam_search
from hf_specdec.drafters.beams.recalled import SHARES, Recalled
from hf_specdec.drafters.beams.tree import TreeModel
from hf_specdec.stats import text_length

MODEL = models.llama(seed=1)
DRAFT = close_to(MODEL, 0.02)
FAR = models.llama(seed=5)


def search(
    drafter: Any = None, lengths: list[int] | None = None, seed: int = 0, model: Any = MODEL, **options: Any
) -> Any:
    defaults = {"max_new_tokens": 16, "num_beams": 4, "do_sample": False, "pad_token_id": 0}
    asked = {"return_dict_in_generate": True, "output_scores": True}
    batch = models.prompts(lengths or [9], seed=seed)
    torch.manual_seed(0)
    return model.generate(**batch, assistant_model=drafter, **defaults | asked | options)


def same(ours: Any, plain: Any) -> None:
    assert torch.equal(ours.sequences, plain.sequences)
    torch.testing.assert_close(ours.sequences_scores, plain.sequences_scores, atol=1e-4, rtol=1e-4)
    assert len(ours.scores) == len(plain.scores)
    assert torch.equal(ours.beam_indices, plain.beam_indices)


@pytest.mark.grid
@pytest.mark.parametrize("beams", [2, 4, 8])
@pytest.mark.parametrize("lengths", [[9], [9, 5, 7]])
@pytest.mark.parametrize("draft", [DRAFT, FAR], ids=["near", "far"])
def test_sequences_and_scores_are_transformers(draft: Any, lengths: list[int], beams: int) -> None:
    ends = [int(token) for token in search(None, lengths, num_beams=beams).sequences[0, -3:-1]]
    for options in (
        {},
        {"eos_token_id": ends},
        {"eos_token_id": ends, "early_stopping": True, "length_penalty": 2.0},
        {"num_return_sequences": 2, "repetition_penalty": 1.3},
        {"do_sample": True, "temperature": 1.5, "top_k": 20},
        {"max_new_tokens": 1},
    ):
        plain = search(None, lengths, num_beams=beams, **options)
        drafter = DraftModelDrafter(draft, num_draft_tokens=3)
        same(search(drafter, lengths, num_beams=beams, **options), plain)
        assert drafter.last_stats.mode == "beams"


def test_what_is_counted() -> None:
    """Tokens of all rows without what stands behind their ends; verifications, and the steps that they saved."""
    ends = search(None, [9, 5], seed=3).sequences[0, -9:-7].tolist()
    drafter = DraftModelDrafter(close_to(MODEL, 0.005), num_draft_tokens=3)
    output = search(drafter, [9, 5], seed=3, eos_token_id=ends, num_return_sequences=2)
    texts = [text[9:] for text in output.sequences.tolist()]
    whole = [next((i for i, token in enumerate(text, 1) if token in ends), len(text)) for text in texts]
    stats = drafter.last_stats
    assert stats is not None and len(set(whole)) > 1
    assert stats.emitted_tokens == sum(whole)
    assert stats.row_steps == stats.target_calls - 1
    assert stats.plain_steps == stats.row_steps + stats.accepted_tokens


def test_the_length_of_a_text() -> None:
    for text, length in (([5, 0, 7, 0, 0], 3), ([5, 2, 0, 0], 2), ([5, 0, 2, 0], 3), ([0, 0], 0), ([5, 6], 2)):
        assert text_length(text, {2}, 0) == length
    assert text_length([5, 0], set(), None) == 2 and text_length([5, 2, 2], {2}, 2) == 2


@pytest.mark.slow
def test_a_hundred_prompts_take_fewer_calls() -> None:
    """A draft near the target: 1.5 times fewer."""
    calls = steps = 0
    drafter = DraftModelDrafter(close_to(MODEL, 0.005), num_draft_tokens=4)
    for seed in range(25):
        lengths = [9, 5, 7, 3]
        same(search(drafter, lengths, seed), search(None, lengths, seed))
        calls += drafter.last_stats.target_calls
        steps += 1 + drafter.last_stats.plain_steps
    assert steps > 1.5 * calls


def test_the_output_is_a_tensor_where_nobody_asked_for_more() -> None:
    plain = search(None, return_dict_in_generate=False, output_scores=False)
    assert torch.equal(search(HybridDrafter(DRAFT), return_dict_in_generate=False, output_scores=False), plain)


@pytest.mark.parametrize("name", ["Qwen3", "GPT-2", "OPT", "OLMo2"])
def test_other_families(name: str) -> None:
    model = models.build(name)
    drafter = DraftModelDrafter(model, num_draft_tokens=3)
    same(search(drafter, [9, 5], model=model), search(None, [9, 5], model=model))
    assert drafter.last_stats.target_calls < 8


def test_a_draft_that_fails_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    read, calls = TreeModel.read, []

    def failing(self: Any, nodes: Any) -> Any:
        calls.append(self.model is DRAFT)
        if sum(calls) == 3 and calls[-1]:
            raise RuntimeError("dead")
        return read(self, nodes)

    monkeypatch.setattr(TreeModel, "read", failing)
    with pytest.warns(UserWarning, match="dead"):
        same(search(DraftModelDrafter(DRAFT)), search())


@pytest.mark.parametrize("more", [{}, {"stop_strings": ["ab", "b c"]}], ids=["tokenizer", "stop strings"])
def test_a_tokenizer_is_no_input_of_the_models(more: dict[str, Any]) -> None:
    options = {"tokenizer": models.tokenizer(), "num_beams": 3} | more
    drafter = DraftModelDrafter(DRAFT)
    same(search(drafter, **options), search(**options))
    assert drafter.last_stats is not None and drafter.last_stats.accepted_tokens


def test_the_target_is_not_touched() -> None:
    before, kind = dict(vars(MODEL)), type(MODEL)
    search(DraftModelDrafter(DRAFT))
    assert type(MODEL) is kind
    assert vars(MODEL).keys() == before.keys()


@pytest.mark.parametrize(
    ("drafter", "options", "words"),
    [
        (PromptLookupDrafter(), {}, "draft model"),
        (DraftModelDrafter(DRAFT), {"output_attentions": True}, "output_attentions are not supported"),
        (DraftModelDrafter(DRAFT), {"speculation": {"lenience": 0.5}}, "lenience=0.5 does not work with beam search"),
    ],
)
def test_what_beams_cannot_have_is_refused(drafter: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpeculationError, match=words):
        search(drafter, **options)


def test_a_tree_is_read_as_its_texts_are() -> None:
    """Logits behind every node are those of a forward over its text, also after most of the tree was forgotten."""
    batch = models.prompts([9, 5])
    with torch.no_grad():
        tree = TreeModel(MODEL, batch["input_ids"], batch["attention_mask"])
        rounds = [
            [[(3,), (4,), (3, 5), (4, 6), (3, 5, 7)], [(8,), (8, 9)]],
            [[(3, 5, 7, 2), (3, 5, 8)], [(8, 9, 4), (8, 9, 5), (8, 9, 4, 3)]],
        ]
        for nodes, kept in zip(rounds, ([[(3, 5, 7), (3, 5)], [(8, 9)]], None), strict=True):
            logits = tree.read(nodes)
            for b, paths in enumerate(nodes):
                ids = batch["input_ids"][b][batch["attention_mask"][b].bool()]
                for i, path in enumerate(paths):
                    text = torch.cat([ids, torch.tensor(path)])[None]
                    torch.testing.assert_close(logits[b, i], MODEL(text).logits[0, -1], atol=1e-4, rtol=1e-3)
            if kept is not None:
                tree.keep(kept)


def test_nothing_is_read_past_the_last_position() -> None:
    """Of target and draft."""
    model = models.build_gpt2(32)
    options = {"max_new_tokens": 12, "model": model, "lengths": [20]}
    same(search(DraftModelDrafter(model, num_draft_tokens=8), **options), search(**options))
    draft = models.build_gpt2(24)
    drafter = DraftModelDrafter(draft, num_draft_tokens=8)
    same(search(drafter, **options), search(**options))
    same(search(DraftModelDrafter(models.build_gpt2(16)), **options), search(**options))


def test_a_draft_that_fails_on_the_prompt_is_dropped() -> None:
    draft = close_to(MODEL, 0.02)

    def dead(*_: Any, **__: Any) -> Any:
        raise RuntimeError("dead")

    drafter = DraftModelDrafter(draft)
    search(drafter)  # probed
    with models.hooked(draft, dead, before=True), pytest.warns(UserWarning, match="dead"):
        same(search(drafter), search())


def test_positions_that_depend_on_the_length_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = models.llama(rope_parameters=rope, max_position_embeddings=16)
    with pytest.raises(SpeculationError, match="tree of texts"):
        search(DraftModelDrafter(DRAFT), model=model)
    with pytest.raises(SpeculationError, match="position_ids"):
        search(DraftModelDrafter(DRAFT), position_ids=torch.arange(9)[None])


def test_what_the_target_said_behind_the_longest_known_ending_is_mixed_in() -> None:
    torch.manual_seed(0)
    said, drafted = torch.randn(2, 12), torch.randn(4, 12).log_softmax(-1)
    known = Recalled()
    known.remember([(1, 2, 3), (5, 3)], said)
    mixed = known.mixed([(4,), (9, 9, 3), (2, 3), (1, 2, 3)], drafted)
    target = said.softmax(-1)
    assert torch.equal(mixed[0], drafted[0])
    for row, (share, heard) in enumerate([(SHARES[0], 1), (SHARES[1], 0), (SHARES[2], 0)], start=1):
        wanted = share * target[heard] + (1 - share) * drafted[row].exp()
        torch.testing.assert_close(mixed[row].exp(), wanted)


def test_a_draft_of_fewer_tokens_hears_of_no_others() -> None:
    known = Recalled()
    known.remember([(3,)], torch.zeros(1, 12))
    drafted = torch.zeros(1, 8).log_softmax(-1)
    torch.testing.assert_close(
        known.mixed([(3,)], drafted).exp(), torch.full((1, 8), SHARES[0] / 12 + (1 - SHARES[0]) / 8)
    )


def test_endings_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recalled, "MOST", 5)
    known, drafted = Recalled(), torch.zeros(1, 4)
    for token in range(9):
        known.remember([(token,)], torch.zeros(1, 4))
        known.remember([(0,)], torch.zeros(1, 4))  # said again and again
    heard = [not torch.equal(known.mixed([(token,)], drafted), drafted) for token in range(9)]
    assert heard == [True, False, False, False, False, True, True, True, True]


def test_a_draft_that_is_never_right_is_helped_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of eight words repeat themselves: what was said behind two of them is said again."""
    target, draft = models.llama(vocab=8), models.llama(vocab=8, seed=1)
    options = {"max_new_tokens": 40, "num_beams": 2, "do_sample": False, "pad_token_id": 0}
    inputs, calls = models.prompts([5, 3], 8), []
    for name in ("WIDEST", "WIDER"):
        monkeypatch.setattr(beam_search, name, 1)  # else everything is foretold of so few tokens
    plain = target.generate(**inputs, **options)
    for mixed in (Recalled.mixed, lambda self, paths, drafted: drafted):
        monkeypatch.setattr(Recalled, "mixed", mixed)
        drafter = DraftModelDrafter(draft, num_draft_tokens=4)
        assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), plain)
        calls.append(drafter.last_stats.target_calls)
    assert calls[0] < calls[1]
