"""Where a model ends or a cache knows less than the model: position limits, windows, criteria that answer briefly."""

import threading

import models
import pytest
import torch
import toy_drafters as drafters
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_specdec import BatchDecoder, DraftModelDrafter, PromptLookupDrafter, SpeculationError, SpeculationWarning

IDS = torch.randint(1, 63, (2, 30), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :9] = 0


def mistral(attention="sdpa"):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        sliding_window=6,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    config._attn_implementation = attention
    model = MistralForCausalLM(config).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(3)
    return model


def gpt2(positions):
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 63, "pad_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=positions, **ends)
    ).eval()


def same(target, drafter, **kwargs):
    """Whether speculation gives plain decoding's tokens; the arguments are made anew for each call."""
    plain, ours = (
        target.generate(**{name: make() for name, make in kwargs.items()}, do_sample=False, **drafted)
        for drafted in ({}, {"assistant_model": drafter})
    )
    return torch.equal(plain, ours)


def test_a_users_cache_that_knows_of_no_window():
    target = mistral()
    call = {"input_ids": lambda: IDS, "attention_mask": lambda: MASK, "max_new_tokens": lambda: 20}
    assert same(target, DraftModelDrafter(target, num_draft_tokens=4), **call, past_key_values=DynamicCache)


def test_rows_that_end_at_the_last_position():
    target = gpt2(64)
    call = {"input_ids": lambda: IDS, "attention_mask": lambda: MASK, "max_length": lambda: 64}
    assert same(target, DraftModelDrafter(target, num_draft_tokens=8), **call)


class ShortAnswer(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        return input_ids.shape[1] >= 62


def test_a_limit_beyond_the_last_position_and_a_criterion_that_answers_with_one_bool():
    target = gpt2(64)
    call = {"input_ids": lambda: IDS[:1], "max_length": lambda: 200}
    criteria = {"stopping_criteria": lambda: StoppingCriteriaList([ShortAnswer()])}
    assert same(target, DraftModelDrafter(target, num_draft_tokens=8), **call, **criteria)


def test_a_prompt_longer_than_the_drafts_context():
    with pytest.warns(SpeculationWarning, match="the draft model's context holds 16"):
        assert same(gpt2(64), DraftModelDrafter(gpt2(16)), input_ids=lambda: IDS, max_new_tokens=lambda: 8)


def test_attentions_of_a_sliding_window():
    target = mistral("eager")
    call = dict(input_ids=IDS[:1, :4], max_new_tokens=12, do_sample=False)
    wanted = {"return_dict_in_generate": True, "output_attentions": True}
    plain = target.generate(**call, **wanted)
    ours = target.generate(**call, **wanted, assistant_model=DraftModelDrafter(target, num_draft_tokens=4))
    assert [step[0].shape for step in ours.attentions] == [step[0].shape for step in plain.attentions]


def test_stop_strings_of_the_models_own_config_reach_our_criterion():
    target = gpt2(64)
    target.generation_config.stop_strings = ["x"]
    with pytest.raises(SpeculationError, match="tokenizer"):
        target.generate(IDS, max_new_tokens=4, assistant_model=PromptLookupDrafter())


def test_a_class_or_a_second_opinion_in_place_of_a_drafter():
    target = gpt2(64)
    with pytest.raises(SpeculationError, match=r"PromptLookupDrafter\(\.\.\.\)"):
        target.generate(IDS, assistant_model=PromptLookupDrafter)
    with pytest.raises(SpeculationError, match="suffix"):
        target.generate(IDS, assistant_model=PromptLookupDrafter(), speculation_type="suffix")


def long_rope(kind, original=64):
    """Rotary embeddings that change where a text passes `original` tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 4.0, 7.0, 10.0],
        "original_max_position_embeddings": original,
        "factor": 2048 / original,
    }
    sizes = models.SIZES | {"max_position_embeddings": 2048, "rope_scaling": rope}
    more = {"original_max_position_embeddings": original, "sliding_window": None} if kind is Phi3Config else {}
    return models.from_config(kind(**sizes | more))


GREEDY = {"do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("kind", [LlamaConfig, Phi3Config])
@pytest.mark.parametrize("lengths", [[80], [80, 70], [80, 6], [30, 6], [60]])
def test_rotary_embeddings_that_change_with_the_length(kind, lengths):
    """Drafted where all rows stay on one side of it; the same text everywhere."""
    model, batch = long_rope(kind), models.prompts(lengths)
    options = GREEDY | {"max_new_tokens": 20}
    plain = model.generate(**batch, **options)
    for ends in (None, int(plain[0, max(lengths) + 2])):  # the first row ends after three tokens
        plain = model.generate(**batch, **options, eos_token_id=ends)
        drafter = drafters.oracle(drafters.Future(plain), 4)
        ours = model.generate(**batch, **options, eos_token_id=ends, assistant_model=drafter)
        assert torch.equal(ours, plain)
        one_side = min(lengths) > 64 or max(lengths) + 20 <= 64
        assert (drafter.last_stats.mode != "plain") == one_side


@pytest.mark.parametrize("kind", [LlamaConfig, Phi3Config])
def test_rows_of_a_batch_stay_below_the_length_where_they_change(kind):
    model = long_rope(kind)
    short = models.prompts([6])["input_ids"]
    with BatchDecoder(model) as decoder:
        with pytest.raises(SpeculationError, match="rotary"):
            decoder.submit(models.prompts([80])["input_ids"], **GREEDY, max_new_tokens=20)
        with pytest.raises(SpeculationError, match="rotary"):
            decoder.submit(short, **GREEDY, max_new_tokens=60)
        plain = model.generate(short, **GREEDY, max_new_tokens=50)[0, 6:].tolist()
        assert decoder.submit(short, **GREEDY, max_new_tokens=50).result(60) == plain


@pytest.mark.parametrize("lengths", [[9], [9, 5]])
def test_alibi_goes_on_past_what_its_config_says(lengths):
    config = models.ARCHITECTURES["Falcon ALiBi"]()
    config.max_position_embeddings = 32
    model, batch = models.from_config(config, "eager"), models.prompts(lengths)
    options, drafter = GREEDY | {"max_new_tokens": 40}, PromptLookupDrafter(min_match=1)
    assert torch.equal(model.generate(**batch, **options, assistant_model=drafter), model.generate(**batch, **options))
    assert drafter.last_stats.mode != "plain"


def test_a_model_is_probed_beside_itself():
    """Another thread's text stays what it is while somebody makes the model's first drafted call."""
    model = mistral()
    window, seen, over = model.config.sliding_window, [], threading.Event()

    def look():
        while not over.is_set():
            seen.append(model.config.sliding_window)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        model.generate(IDS[:, :5], max_new_tokens=2, do_sample=False, assistant_model=PromptLookupDrafter())
    finally:
        over.set()
        watcher.join()
    assert set(seen) == {window} and window > 4
