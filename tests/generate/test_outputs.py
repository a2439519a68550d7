"""What `return_dict_in_generate` returns is shaped as plain decoding shapes it, and its cache can be gone on from."""

from typing import Any

import models
import pytest
import torch
import toy_drafters as drafters
from compare import NEW, PROMPTS, Sides, same_states, uneven_eos
from transformers import DynamicCache, StaticCache

BATCHES = [[7], [9, 5, 1, 7]]


@pytest.fixture(scope="module")
def model() -> Any:
    return models.llama(attention="eager")


def everything(**more: Any) -> dict[str, Any]:
    return {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
    } | more


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("architecture", ["Llama", "Gemma3", "GPT-2", "Bloom"])
def test_step_outputs_are_plains(architecture: str, lengths: list[int], ends: bool) -> None:
    model = models.build(architecture, "eager")
    eos = uneven_eos(model, lengths, at=(4, 9)[: len(lengths)]) if ends else None
    sides = Sides(model, lengths, eos_token_id=eos, repetition_penalty=1.2, **everything())
    ours = sides.ours()
    assert torch.equal(ours.sequences, sides.plain.sequences)
    assert len(ours.scores) == ours.sequences.shape[1] - max(lengths), "one entry per token"
    assert sides.stats.accepted_tokens > 0
    for name in ("scores", "logits", "hidden_states"):
        same_states(getattr(ours, name), getattr(sides.plain, name))
    for plain, block in zip(sides.plain.attentions, ours.attentions, strict=True):
        assert [layer.shape for layer in plain][-1:] == [layer.shape for layer in block][-1:]
    assert torch.equal(
        model.compute_transition_scores(ours.sequences, ours.scores).isfinite(),
        model.compute_transition_scores(sides.plain.sequences, sides.plain.scores).isfinite(),
    )


def test_sampled_scores_are_one_per_token(model: Any) -> None:
    sides = Sides(model)
    settings = everything(do_sample=True, temperature=2.0, top_k=20, eos_token_id=[5, 6])
    ours = sides.run(assistant_model=sides.drafter, **settings)
    new = ours.sequences.shape[1] - max(PROMPTS)
    assert len(ours.scores) == len(ours.logits) == len(ours.hidden_states) == len(ours.attentions) == new
    assert all(int((scores > -torch.inf).sum(-1).max()) <= 20 for scores in ours.scores)


@pytest.mark.parametrize("lengths", BATCHES)
def test_statistics_come_with_the_output(model: Any, lengths: list[int]) -> None:
    sides = Sides(model, lengths, return_dict_in_generate=True)
    ours = sides.ours()
    stats = ours.speculation
    assert stats is sides.drafter.last_stats
    assert stats.emitted_tokens == NEW * len(lengths) == stats.accepted_tokens + stats.row_steps + len(lengths)
    assert stats.target_calls == 1 + stats.verify_widths.total()
    assert stats.accepted_tokens <= stats.drafted_tokens
    assert stats.total_seconds >= stats.prefill_seconds + stats.draft_seconds + stats.verify_seconds
    assert str(stats)


# ------------------------------------------------------------------ the cache


def the_cache(sides: Sides, drafter: Any = None) -> tuple[Any, Any]:
    return sides.plain.past_key_values, sides.ours(drafter).past_key_values


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize(
    "architecture", ["Llama", "Mistral", "Gemma3", "Qwen2 sliding", "DeepSeek-V3", "GPT-2", "LFM2"]
)
def test_the_returned_cache_is_plains(architecture: str, kind: str, lengths: list[int], ends: bool) -> None:
    model = models.build(architecture, "eager")
    eos = uneven_eos(model, lengths, at=(4, 9)[: len(lengths)]) if ends else None
    sides = Sides(model, lengths, eos_token_id=eos, return_dict_in_generate=True)
    drafter = drafters.bushy(drafters.Future(sides.plain.sequences), 4, models.VOCAB) if kind == "tree" else None
    plain, ours = the_cache(sides, drafter)
    assert type(ours) is type(plain) is DynamicCache
    assert ours.get_seq_length() == plain.get_seq_length()
    start = sides.prompts["attention_mask"].argmax(-1).tolist()
    for a, b in zip(plain.layers, ours.layers, strict=True):
        assert type(a) is type(b)
        if not hasattr(a, "keys") or a.keys is None:
            continue
        assert a.keys.shape == b.keys.shape and a.values.shape == b.values.shape
        assert getattr(a, "cumulative_length", 0) == getattr(b, "cumulative_length", 0)
        cut = plain.get_seq_length() - a.keys.shape[2]
        for row, first in enumerate(start):  # what lies in padding is never seen
            seen = slice(max(0, first - cut), None)
            torch.testing.assert_close(a.keys[row, :, seen], b.keys[row, :, seen], atol=2e-3, rtol=1e-3)
            torch.testing.assert_close(a.values[row, :, seen], b.values[row, :, seen], atol=2e-3, rtol=1e-3)


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("second", ["plain", "ours"])
@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("architecture", ["Llama", "Gemma3", "GPT-2", "MPT", "LFM2"])
def test_going_on_from_our_cache_gives_plains_tokens(
    architecture: str, lengths: list[int], new: int, second: str
) -> None:
    """A second turn over the returned cache, with `new` more tokens of the user's."""
    model = models.build(architecture, "eager")
    sides = Sides(
        model, lengths, eos_token_id=uneven_eos(model, lengths, (4, 9)[: len(lengths)]), return_dict_in_generate=True
    )
    first = sides.ours()

    def turn(output: Any, assistant: Any) -> torch.Tensor:
        more = models.prompts([new] * len(lengths), seed=3)["input_ids"] if new else output.sequences[:, :0]
        ids = torch.cat([output.sequences, more], dim=1)
        mask = torch.nn.functional.pad(sides.prompts["attention_mask"], (0, ids.shape[1] - max(lengths)), value=1)
        return model.generate(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=output.past_key_values,
            max_new_tokens=12,
            do_sample=False,
            assistant_model=assistant,
        )

    expected = turn(sides.plain, None)
    helper = drafters.noisy(drafters.Future(expected), 4, models.VOCAB) if second == "ours" else None
    assert torch.equal(turn(first, helper), expected)


@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_a_users_cache_is_the_one_updated_over_several_turns(model: Any, kind: str, lengths: list[int]) -> None:
    def talk(make: Any) -> tuple[list[torch.Tensor], DynamicCache]:
        cache = DynamicCache(config=model.config)
        prompts = models.prompts(lengths)
        ids, mask, said = prompts["input_ids"], prompts["attention_mask"], []
        for turn in range(3):
            width = ids.shape[1]
            ids = model.generate(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=8,
                do_sample=False,
                assistant_model=make(turn),
            )
            said.append(ids)
            assert cache.get_seq_length() == ids.shape[1] - 1
            ids = torch.cat([ids, models.prompts([2] * len(lengths), seed=turn)["input_ids"]], dim=1)
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - width), value=1)
        return said, cache

    plain, _ = talk(lambda turn: None)

    def make(turn: int) -> Any:
        future = drafters.Future(plain[turn])
        if kind == "tree":
            return drafters.bushy(future, 3, models.VOCAB)
        return drafters.noisy(future, 4, models.VOCAB)

    ours, _ = talk(make)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


@pytest.mark.parametrize("lengths", [[7], [7, 4, 5]])
@pytest.mark.parametrize("kind", ["noisy", "tree"])
def test_a_static_cache_of_the_users_is_served_and_filled(model: Any, kind: str, lengths: list[int]) -> None:
    """As plain decoding fills it, also by a second turn."""

    def talk(drafted: bool) -> tuple[list[torch.Tensor], StaticCache]:
        cache, texts = StaticCache(config=model.config, max_cache_len=64), []
        batch = models.prompts(lengths)
        for _ in range(2):
            future = drafters.Future(plain[len(texts)]) if drafted else None
            make = drafters.bushy if kind == "tree" else drafters.noisy
            more = {} if future is None else {"assistant_model": make(future, 3, models.VOCAB)}
            options = {"past_key_values": cache, "disable_compile": True, "max_new_tokens": 12, "do_sample": False}
            text = model.generate(**batch, **options, eos_token_id=None, pad_token_id=0, **more)
            texts.append(text)
            new = text.shape[1] - batch["input_ids"].shape[1]
            batch = {
                "input_ids": torch.nn.functional.pad(text, (0, 2), value=3),
                "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (0, new + 2), value=1),
            }
            if more:
                assert more["assistant_model"].last_stats.mode != "plain"
        return texts, cache

    plain: list[torch.Tensor] = []
    plain, expected = talk(False)
    ours, cache = talk(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert int(cache.get_seq_length()) == int(expected.get_seq_length())
    for mine, theirs in zip(cache.layers, expected.layers, strict=True):
        for b, n in enumerate(lengths):
            seen = slice(max(lengths) - n, int(expected.get_seq_length()))
            torch.testing.assert_close(mine.keys[b, :, seen], theirs.keys[b, :, seen], atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(mine.values[b, :, seen], theirs.values[b, :, seen], atol=1e-4, rtol=1e-3)


def test_an_interrupt_leaves_the_prompt_in_a_static_cache(model: Any) -> None:
    cache = StaticCache(config=model.config, max_cache_len=64)

    def stop(context: Any, sequences: Any, room: list[int]) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(**models.prompts([7]), past_key_values=cache, assistant_model=drafters.Toy(stop))
    assert int(cache.get_seq_length()) == 7
