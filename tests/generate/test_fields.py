"""Every parameter of `generate`, and every field of its config, has a known fate beside a drafter."""

import inspect
import warnings
from typing import Any

import models
import pytest
import torch
from transformers import CompileConfig, GenerationConfig, GenerationMixin

from hf_specdec import PromptLookupDrafter, SpeculationError, SpeculationWarning
from hf_specdec.generate.settings import OTHER_MODES, OTHER_SPECULATION

MODEL = models.llama()
PARAMETERS = {
    name: parameter.default
    for name, parameter in inspect.signature(GenerationMixin.generate).parameters.items()
    if parameter.default is not parameter.empty and name != "assistant_model"
}
SERVED = frozenset(
    """
    bad_words_ids begin_suppress_tokens bos_token_id cache_config cache_implementation decoder_start_token_id do_sample
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id guidance_scale length_penalty max_cache_len
    max_length max_new_tokens max_time min_length min_new_tokens min_p no_repeat_ngram_size num_beams
    num_return_sequences output_attentions output_hidden_states output_logits output_scores pad_token_id
    prefill_chunk_size remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate sequence_bias
    speculation_type stop_strings suppress_tokens temperature top_h top_k top_p typical_p use_cache watermarking_config
    """.split()  # noqa: SIM905  (fifty lines, else)
)
"""as in plain decoding, or by plain decoding where speculation cannot, which is said"""
WITHOUT_EFFECT = frozenset(
    """
    compile_config continuous_batching_config disable_compile is_assistant low_memory transformers_version
    """.split()  # noqa: SIM905
)
"""of no effect; that rounds are not compiled is said where plain decoding would be"""
ANOTHER: dict[str, Any] = {
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "constraints": ["x"],
    "dola_layers": "high",
    "force_words_ids": [[5]],
    "max_matching_ngram_size": 4,
    "num_assistant_tokens_schedule": "heuristic",
    "num_beam_groups": 2,
    "prompt_lookup_num_tokens": 3,
    "token_healing": True,
    "use_mtp": True,
}


def generate(**options: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeculationWarning)
        return MODEL.generate(**models.prompts([7]), max_new_tokens=6, pad_token_id=0, **options)


@pytest.mark.parametrize("flag", [False, True], ids=["drafter", "flag"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_given_its_default_is_not_given(name: str, flag: bool) -> None:
    asked: dict[str, Any] = (
        {"speculation_type": "prompt_lookup"} if flag else {"assistant_model": PromptLookupDrafter()}
    )
    given = {name: PARAMETERS[name]} | ({"assistant_model": None} if flag else {})
    assert torch.equal(generate(**asked, **given), generate())


def test_every_field_is_listed_once() -> None:
    """A field that a new transformers brings is to be thought about: is it served, refused, or of no effect?"""
    known = [*SERVED, *OTHER_MODES, *OTHER_SPECULATION, *WITHOUT_EFFECT]
    assert len(set(known)) == len(known)
    theirs = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert theirs == set(known)


@pytest.mark.parametrize("form", ["call", "config"])
@pytest.mark.parametrize("name", [*OTHER_MODES, *OTHER_SPECULATION])
def test_what_nobody_serves_is_refused_and_what_asks_for_nothing_is_not(name: str, form: str) -> None:
    nothing = {**OTHER_MODES, **OTHER_SPECULATION}[name]

    def asked(value: Any) -> dict[str, Any]:
        if form == "call":
            return {name: value}
        config = GenerationConfig(max_new_tokens=6, pad_token_id=0)
        setattr(config, name, value)
        return {"generation_config": config}

    value = ANOTHER[name] if name in ANOTHER else nothing + 1
    with pytest.raises(SpeculationError, match=rf"{name}="):
        generate(assistant_model=PromptLookupDrafter(), **asked(value))
    assert torch.equal(generate(assistant_model=PromptLookupDrafter(), **asked(nothing)), generate())


EVERYWHERE = CompileConfig()
EVERYWHERE._compile_all_devices = True  # as on a GPU
COMPILED: dict[str, tuple[dict[str, Any], str]] = {
    "static cache": (
        {"cache_implementation": "static", "compile_config": EVERYWHERE},
        "plain decoding would be compiled, and calls with a drafter are not",
    ),
    "switched off": (
        {"cache_implementation": "static", "compile_config": EVERYWHERE, "disable_compile": True},
        "",
    ),
    "dynamic cache": ({"compile_config": EVERYWHERE}, ""),
    "its forward": ({}, ""),
    "the module, with a static cache": ({"cache_implementation": "static", "compile_config": EVERYWHERE}, ""),
}


@pytest.mark.parametrize("what", COMPILED)
def test_that_rounds_are_not_compiled_is_said_where_plain_decoding_is(what: str) -> None:
    model, (options, said) = models.llama(), COMPILED[what]
    if what == "its forward":
        model.forward = torch.compile(model.forward, backend="eager")
    elif what == "the module, with a static cache":
        model.compile(backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.generate(**models.prompts([7]), max_new_tokens=4, assistant_model=PromptLookupDrafter(), **options)
    found = [str(one.message) for one in caught if "compiled" in str(one.message)]
    assert len(found) == bool(said) and all(one.startswith(said) for one in found)
