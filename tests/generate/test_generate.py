"""The seam: what `generate` takes keeps working with a drafter, and nothing changes without one."""

import copy
import threading
import warnings
from typing import Any

import models
import pytest
import torch
import toy_drafters as drafters
import transformers
from compare import NEW, Sides, uneven_eos
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.cache_utils import DynamicLayer

import hf_specdec
from hf_specdec import DraftModelDrafter, PromptLookupDrafter, SpeculationError, SuffixDrafter


@pytest.fixture(scope="module")
def model() -> Any:
    return models.llama()


@pytest.fixture(scope="module")
def draft() -> Any:
    return models.llama(num_hidden_layers=1)


# ------------------------------------------------------------------ registering


def test_register_and_unregister_are_idempotent(model: Any) -> None:
    wrapped = GenerationMixin.generate
    hf_specdec.register()
    hf_specdec.register()
    assert GenerationMixin.generate is wrapped
    try:
        hf_specdec.unregister()
        hf_specdec.unregister()
        stock = GenerationMixin.generate
        assert stock is not wrapped and stock is wrapped.__wrapped__
        hf_specdec.register()
        assert GenerationMixin.generate is not stock and GenerationMixin.generate.__wrapped__ is stock
    finally:
        hf_specdec.register()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_sample": True, "temperature": 0.7, "top_k": 10},
        {"num_beams": 3},
        {"num_return_sequences": 2, "do_sample": True},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": "draft"},
        {"return_dict_in_generate": True, "output_scores": True},
    ],
)
def test_other_calls_are_bit_for_bit_the_same(model: Any, draft: Any, settings: dict) -> None:
    settings = {name: draft if value == "draft" else value for name, value in settings.items()}
    lengths = [7] if {"prompt_lookup_num_tokens", "assistant_model"} & set(settings) else [7, 3]

    def run() -> Any:
        torch.manual_seed(5)
        return model.generate(**models.prompts(lengths), max_new_tokens=12, **settings)

    with_us = run()
    hf_specdec.unregister()
    try:
        without = run()
    finally:
        hf_specdec.register()
    if isinstance(without, torch.Tensor):
        assert torch.equal(with_us, without)
    else:
        assert torch.equal(with_us.sequences, without.sequences)
        assert all(torch.equal(a, b) for a, b in zip(with_us.scores, without.scores, strict=True))
        assert not hasattr(with_us, "speculation")


# ------------------------------------------------------------------ ways to ask


@pytest.mark.parametrize("lengths", [[7], [9, 5, 1, 7]])
def test_the_flag_form(model: Any, draft: Any, lengths: list[int]) -> None:
    sides = Sides(model, lengths)
    flags: dict[str, Any] = {"speculation_type": "draft_model", "speculation": {"num_draft_tokens": 3}}
    assert torch.equal(sides.run(assistant_model=draft, **flags), sides.plain)
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, **flags)
    before = copy.deepcopy(config.to_dict())
    result = model.generate(**sides.prompts, generation_config=config, assistant_model=draft)
    assert torch.equal(result, sides.plain) and config.to_dict() == before
    output = sides.run(assistant_model=draft, return_dict_in_generate=True, **flags)
    assert torch.equal(output.sequences, sides.plain)
    assert output.speculation.drafted_tokens > 0 and max(output.speculation.verify_widths) == 4


def test_positional_inputs_and_inputs_by_either_name(model: Any) -> None:
    sides = Sides(model, [7])
    ids = sides.prompts["input_ids"]
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "assistant_model": sides.drafter}
    assert torch.equal(model.generate(ids, **settings), sides.plain)
    assert torch.equal(model.generate(inputs=ids, **settings), sides.plain)
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False)
    assert torch.equal(model.generate(ids, config, assistant_model=sides.drafter), sides.plain)


def test_speculation_type_none_is_plain(model: Any) -> None:
    sides = Sides(model)
    assert torch.equal(sides.run(assistant_model=sides.drafter, speculation_type="none"), sides.plain)
    assert sides.drafter.last_stats is None


@pytest.mark.parametrize("batch", [1, 3])
def test_pipeline(model: Any, draft: Any, batch: int) -> None:
    texts = ["abacbdd", "fa", "ggggih"][:batch]
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    tokenizer = models.tokenizer()
    plain = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    drafter = DraftModelDrafter(draft, num_draft_tokens=3)
    ours = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=drafter)
    assert ours(texts, batch_size=batch, **settings) == plain(texts, batch_size=batch, **settings)
    assert drafter.last_stats is not None and drafter.last_stats.drafted_tokens > 0


# ------------------------------------------------------------------ arguments of generate


@pytest.mark.parametrize("lengths", [[7], [9, 5, 1, 7]])
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [7, 8]]},
        {"sequence_bias": [[[5], 9.0], [[7, 8], 6.0]]},
        {"suppress_tokens": [3, 5], "begin_suppress_tokens": [9, 10]},
        {"min_new_tokens": 6},
        {"min_length": 15},
        {"exponential_decay_length_penalty": (3, 1.2)},
        {"forced_eos_token_id": 17},
        {"max_length": 20, "max_new_tokens": None},
        {"max_new_tokens": 1},
        {"remove_invalid_values": True, "renormalize_logits": True},
        {"encoder_repetition_penalty": 1.2},
        {"prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) * k + row) % 97 for k in (3, 5, 7)]},
        {"guidance_scale": 1.5},
    ],
    ids=lambda settings: "+".join(settings),
)
def test_settings_with_several_ends(model: Any, settings: dict, lengths: list[int]) -> None:
    eos = uneven_eos(model, lengths, at=(4, 9)[: len(lengths)])
    sides = Sides(model, lengths, eos_token_id=eos, **settings)
    assert torch.equal(sides.ours(), sides.plain)
    assert sides.stats.emitted_tokens <= (sides.plain.shape[1] - max(lengths)) * len(lengths)


@pytest.mark.parametrize("lengths", [[7], [9, 5, 1, 7]])
def test_max_time_ends_both_where_it_is_over(model: Any, lengths: list[int]) -> None:
    sides = Sides(model, lengths, max_time=0.0)
    assert torch.equal(sides.ours(), sides.plain)
    assert sides.plain.shape[1] == max(lengths) + 1


@pytest.mark.parametrize("lengths", [[7], [9, 5]])
@pytest.mark.parametrize("do_sample", [False, True])
def test_num_return_sequences(model: Any, lengths: list[int], do_sample: bool) -> None:
    if not do_sample:
        with pytest.raises(ValueError, match="num_return_sequences"):
            model.generate(**models.prompts(lengths), num_return_sequences=3, do_sample=False)
        return
    sides = Sides(model, lengths, num_return_sequences=3, do_sample=True, eos_token_id=[11, 12])
    torch.manual_seed(0)
    ours = sides.ours()
    assert ours.shape[0] == 3 * len(lengths)
    assert torch.equal(ours[:, : max(lengths)], sides.plain[:, : max(lengths)])
    assert len({tuple(row) for row in ours.tolist()}) == 3 * len(lengths), "rows must not share random numbers"


class Recorder:
    """A streamer."""

    def __init__(self) -> None:
        self.puts: list[torch.Tensor] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value)

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("lengths", [[7], [9, 5, 1, 7]])
def test_streamed_equals_returned(model: Any, eos: bool, lengths: list[int]) -> None:
    end = uneven_eos(model, lengths, at=(7,)) if eos else None
    streams = [Recorder(), Recorder()]
    given = iter(streams)
    sides = Sides(model, lengths, eos_token_id=end, streamer=lambda: next(given))
    ours = sides.ours()
    assert torch.equal(ours, sides.plain)
    assert [s.ends for s in streams] == [1, 1]
    plain_puts, our_puts = (s.puts for s in streams)
    assert len(plain_puts) == len(our_puts)
    assert all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(plain_puts, our_puts, strict=True))
    assert torch.equal(torch.stack(our_puts[1:], 1), ours[:, max(lengths) :])


def test_text_streamers_print_the_text(model: Any, capsys: pytest.CaptureFixture) -> None:
    tokenizer = models.tokenizer()
    sides = Sides(model, [7], streamer=lambda: transformers.TextStreamer(tokenizer, skip_prompt=True))
    plain = capsys.readouterr().out
    sides.ours()
    assert capsys.readouterr().out == plain != ""


def test_synced_gpus_is_refused(model: Any) -> None:
    with pytest.raises(SpeculationError, match="synced_gpus"):
        Sides(model).run(assistant_model=drafters.Toy(lambda *_: None), synced_gpus=True)


def test_quantized_caches_decode_plainly_with_one_warning(model: Any) -> None:
    pytest.importorskip("optimum.quanto")
    sides = Sides(model, [7], cache_implementation="quantized", disable_compile=True)
    with pytest.warns(hf_specdec.SpeculationWarning) as caught:
        assert torch.equal(sides.ours(), sides.plain)
    assert len([w for w in caught if issubclass(w.category, hf_specdec.SpeculationWarning)]) == 1


def test_a_static_cache_that_is_asked_for_is_stood_in_for(model: Any) -> None:
    sides = Sides(model, [7, 4], cache_implementation="static", disable_compile=True)
    assert torch.equal(sides.ours(), sides.plain)
    assert sides.stats.mode == "ragged"


class _Stream:
    """Of a device that there is none of."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...


@pytest.mark.parametrize("lengths", [[9], [5, 9, 7]], ids=str)
def test_a_cache_that_moves_layers_to_the_host_is_rolled_back_there(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: _Stream())
    moves, target, inputs = [], models.llama(), models.prompts(lengths)
    move = DynamicLayer.offload
    monkeypatch.setattr(DynamicLayer, "offload", lambda layer: (moves.append(layer.keys.shape[2]), move(layer))[1])
    monkeypatch.setattr("hf_specdec.engine.modes.changed_cache", lambda _: "")  # the counting method does what it did
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "cache_implementation": "offloaded"}
    plain = target.generate(**inputs, **options)
    steps = len(moves)
    for drafter in (drafters.noisy(drafters.Future(plain), 4, models.VOCAB), PromptLookupDrafter(), SuffixDrafter()):
        moves.clear()
        assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), plain)
        assert drafter.last_stats.mode == "lockstep" and len(moves) <= steps
    assert moves and max(moves) > len(plain[0]) - 5


def test_use_cache_false_decodes_plainly_with_one_warning(model: Any) -> None:
    sides = Sides(model, [7], use_cache=False)
    with pytest.warns(hf_specdec.SpeculationWarning, match="uses no cache"):
        assert torch.equal(sides.ours(), sides.plain)
    with pytest.warns(hf_specdec.SpeculationWarning, match="uses no cache"):
        ours = sides.run(assistant_model=sides.drafter, past_key_values=DynamicCache())
    assert torch.equal(ours, sides.run(past_key_values=DynamicCache()))


# ------------------------------------------------------------------ nothing leaks


def test_no_config_is_written_to(model: Any, draft: Any) -> None:
    drafter = DraftModelDrafter(draft, num_draft_tokens=3)
    configs = [
        model.config,
        model.generation_config,
        draft.config,
        draft.generation_config,
        GenerationConfig(max_new_tokens=9, repetition_penalty=1.2, eos_token_id=5, num_return_sequences=1),
    ]
    before = [copy.deepcopy(config.to_dict()) for config in configs]
    model.generate(**models.prompts([5, 3]), generation_config=configs[-1], assistant_model=drafter)
    model.generate(
        **models.prompts([5, 3]),
        generation_config=configs[-1],
        assistant_model=draft,
        speculation_type="draft_model",
        speculation={"num_draft_tokens": 2},
    )
    assert [config.to_dict() for config in configs] == before


@pytest.mark.parametrize("lengths", [[7], [9, 5, 1, 7]])
def test_seeded_sampled_calls_repeat(model: Any, draft: Any, lengths: list[int]) -> None:
    drafter = DraftModelDrafter(draft, num_draft_tokens=3)

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        prompts = models.prompts(lengths)
        return model.generate(**prompts, max_new_tokens=NEW, do_sample=True, temperature=3.0, assistant_model=drafter)

    first = run(1)
    assert torch.equal(run(1), first) and not torch.equal(run(2), first)


@pytest.mark.parametrize("lengths", [[7], [9, 5, 1, 7]])
def test_the_same_greedy_call_twice(model: Any, draft: Any, lengths: list[int]) -> None:
    drafter = DraftModelDrafter(draft, num_draft_tokens="auto")
    sides = Sides(model, lengths)
    assert all(torch.equal(sides.ours(drafter), sides.plain) for _ in range(3))


def test_threads_may_share_a_drafter(model: Any, draft: Any) -> None:
    drafter = DraftModelDrafter(draft, num_draft_tokens=4)
    both = [Sides(model, lengths, max_new_tokens=40) for lengths in ([7], [9, 5, 1], [3, 3], [8])]
    results: list[Any] = [None] * len(both)

    def work(i: int) -> None:
        results[i] = [both[i].ours(drafter) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(both))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for sides, texts in zip(both, results, strict=True):
        assert all(torch.equal(text, sides.plain) for text in texts)


def test_a_sound_call_does_not_warn(model: Any, draft: Any) -> None:
    sides = Sides(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hf_specdec.SpeculationWarning)
        sides.ours(DraftModelDrafter(draft, num_draft_tokens=3))
        sides.ours()
