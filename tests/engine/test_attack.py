"""What an attack found, each with a call that used to go wrong."""

import contextlib
import warnings
from typing import Any

import compare
import models
import pytest
import torch
import toy_drafters as drafters
import transformers as tf
from transformers import GenerationConfig

import hf_specdec
from hf_specdec import DraftModelDrafter, PromptLookupDrafter, SpeculationError, SpeculationWarning, SuffixDrafter
from hf_specdec.budget import Cost, Learned
from hf_specdec.target.inputs import CACHE
from hf_specdec.target.probe import Support, support

STATE: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
}


def bamba() -> Any:
    """It asks for one logit in `prepare_inputs_for_generation`, whatever it is fed, and carries a state."""
    config = tf.BambaConfig(**models.SIZES | {"num_hidden_layers": 3}, **STATE, attn_layer_indices=[1], mamba_expand=2)
    return models.from_config(config)


def granite() -> Any:
    """Its state has a long memory: what is not rolled back changes the text much later."""
    layers = {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    sizes = models.SIZES | {"num_hidden_layers": 4}
    model = models.from_config(tf.GraniteMoeHybridConfig(**sizes, **STATE, **layers, shared_intermediate_size=32))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "A_log" in name or "dt_bias" in name:
                weight.fill_(-3.0)
    return model


@pytest.fixture(scope="module", params=[bamba, granite], ids=["Bamba", "GraniteMoeHybrid"])
def stateful(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.mark.grid
@pytest.mark.parametrize("lengths", [[9], [9, 5, 1, 7]], ids=str)
def test_a_state_is_rolled_back(stateful: Any, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a copy, at every rejection; here drafting never pauses."""
    monkeypatch.setattr("hf_specdec.budget.account.GIVEN", 1 << 30)
    assert support(stateful) in (Support.STATE, Support.PLAIN)
    sides = compare.Sides(stateful, lengths, max_new_tokens=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpeculationWarning)
        assert torch.equal(sides.ours(), sides.plain)
    if support(stateful) is Support.STATE:
        assert sides.stats.accepted_tokens and sides.stats.rejections


@pytest.mark.set_times
def test_a_draft_for_a_state_pauses_where_it_does_not_pay(stateful: Any) -> None:
    sides = compare.Sides(stateful, [9], max_new_tokens=64)
    wrong = drafters.adversary(drafters.Future(sides.plain), 4, models.VOCAB)
    assert torch.equal(sides.ours(wrong), sides.plain)
    assert support(stateful) is Support.PLAIN or sum(n for w, n in wrong.last_stats.verify_widths.items() if w > 1) < 20


CONTINUES = pytest.mark.skipif(CACHE != "cache", reason="this transformers goes on from no such cache")


@pytest.mark.parametrize("continued", [False, pytest.param(True, marks=CONTINUES)])
def test_a_cache_of_states_alone_counts_no_columns(continued: bool) -> None:
    """So transformers raises where it is asked how many it has; such a model is decoded plainly."""
    model, ids = models.from_config(models.ARCHITECTURES["Mamba"](), "eager"), models.prompts([9])["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}

    def written(**drafted: Any) -> Any:
        output = model.generate(ids, **options)
        return model.generate(output.sequences, **{CACHE: output[CACHE]} if continued else {}, **options | drafted)

    with pytest.warns(SpeculationWarning, match="plain decoding"):
        ours = written(assistant_model=PromptLookupDrafter())
    assert torch.equal(ours.sequences, written().sequences)


@pytest.mark.parametrize(
    "mode",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"force_words_ids": [[5]]},
        {"constraints": [object()]},
        {"num_beam_groups": 2},
    ],
    ids=lambda mode: next(iter(mode)),
)
@pytest.mark.parametrize("where", ["call", "config"])
def test_other_decoding_modes_are_refused(mode: dict[str, Any], where: str) -> None:
    model, inputs = models.llama(), models.prompts([7])
    settings = mode if where == "call" else {"generation_config": GenerationConfig(max_new_tokens=4)}
    if where == "config":
        for name, value in mode.items():
            setattr(settings["generation_config"], name, value)
    with pytest.raises(SpeculationError, match=next(iter(mode))):
        model.generate(**inputs, **settings, assistant_model=PromptLookupDrafter())


@pytest.mark.parametrize("lengths", [[9], [9, 5]], ids=str)
@pytest.mark.parametrize("make", [PromptLookupDrafter, lambda: DraftModelDrafter(models.llama(), num_draft_tokens=3)])
def test_int32_ids(make: Any, lengths: list[int]) -> None:
    model, inputs = models.llama(), models.prompts(lengths)
    inputs["input_ids"] = inputs["input_ids"].int()
    options = {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(**inputs, **options)
    ours = model.generate(**inputs, **options, assistant_model=make())
    assert ours.dtype == plain.dtype == torch.int64 and torch.equal(ours, plain)


@pytest.mark.parametrize("inside_first", [False, True])
@pytest.mark.parametrize("make", [SuffixDrafter, lambda: DraftModelDrafter(models.llama(seed=1), num_draft_tokens=3)])
def test_autocast(make: Any, inside_first: bool) -> None:
    """What was found out about a model outside autocast does not hold inside, nor the other way."""
    model, drafter = models.llama(), make()
    for inside in (inside_first, not inside_first, inside_first):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside), warnings.catch_warnings():
            warnings.simplefilter("error", SpeculationWarning)
            sides = compare.Sides(model, [9, 5, 1, 7])
            text = sides.ours(drafter)
        assert drafter.last_stats.mode == "ragged"
        assert inside or torch.equal(text, sides.plain)  # rounding may part texts in bfloat16


def test_a_drafter_writes_into_its_own_copy_only() -> None:
    sides = compare.Sides(models.llama(), [9, 5, 1, 7])

    def scribble(context: Any, sequences: Any, room: list[int]) -> Any:
        sequences.ids.fill_(9)
        context.prompt_ids.fill_(9)
        context.prompt_mask.zero_()
        context.stats.emitted_tokens, context.stats.target_calls = -5, 10**9
        rows = len(sequences.rows)
        for tokens in sequences.tokens:
            tokens.clear()
        sequences.lengths.clear()
        sequences.rows.clear()
        sequences.tokens.clear()
        return drafters.Draft.from_lists([[9, 9]] * rows)

    toy = drafters.Toy(scribble)
    assert torch.equal(sides.ours(toy), sides.plain)
    assert 0 < toy.last_stats.target_calls < 100


@pytest.mark.eager  # captured forwards have costs of their own
def test_a_session_has_one_view_of_the_costs_which_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can read them, and spoil none of the engine's."""
    costs = Learned(Cost)
    monkeypatch.setattr("hf_specdec.engine.generation._costs", costs)
    sides, views, known = compare.Sides(models.llama(), [9, 5, 1, 7]), [], []

    def spoil(context: Any, sequences: Any, room: list[int]) -> Any:
        views.append(context.cost)
        known.append(context.cost.known)
        context.cost.beside = "many"
        with pytest.raises(AttributeError):
            context.cost.known = False
        return drafters.Draft.from_lists([[9]] * len(room))

    assert torch.equal(sides.ours(drafters.Toy(spoil)), sides.plain)
    assert all(view is views[0] for view in views) and known[-1] and not known[0]
    assert costs.of(sides.model, (None, False)).known


def test_a_stop_list_beside_a_config_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer, model = models.tokenizer(), models.llama()
    inputs = tokenizer("abcabc", return_tensors="pt", return_token_type_ids=False)
    config = GenerationConfig(max_new_tokens=24, do_sample=False, stop_strings=["ab"], speculation_type="prompt_lookup")
    model.generate(**inputs, generation_config=config, tokenizer=tokenizer)
    assert "deprecated" not in caplog.text and config.stop_strings == ["ab"]


def test_continuous_batching_says_that_it_ignores_the_flag() -> None:
    model = models.llama()
    model.generation_config.speculation_type = "prompt_lookup"
    ours = tf.GenerationMixin.init_continuous_batching
    with pytest.warns(SpeculationWarning, match="continuous batching"), contextlib.suppress(Exception):
        model.init_continuous_batching()  # whatever else it needs may not be here
    hf_specdec.unregister()
    try:
        assert tf.GenerationMixin.init_continuous_batching is not ours
    finally:
        hf_specdec.register()
