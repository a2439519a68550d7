"""What users of speculative decoding report, each as a test."""

from typing import Any

import models
import pytest
import torch
import toy_drafters as drafters
from compare import NEW, PROMPTS, Sides, uneven_eos

from hf_specdec import DraftModelDrafter

BATCHES = pytest.mark.parametrize("lengths", [[7], PROMPTS])


@pytest.fixture(scope="module")
def model() -> Any:
    return models.llama()


@pytest.fixture(scope="module")
def draft() -> Any:
    return models.llama(num_hidden_layers=1)


@BATCHES
@pytest.mark.parametrize("gamma", [1, 5, 9])
@pytest.mark.parametrize("step", range(7))
def test_an_end_inside_an_accepted_block(model: Any, step: int, gamma: int, lengths: list[int]) -> None:
    """An oracle of plain decoding without an end drafts right past it."""
    endless = Sides(model, lengths).plain
    sides = Sides(model, lengths, eos_token_id=uneven_eos(model, lengths, (step,)))
    for drafter in (
        drafters.oracle(drafters.Future(endless), gamma),
        drafters.bushy(drafters.Future(endless), min(gamma, 5), models.VOCAB),
    ):
        assert torch.equal(sides.ours(drafter), sides.plain)
        assert drafter.sessions == [] or all(s.closed == 1 for s in drafter.sessions)


@BATCHES
def test_a_pad_token_that_is_the_end_token(model: Any, lengths: list[int]) -> None:
    eos = uneven_eos(model, lengths, (5,))
    sides = Sides(model, lengths, eos_token_id=eos, pad_token_id=eos[0])
    assert torch.equal(sides.ours(), sides.plain)


@BATCHES
def test_stop_strings_with_a_draft_model(model: Any, draft: Any, lengths: list[int]) -> None:
    """They may begin within one token and end within another; the rows stop at different places."""
    tokenizer = models.tokenizer()
    texts = tokenizer.batch_decode(Sides(model, lengths).plain[:, -NEW:])
    clean = [text.replace("<", " ").replace(">", " ").split() for text in texts]
    words = [word for row in clean for word in row if word.isalpha() and len(word) > 2]
    strings = [word[1:] for word in words[:2]] or ["ab"]
    sides = Sides(model, lengths, stop_strings=strings, tokenizer=tokenizer)
    assert sides.plain.shape[1] < max(lengths) + NEW or len(lengths) > 1
    for drafter in (sides.drafter, DraftModelDrafter(draft, num_draft_tokens=4)):
        assert torch.equal(sides.ours(drafter), sides.plain)
    ended = Sides(model, lengths, stop_strings=strings, tokenizer=tokenizer, eos_token_id=96)
    assert torch.equal(ended.ours(), ended.plain)


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [1, 4], [2, 1, 9]])
def test_prompts_of_one_token(model: Any, draft: Any, lengths: list[int]) -> None:
    sides = Sides(model, lengths)
    assert torch.equal(sides.ours(), sides.plain)
    assert torch.equal(sides.ours(DraftModelDrafter(draft, num_draft_tokens=3)), sides.plain)


@BATCHES
@pytest.mark.parametrize("new", [1, 2, 3])
def test_few_new_tokens(model: Any, draft: Any, new: int, lengths: list[int]) -> None:
    sides = Sides(model, lengths, gamma=9, max_new_tokens=new)
    for drafter in (sides.drafter, DraftModelDrafter(draft, num_draft_tokens=9)):
        text = sides.ours(drafter)
        assert torch.equal(text, sides.plain) and text.shape[1] == max(lengths) + new


@BATCHES
@pytest.mark.parametrize("vocab", [models.VOCAB - 7, models.VOCAB + 31])
@pytest.mark.parametrize("gamma", [1, 4, "auto"])
def test_a_draft_with_another_padding_of_the_vocabulary(model: Any, vocab: int, gamma: Any, lengths: list[int]) -> None:
    """It may know fewer tokens than the target, or like ones best that the target does not have."""
    other = models.llama(vocab, num_hidden_layers=1)
    drafter = DraftModelDrafter(other, num_draft_tokens=gamma)
    sides = Sides(model, lengths)
    assert torch.equal(sides.ours(drafter), sides.plain)
    assert torch.equal(sides.run(assistant_model=drafter, do_sample=True, top_k=1), sides.plain)
    text = sides.run(assistant_model=drafter, do_sample=True, temperature=5.0, top_k=0)
    assert ((text >= 0) & (text < models.VOCAB)).all()


@BATCHES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_draft_in_another_dtype(model: Any, dtype: torch.dtype, lengths: list[int]) -> None:
    drafter = DraftModelDrafter(models.llama(num_hidden_layers=1).to(dtype), num_draft_tokens=3)
    sides = Sides(model, lengths)
    assert torch.equal(sides.ours(drafter), sides.plain)
    torch.manual_seed(0)
    assert sides.run(assistant_model=drafter, do_sample=True, temperature=2.0).shape == sides.plain.shape


@BATCHES
def test_the_target_as_its_own_draft_is_always_right(model: Any, lengths: list[int]) -> None:
    drafter = DraftModelDrafter(model, num_draft_tokens=5)
    sides = Sides(model, lengths)
    assert torch.equal(sides.ours(drafter), sides.plain)
    assert drafter.last_stats is not None and drafter.last_stats.draft_acceptance_rate == 1.0
    assert drafter.last_stats.target_calls == 1 + -(-(NEW - 1) // 6)


@BATCHES
def test_a_draft_at_its_own_context_limit(model: Any, lengths: list[int]) -> None:
    """It stops drafting; the target goes on."""
    drafter = DraftModelDrafter(models.build_gpt2(16), num_draft_tokens=4)
    sides = Sides(model, lengths)
    assert torch.equal(sides.ours(drafter), sides.plain)
    assert drafter.last_stats is not None and drafter.last_stats.drafted_tokens > 0


@BATCHES
def test_more_tokens_than_one_block_of_the_cache(model: Any, lengths: list[int]) -> None:
    sides = Sides(model, lengths, max_new_tokens=300)
    oracle = drafters.oracle(drafters.Future(sides.plain), 9)
    assert torch.equal(sides.ours(oracle), sides.plain)


@BATCHES
def test_bf16_differs_only_at_near_ties(lengths: list[int]) -> None:
    """Block forwards round differently: a first difference needs plain decoding's own best two logits within two
    steps of bf16's rounding of the larger."""
    model = models.llama().to(torch.bfloat16)
    for seed in range(8):
        prompts = models.prompts(lengths, seed=seed)
        settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
        plain = model.generate(**prompts, **settings, return_dict_in_generate=True, output_logits=True)
        drafter = drafters.noisy(drafters.Future(plain.sequences), 5, models.VOCAB)
        text = model.generate(**prompts, **settings, assistant_model=drafter)
        for row, (a, b) in enumerate(zip(plain.sequences.tolist(), text.tolist(), strict=True)):
            if a == b:
                continue
            step = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y) - max(lengths)
            best, second = plain.logits[step][row].topk(2).values.tolist()
            assert best - second <= 4 * 2**-7 * abs(best), "not a near-tie"
