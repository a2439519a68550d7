"""Where a model ends or a cache knows less than the model: position limits, windows, criteria that answer briefly."""

import pytest
import torch
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_specdec import DraftModelDrafter, PromptLookupDrafter, SpeculationError, SpeculationWarning

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
    with pytest.warns(SpeculationWarning, match="the draft's context 16"):
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
