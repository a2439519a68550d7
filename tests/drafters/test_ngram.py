"""N-gram models: true probabilities, storage, pruning, and the engine's promises."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from clocks import Clock
from continuations import (
    BATCHES,
    FORBIDDING,
    SETTINGS,
    SMALL,
    proposes_nothing_forbidden,
    same_greedy_text,
    sampling_p_value,
)
from models import llama, prompts
from random_walks import documents
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_specdec import Drafter, SpeculationError, SpeculationStats
from hf_specdec.budget import Cost, Learned
from hf_specdec.drafters.ngram import NGramDrafter, NGramModel
from hf_specdec.drafters.ngram.model import MOST_LIKELY
from hf_specdec.hub.tokenizer import vocabulary_hash
from hf_specdec.train import ngram as training
from hf_specdec.train.ngram import train_ngram, train_ngram_drafter


def counted(texts, *gram):
    n = len(gram)
    return sum(tuple(text[i : i + n]) == gram for text in texts for i in range(len(text) - n + 1))


@pytest.mark.parametrize("vocab", [3, 7, 50])
@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("min_count", [1, 3])
def test_every_row_is_a_distribution_over_all_tokens(vocab, order, min_count):
    model = train_ngram(documents(vocab), vocab, order, min_count)
    dice = np.random.default_rng(1)
    for _ in range(40):
        q = model.next_probs(dice.integers(0, vocab, dice.integers(0, 8)).tolist())
        assert q.dtype == np.float32 and (q > 0).all()
        assert abs(q.sum() - 1) < 1e-5


def test_a_bigram_model_is_the_formula():
    """Interpolated Kneser-Ney by hand: discounted counts, and contexts counted below."""
    vocab, texts = 5, documents(5)
    model = train_ngram(texts, vocab, order=2)
    pairs = {(a, b): counted(texts, a, b) for a in range(vocab) for b in range(vocab)}
    seen = [count for count in pairs.values() if count]
    discount = seen.count(1) / (seen.count(1) + 2 * seen.count(2)) if 1 in seen else 0.5
    discount = min(max(discount, 0.1), 0.9)
    contexts = np.array(
        [max(sum(pairs[a, b] > 0 for a in range(vocab)), any(b in t for t in texts)) for b in range(vocab)]
    )
    d1 = training._absolute_discount(contexts)
    lower = np.maximum(contexts - d1, 0) / contexts.sum()
    lower += (1 - lower.sum()) / vocab
    for a in range(vocab):
        total = sum(pairs[a, b] for b in range(vocab))
        direct = np.array([max(pairs[a, b] - discount, 0) / total for b in range(vocab)])
        np.testing.assert_allclose(model.next_probs([a]), direct + (1 - direct.sum()) * lower, atol=1e-6)


def test_only_the_last_tokens_count_and_unknown_ones_are_no_error():
    model = train_ngram(documents(7), 7, order=3)
    np.testing.assert_array_equal(model.next_probs([5, 5, 1, 2]), model.next_probs([1, 2]))
    np.testing.assert_array_equal(model.next_probs([999, 2]), model.next_probs([2]))
    np.testing.assert_array_equal(model.next_probs([2, 999]), model.next_probs([]))


def test_ngrams_do_not_cross_documents():
    model = train_ngram([[0, 1], [2, 3]] * 5, 4, order=2)
    assert model.sizes == [2]


def test_pruning_shrinks_the_model_and_chunks_change_nothing(monkeypatch):
    texts = documents(20)
    whole, pruned = train_ngram(texts, 20, 3), train_ngram(texts, 20, 3, min_count=2)
    assert pruned.num_bytes < whole.num_bytes and all(a < b for a, b in zip(pruned.sizes, whole.sizes, strict=True))
    monkeypatch.setattr(training, "CHUNK", 17)
    again = train_ngram(texts, 20, 3)
    assert all(torch.equal(whole.tensors()[name], table) for name, table in again.tensors().items())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([[1]], 4, 0), "order"),
        (([[1]], 4, 7), "order"),
        (([[1]], 4, 2, 0), "min_count"),
        (([[4]], 4), "vocab_size"),
        (([[-1]], 4), "vocab_size"),
        (([], 4), "text"),
    ],
)
def test_bad_training_arguments_are_refused(arguments, named):
    with pytest.raises(SpeculationError, match=named):
        train_ngram(*arguments)


def test_text_files_of_several_shapes_train_a_drafter(tmp_path):
    class Bytes:
        eos_token_id = 0

        def __len__(self):
            return 256

        def __call__(self, text, **_):
            return {"input_ids": list(text.encode())}

    (tmp_path / "plain.txt").write_text("one line\n\nanother line\n")
    lines = [json.dumps({"question": "one", "n": 3, "answer": ["line"]}), json.dumps("another line")]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    for file in tmp_path.iterdir():
        drafter = train_ngram_drafter(Bytes(), [file], order=3, num_draft_tokens=2)
        q = drafter.model.next_probs(list(b"li"))
        assert q.argmax() == ord("n") and drafter.config.sizes == drafter.model.sizes


def test_a_drafter_comes_back_from_its_folder_as_it_was(tmp_path):
    drafter = NGramDrafter(train_ngram(documents(8), 8, 3), num_draft_tokens=4)
    drafter.save_pretrained(str(tmp_path))
    loaded = Drafter.from_pretrained(str(tmp_path))
    assert isinstance(loaded, NGramDrafter) and loaded.config.num_draft_tokens == 4
    np.testing.assert_array_equal(loaded.model.next_probs([1, 2]), drafter.model.next_probs([1, 2]))


@pytest.mark.parametrize("name", ["2.keys", "2.probs", "unigram"])
def test_damaged_tables_are_refused(tmp_path, name):
    NGramDrafter(train_ngram(documents(8), 8, 2)).save_pretrained(str(tmp_path))
    tables = load_file(tmp_path / "model.safetensors")
    tables[name] = tables[name].flip(0) if name == "2.keys" else tables[name] - 3
    save_file(tables, tmp_path / "model.safetensors")
    with pytest.raises(SpeculationError, match="damaged"):
        Drafter.from_pretrained(str(tmp_path))
    with pytest.raises(SpeculationError, match="lack"):
        NGramModel.from_tensors({key: table for key, table in tables.items() if key != name})


def test_no_model_or_a_larger_vocabulary_is_refused_before_any_forward():
    ids = torch.tensor([[1, 2]])
    with pytest.raises(SpeculationError, match="train"):
        llama().generate(ids, speculation_type="ngram", max_new_tokens=3)
    with pytest.raises(SpeculationError, match="tokenizer"):
        llama(vocab=8).generate(ids, assistant_model=NGramDrafter(train_ngram(documents(9), 9)), max_new_tokens=3)


@pytest.mark.parametrize("vocab", [3, 7, 50])
@pytest.mark.parametrize("order", [1, 2, 4])
def test_the_likeliest_are_those_of_the_distribution(vocab, order):
    """All of them where as many are asked for; of fewer no chance is too high, and the first is mostly right."""
    model, dice, right = train_ngram(documents(vocab), vocab, order), np.random.default_rng(1), 0
    for _ in range(40):
        context = dice.integers(0, vocab, dice.integers(0, 8)).tolist()
        q, few = model.next_probs(context), model.likeliest(context, 2)
        assert len(few) == 2 and all(said <= q[token] + 1e-6 for token, said in few)
        assert few[0][1] >= few[1][1]
        right += q[few[0][0]] > q.max() - 1e-6
        if vocab <= MOST_LIKELY:
            every = dict(model.likeliest(context, vocab))
            np.testing.assert_allclose([every[token] for token in range(vocab)], q, atol=1e-6)
    assert right >= 32


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("window", ["auto", 4])
@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize("eos", [None, 4])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_greedy_text_is_plain_decodings(lengths, eos, order, window):
    model = train_ngram(documents(8), 8, order)
    same_greedy_text(NGramDrafter(model, num_draft_tokens=window), lengths, eos)


@pytest.mark.grid
@pytest.mark.set_times
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("slope", [0.0, 3.0])
def test_as_much_is_drafted_as_pays(slope, sampled, monkeypatch):
    """By a clock that only the target's forwards move, in the mean of three models. Where width costs nothing they are
    asked for more than a token or two; where a second token costs three steps, hardly ever."""
    target, taken, stats = llama(vocab=8, max_position_embeddings=512), 0.0, SpeculationStats()
    ends = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
    options = ends | {"max_new_tokens": 120, "do_sample": sampled}
    for seed in range(3):
        torch.manual_seed(seed)
        texts = target.generate(torch.arange(1, 8)[:, None], max_new_tokens=200, **ends)
        drafter = NGramDrafter(train_ngram(texts.tolist(), 8, 3))
        monkeypatch.setattr("hf_specdec.engine.generation._costs", Learned(Cost))
        clock = Clock(monkeypatch)
        with clock.moved_by(target, lambda width: 1 + slope * (width > 1) + 0.001 * width):
            for _ in range(3):
                clock.now = 0.0
                torch.manual_seed(0)
                target.generate(**prompts([7], 8), **options, assistant_model=drafter)
        taken, stats = taken + clock.now / 3, stats + drafter.last_stats
    if slope == 0:
        assert taken < 0.75 * 120 and stats.drafted_tokens > 2 * stats.row_steps
    else:
        assert taken < 1.1 * 120 and stats.verify_widths[1] > stats.row_steps / 2


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("window", ["auto", 4])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("settings", FORBIDDING.values(), ids=FORBIDDING)
@pytest.mark.parametrize("lengths", [[9], [3, 14, 1, 9]], ids=["one row", "four rows"])
def test_nothing_forbidden_is_proposed(lengths, settings, sampled, window):
    drafter = NGramDrafter(train_ngram(documents(8), 8, 3), num_draft_tokens=window)
    proposes_nothing_forbidden(drafter, lengths, settings | {"do_sample": sampled})


@pytest.mark.grid
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.usefixtures("width_costs_nothing")
def test_sampled_text_has_the_targets_distribution(settings):
    drafter = NGramDrafter(train_ngram(documents(SMALL), SMALL, 3))
    assert sampling_p_value(drafter, settings) > 1e-3
    assert drafter.last_stats.acceptance_count > 0


# ------------------------------------------------------------------ the tokenizer


def words(count: int, swap: bool = False, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of so many words, w0, w1, ..."""
    vocabulary = {f"w{i}": i for i in range(count)}
    if swap:
        vocabulary["w1"], vocabulary["w2"] = 2, 1
    model = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, **special)


def trained(tokenizer: PreTrainedTokenizerFast, folder: Path) -> NGramDrafter:
    (folder / "text.txt").write_text("w1 w2 w3 w1 w2 w3\nw1 w2 w4\n")
    return train_ngram_drafter(tokenizer, [folder / "text.txt"], order=2)


def refused(drafter: NGramDrafter, target) -> str:
    with pytest.raises(SpeculationError) as error:
        target.generate(torch.tensor([[1, 2]]), assistant_model=drafter, max_new_tokens=3)
    return str(error.value)


def test_training_keeps_the_tokenizers_fingerprint(tmp_path):
    tokenizer = words(40, bos_token="w1", eos_token="w2")
    drafter = trained(tokenizer, tmp_path)
    stored = {"vocab_size": 40, "hash": vocabulary_hash(tokenizer.get_vocab()), "bos_token_id": 1, "eos_token_id": 2}
    assert drafter.config.tokenizer == stored
    drafter.save_pretrained(str(tmp_path / "drafter"))
    assert Drafter.from_pretrained(tmp_path / "drafter").config.tokenizer == stored
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "11 tokens in 2 documents of text.txt; n-grams up to order 2." in card and "Nothing" not in card
    assert "others are refused" in card


def test_a_model_without_a_fingerprint_is_held_against_the_size_of_the_vocabulary(tmp_path):
    """Repos that were saved before there was one load; they serve targets that may have their tokenizer."""
    drafter = NGramDrafter(train_ngram(documents(8), 8192))
    drafter.save_pretrained(str(tmp_path))
    assert "tokenizer" not in json.loads((tmp_path / "config.json").read_text())
    assert "Not stated" in (tmp_path / "README.md").read_text()
    loaded = Drafter.from_pretrained(tmp_path)
    said = refused(loaded, llama(vocab=49152))
    assert "different tokenizers: vocabularies of 8192 and 49152 tokens" in said and "hf-specdec train ngram" in said
    target, ids = llama(vocab=8320), torch.tensor([[1, 2, 3]])  # padded
    plain = target.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=4, do_sample=False, assistant_model=loaded), plain)


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id"])
def test_special_ids_are_compared_where_both_are_known(name, tmp_path):
    drafter, target = trained(words(40, **{name.removesuffix("_id"): "w3"}), tmp_path), llama(vocab=48)
    several = [([5, 3], True), ([5, 7], False)] if name == "eos_token_id" else []
    for ids, fits in [(None, True), (3, True), (7, False), *several]:
        setattr(target.config, name, ids)
        setattr(target.generation_config, name, None)
        if fits:
            drafter.check_target(target)
        else:
            assert f"{name} 3 and" in refused(drafter, target)
    setattr(target.generation_config, name, 3)  # where chat models have some of theirs
    drafter.check_target(target)


def test_where_the_targets_tokenizer_is_at_hand_its_hash_decides(tmp_path):
    tokenizer = words(40, eos_token="w3")
    drafter, other = trained(tokenizer, tmp_path), trained(words(40, swap=True), tmp_path)
    llama(vocab=48, eos_token_id=7).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    drafter.check_target(target)  # whatever its config says of special ids
    assert "hashes" in refused(other, target)


@pytest.mark.parametrize("stored", [{"hash": 3}, {"size": 4}, {"vocab_size": "many"}, [1], "llama", {"hash": [[]]}])
def test_a_fingerprint_is_checked_when_it_is_read(stored, tmp_path):
    NGramDrafter(train_ngram(documents(8), 8)).save_pretrained(str(tmp_path))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer": stored}))
    with pytest.raises(SpeculationError, match=r"config\.json.*tokenizer"):
        Drafter.from_pretrained(tmp_path)
