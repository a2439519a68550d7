"""The table of copying drafters, on a tiny target: which prompts it measures, what it counts."""

import json
import re

import pytest
import torch
from models import llama, tokenizer

import lookup_table
from hf_specdec import DraftModelDrafter, PromptLookupDrafter, SpeculationError, SuffixDrafter
from hf_specdec.loading.models import load_model
from hf_specdec.loading.prompts import Prompt
from lookup_table import Tally, encode, main, play, suffix_after

TEXTS = ["ab cd" * 3, "abcdefghi" * 9, "ihgfed", "aabbcc", "cdcdcd"]


@pytest.fixture
def folder(tmp_path):
    llama(max_position_embeddings=48).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    return tmp_path


def test_prompts_that_all_do_not_fit_are_an_error_that_says_what_to_change():
    with pytest.raises(SpeculationError, match=r"max_new_tokens .* 5 tokens .* max_prompt_tokens=6"):
        encode([Prompt(("abcdefghi" * 9,))], tokenizer(), 6, room=5)


@pytest.mark.parametrize("most", [0, 4])
def test_prompts_are_cut_at_the_front_or_left_out_where_they_do_not_fit(most, capsys):
    encoded = encode([Prompt((text,)) for text in TEXTS], tokenizer(), most, room=20)
    whole = [tokenizer()(text)["input_ids"] for text in TEXTS]
    fitting = [ids[-most:] for ids in whole if most or len(ids) <= 20]
    assert [ids[0].tolist() for ids in encoded] == fitting
    assert len(fitting) == (5 if most else 4)
    assert ("left out: 1" in capsys.readouterr().out) is (most == 0)


def test_a_tally_counts_what_follows_the_prefill():
    tally, target = Tally(), llama()
    for _ in range(2):
        play(target, torch.tensor([[2, 3, 4]]), {"max_new_tokens": 7, "do_sample": False}, tally)
    assert (tally.tokens, tally.decoded, tally.calls, tally.mean_acceptance_length) == (14, 12, 12, 1.0)
    assert 0 < tally.decode_seconds <= tally.seconds


def looping():
    """A target to which only the last token matters, so that its text is a loop, and a prompt that is in it."""
    target = llama(vocab=8)
    for layer in target.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    return target, target.generate(torch.tensor([[2]]), max_new_tokens=40, do_sample=False)


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.usefixtures("width_costs_nothing")
def test_all_methods_are_counted_alike(rounds):
    """Every draft of ten is right; that of transformers' first call, its prefill, is left out."""
    target, prompt = looping()
    ours = {"max_draft_tokens": 10, "tokens_per_match": 10}
    for options, prefill in (
        ({"prompt_lookup_num_tokens": 10}, 11),
        ({"assistant_model": PromptLookupDrafter(**ours)}, 1),
        ({"assistant_model": PromptLookupDrafter(**ours, num_branches=3)}, 1),
        ({"assistant_model": SuffixDrafter(max_draft_tokens=10, num_branches=3)}, 1),
        ({"assistant_model": DraftModelDrafter(looping()[0], num_draft_tokens=10)}, 1),
    ):
        for _ in range(2):  # the first call of a model may try out what it can do
            tally = Tally()
            play(target, prompt, options | {"max_new_tokens": prefill + 11 * rounds, "do_sample": False}, tally)
        assert (tally.tokens, tally.decoded, tally.calls) == (prefill + 11 * rounds, 11 * rounds, rounds)
        assert tally.mean_acceptance_length == 11


def test_a_suffix_drafter_starts_from_the_given_outputs_only():
    texts = [[5, 6, 7, 8, 9]]
    first, second = suffix_after(texts), suffix_after(texts, num_branches=3)
    first.store.add([1, 2, 3, 4])
    assert second.store.continuations([6, 7], 2).tokens == [[8, 9]]
    assert len(second.store) == 6 and second.proposes_trees


def test_the_table_says_what_was_measured_and_seen(folder, capsys):
    model = str(folder / "model")
    settings = {"max_new_tokens": 12, "limit": 2, "branches": 2, "dtype": "float32"}
    main(model, model, folder / "prompts.txt", **settings, pace_target=2, pace_draft=1, threads=torch.get_num_threads())
    out = capsys.readouterr().out
    assert "left out: 1" in out
    assert "2 prompts, T=0, float32, the target paced at 2 ms, the draft paced at 1 ms\n" in out
    rows = dict(re.findall(r"^│ (\S.*?) +│ (\d\.\d\d)", out, re.MULTILINE))
    assert float(rows.pop("plain")) == 1 and all(float(length) >= 1 for length in rows.values())
    names = {"transformers, 10 tokens", "prompt_lookup, 10 tokens", "draft_model", "hybrid"}
    names |= {name + end for name in ("prompt_lookup", "suffix after 2 outputs") for end in ("", ", 2 branches")}
    assert set(rows) == names


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ""),
        ({"pace_draft": 1}, ", the draft paced at 1 ms"),
        ({"pad_target_mlp": 64}, ", the target's MLPs cost-padded to 64"),
        ({"pad_target_mlp": 64, "pace_target": 2}, ", the target's MLPs cost-padded to 64, the target paced at 2 ms"),
    ],
)
def test_the_title_says_how_the_models_were_slowed_down(folder, capsys, monkeypatch, settings, words):
    loaded = []
    monkeypatch.setattr(lookup_table, "load_model", lambda *args: loaded.append(load_model(*args)) or loaded[-1])
    model, threads = str(folder / "model"), torch.get_num_threads()
    main(model, model, folder / "prompts.txt", max_new_tokens=3, limit=1, warm=1, threads=threads, **settings)
    assert f"1 prompts, T=0, bfloat16{words}\n" in capsys.readouterr().out
    target, draft = (model.model.layers[0].mlp.up_proj.out_features for model in loaded)
    assert (target, draft) == (settings.get("pad_target_mlp", 48), 48)


def test_only_prompts_of_the_category_are_measured(folder, capsys):
    path = folder / "kinds.jsonl"
    rows = [("rag", "abab"), ("qa", "cdcd"), ("rag", "efef"), ("rag", "abab")]
    path.write_text("\n".join(json.dumps({"category": kind, "turns": [text]}) for kind, text in rows))
    model, threads = str(folder / "model"), torch.get_num_threads()
    main(model, model, path, "rag", max_new_tokens=3, threads=threads)
    assert "kinds.jsonl (rag), 2 prompts" in capsys.readouterr().out
    with pytest.raises(SpeculationError, match=r"category 'rags': .* has qa, rag$"):
        main(model, model, path, "rags", threads=threads)


@pytest.mark.parametrize(("name", "text"), [("p.txt", "abab"), ("p.jsonl", json.dumps({"prompt": "abab"}))])
def test_a_file_without_categories_says_so(folder, name, text):
    (folder / name).write_text(text)
    model = str(folder / "model")
    with pytest.raises(SpeculationError, match=rf"category 'rag': .*{name} has no categories"):
        main(model, model, folder / name, "rag", threads=torch.get_num_threads())
