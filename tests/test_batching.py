"""Rows that come and go: every answer is `generate`'s, whoever is decoded beside it, and nothing is left behind."""

import functools
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from drafters import Toy
from stream_models import streams_of, target_of
from test_disco import classifier
from transformers import DynamicCache, GenerationConfig

from hf_specdec import (
    BatchDecoder,
    DiscoDrafter,
    Drafter,
    DraftModelDrafter,
    HybridDrafter,
    NGramDrafter,
    PearlDrafter,
    PromptLookupDrafter,
    SpeculationError,
    SuffixDrafter,
)
from hf_specdec.batching import QueueFull, engine
from hf_specdec.protocol import Draft
from hf_specdec.target.cache import RaggedCache
from hf_specdec.target.joining import JoiningRunner, Reading
from hf_specdec.training.ngram import train_ngram

REQUESTS = [(5, 20), (1, 7), (30, 12), (17, 1), (8, 33), (3, 3), (12, 18), (26, 9), (2, 25), (9, 14)]
"""tokens of the prompt, and new ones"""
ENDS = [11, 23]
"""tokens that end a text"""


@pytest.fixture(scope="module")
def target() -> Any:
    return models.llama(eos_token_id=ENDS)


@pytest.fixture(scope="module")
def draft() -> Any:
    """Often agrees with the target."""
    model = models.llama(eos_token_id=ENDS)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for weight in model.parameters():
            weight += 0.05 * weight.std().nan_to_num(0.1) * torch.randn_like(weight)
    return model


def texts(seed: int = 0) -> list[list[int]]:
    """Prompts in which words recur."""
    dice = random.Random(seed)
    words = [[dice.randrange(2, 97) for _ in range(3)] for _ in range(6)]
    return [[x for _ in range(n) for x in dice.choice(words)][:n] for n, _ in REQUESTS]


def plain(model: Any, ids: list[int], new: int, **options: Any) -> list[int]:
    options = {"do_sample": False, "pad_token_id": 0} | options
    out = model.generate(torch.tensor([ids]), max_new_tokens=new, speculation_type="none", **options)
    return out[0, len(ids) :].tolist()


def made(kind: str, target: Any, draft: Any) -> Any:
    """A drafter of each kind."""
    counted = [[random.Random(i).randrange(97) for _ in range(60)] for i in range(4)]
    makers: dict[str, Any] = {
        "nobody": lambda: None,
        "lookup": PromptLookupDrafter,
        "lookup, trees": lambda: PromptLookupDrafter(num_branches=3),
        "suffix": SuffixDrafter,
        "n-gram": lambda: NGramDrafter(train_ngram(counted, 97, order=2)),
        "draft model": lambda: DraftModelDrafter(draft),
        "draft model, 3": lambda: DraftModelDrafter(draft, num_draft_tokens=3),
        "draft model, trees": lambda: DraftModelDrafter(draft, num_draft_tokens=3, num_candidates=3),
        "hybrid": lambda: HybridDrafter(draft),
        "hybrid, 2": lambda: HybridDrafter(draft, num_draft_tokens=2, memory_mb=1),
        "DISCO": lambda: DiscoDrafter(draft, classifier(), rule="draft", tau=0.3, max_draft_tokens=6),
        "DISCO, budget": lambda: DiscoDrafter(draft, classifier(), max_draft_tokens=6),
    }
    return makers[kind]()


KINDS = [
    "nobody",
    "lookup",
    "lookup, trees",
    "suffix",
    "n-gram",
    "draft model",
    "draft model, 3",
    "draft model, trees",
    "hybrid",
    "hybrid, 2",
    "DISCO",
    "DISCO, budget",
]


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_generates(target: Any, draft: Any, kind: str, rows: int) -> None:
    with BatchDecoder(target, made(kind, target, draft), max_rows=rows) as decoder:
        answers = [
            decoder.submit(ids, max_new_tokens=new, do_sample=False)
            for ids, (_, new) in zip(texts(), REQUESTS, strict=True)
        ]
        for answer, ids, (_, new) in zip(answers, texts(), REQUESTS, strict=True):
            expected = plain(target, ids, new)
            assert answer.result(60) == expected
            assert answer.finish_reason == ("stop" if expected[-1] in ENDS else "length")
            assert answer.stats.emitted_tokens == len(expected)
    assert decoder.stats.emitted_tokens == sum(len(answer.tokens) for answer in answers)
    assert not [note for note in decoder.stats.notes if "dropped" in note]


@pytest.mark.parametrize("ways", [{"copies": False}, {}, {"tree": "product"}], ids=["by value", "copies", "product"])
def test_streams_inside_the_target(ways: dict[str, Any]) -> None:
    model = target_of("Llama")
    drafter = streams_of(model, **ways)
    with BatchDecoder(model, drafter, max_rows=3) as decoder:
        answers = [
            decoder.submit(ids, max_new_tokens=new, do_sample=i % 3 == 2, top_k=1)
            for i, (ids, (_, new)) in enumerate(zip(texts(), REQUESTS, strict=True))
        ]
        for answer, ids, (_, new) in zip(answers, texts(), REQUESTS, strict=True):
            assert answer.result(60) == plain(model, ids, new)
    assert decoder.stats.drafted_tokens and not [note for note in decoder.stats.notes if "dropped" in note]


@pytest.mark.parametrize(
    "name", ["Llama", "Mistral", "Gemma2", "Gemma3", "GPT-2", "OPT", "Phi-3", "Qwen2 sliding", "GPT-NeoX"]
)
def test_every_family(name: str) -> None:
    model = models.build(name, "eager" if name in ("Gemma2", "Gemma3") else "sdpa")
    with BatchDecoder(model, PromptLookupDrafter(num_branches=2), max_rows=3) as decoder:
        answers = [
            decoder.submit(ids, max_new_tokens=new, do_sample=False)
            for ids, (_, new) in zip(texts(), REQUESTS, strict=True)
        ]
        for answer, ids, (_, new) in zip(answers, texts(), REQUESTS, strict=True):
            assert answer.result(60) == plain(model, ids, new)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3", "OPT", "GPT-2"])
@pytest.mark.parametrize("piece", [1, 4, 100])
def test_prompts_read_in_pieces_are_read_as_a_whole(name: str, piece: int) -> None:
    model = models.build(name, "eager" if name == "Gemma3" else "sdpa")
    ids = torch.tensor([texts()[2]])
    reading = Reading(model, ids, {"past_key_values": DynamicCache(config=model.config), "use_cache": True})
    with torch.no_grad():
        while reading.left:
            logits = reading.read(piece)
        whole = model(ids).logits[:, -1:]
    torch.testing.assert_close(logits, whole, rtol=1e-3, atol=1e-3)


SETTINGS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 1.3},
    {"do_sample": True, "top_k": 5},
    {"do_sample": False, "repetition_penalty": 1.4},
    {"do_sample": True, "top_p": 0.7, "repetition_penalty": 1.1},
    {"do_sample": False, "min_new_tokens": 9},
    {"do_sample": False, "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("kind", ["nobody", "lookup", "lookup, trees"])
def test_settings_that_differ_change_nobody_elses_text(target: Any, draft: Any, kind: str) -> None:
    """With one seed a request says beside others what it says alone: drafts without chance change no draw."""
    asked = [(ids, SETTINGS[i % len(SETTINGS)], i) for i, ids in enumerate(texts() + texts(1))]
    drafter = made(kind, target, draft)
    with BatchDecoder(target, drafter, max_rows=6) as decoder:
        answers = []
        for ids, options, seed in asked:
            torch.manual_seed(seed)
            answers.append(decoder.submit(ids, max_new_tokens=20, **options))
        found = [answer.result(60) for answer in answers]
    for (ids, options, seed), said in zip(asked, found, strict=True):
        torch.manual_seed(seed)
        alone = target.generate(
            torch.tensor([ids]), max_new_tokens=20, pad_token_id=0, assistant_model=PromptLookupDrafter(), **options
        )
        assert said == alone[0, len(ids) :].tolist(), options


def test_drawn_drafts_leave_the_distribution(target: Any) -> None:
    """The first two tokens of many answers, drafted at random, against the target's own distribution.

    9 outcomes of a model of three words, 1,600 answers: a shift of 0.06 in one of them is seen nearly always.
    """
    small, other = models.llama(3, seed=3), models.llama(3, seed=4)
    prompt, count = [0, 1, 2, 1], 1600
    torch.manual_seed(0)
    with BatchDecoder(small, DraftModelDrafter(other, num_draft_tokens=3), max_rows=16, max_waiting=count) as decoder:
        answers = [
            decoder.submit(prompt, max_new_tokens=3, do_sample=True, top_k=0, temperature=[1.0, 2.0][i % 2])
            for i in range(count)
        ]
        said = [tuple(answer.result(120)[1:3]) for answer in answers]
    for i, temperature in enumerate((1.0, 2.0)):
        expected = _pairs(small, prompt, temperature)
        mine = said[i::2]
        statistic = sum(
            (mine.count(pair) - len(mine) * p) ** 2 / (len(mine) * p) for pair, p in expected.items() if p * count > 5
        )
        assert statistic < 26.1, (temperature, statistic)  # of χ² with 8 degrees of freedom 0.001 lie above
    assert decoder.stats.accepted_tokens and decoder.stats.rejections


def _pairs(model: Any, prompt: list[int], temperature: float) -> dict[tuple[int, int], float]:
    """The chance of each second and third new token."""
    chances: dict[tuple[int, int], float] = {}
    with torch.no_grad():
        for a in range(3):
            for b in range(3):
                for c in range(3):
                    logits = model(torch.tensor([[*prompt, a, b]])).logits[0, -3:] / temperature
                    p = logits.double().softmax(-1)
                    chances[b, c] = chances.get((b, c), 0.0) + float(p[0, a] * p[1, b] * p[2, c])
    return chances


def test_tokens_come_as_they_are_decoded(target: Any) -> None:
    got: list[int] = []

    class Streamer:
        ended = 0

        def put(self, value: torch.Tensor) -> None:
            got.extend(value.flatten().tolist())

        def end(self) -> None:
            self.ended += 1

    ids, streamer = texts()[0], Streamer()
    with BatchDecoder(target, PromptLookupDrafter()) as decoder:
        answer = decoder.submit(ids, max_new_tokens=20, do_sample=False, streamer=streamer)
        assert list(answer) == list(answer) == answer.result(60) == plain(target, ids, 20)
    assert got == [*ids, *answer.tokens] and streamer.ended == 1


def test_stop_strings_end_a_row() -> None:
    model, tokenizer = models.llama(), models.tokenizer()
    ids = texts()[4]
    whole = tokenizer.decode(plain(model, ids, 40))
    stops = {"stop_strings": [whole[12:14]], "tokenizer": tokenizer}
    expected = plain(model, ids, 40, **stops)
    with BatchDecoder(model, PromptLookupDrafter()) as decoder:
        beside = [decoder.submit(x, max_new_tokens=30, do_sample=False) for x in texts()[:3]]
        answer = decoder.submit(ids, max_new_tokens=40, do_sample=False, **stops)
        assert answer.result(60) == expected and len(expected) < 40 and answer.finish_reason == "stop"
        assert [x.result(60) for x in beside] == [plain(model, x, 30) for x in texts()[:3]]


@pytest.mark.parametrize("kind", ["lookup", "suffix", "hybrid", "DISCO, budget"])
def test_cancelled_rows_leave_and_free_their_room(target: Any, draft: Any, kind: str) -> None:
    target_without_end = models.llama()
    drafter = made(kind, target_without_end, draft)
    with BatchDecoder(target_without_end, drafter, max_rows=4) as decoder:
        with models.slow(target_without_end, 0.005):
            endless = [decoder.submit(ids, max_new_tokens=400, do_sample=False) for ids in texts()[:6]]
            for answer in endless[:4]:
                next(iter(answer))
            for answer in endless[1:]:
                answer.cancel()
            for answer in endless[1:]:
                assert len(answer.result(60)) < 400 and answer.finish_reason == "cancelled"
            until(lambda: decoder.load.rows == 1 and decoder.load.waiting == 0)
            endless[0].cancel()
            endless[0].result(60)
            until(lambda: decoder.load.rows == 0)
        assert decoder.load.reserved == decoder.load.bytes == decoder.load.tokens == 0
        assert decoder.submit(texts()[0], max_new_tokens=9, do_sample=False).result(60) == plain(
            target_without_end, texts()[0], 9
        )


def test_the_cache_stays_within_its_bound(target: Any) -> None:
    model, seen, done = models.llama(), [], threading.Event()
    with BatchDecoder(model, PromptLookupDrafter(), max_rows=8, max_tokens=512) as decoder:

        def watch() -> None:
            while not done.is_set():
                seen.append(decoder.load)
                time.sleep(0.005)

        watcher = threading.Thread(target=watch)
        watcher.start()
        answers = [
            decoder.submit(ids, max_new_tokens=1 + 13 * i % 110, do_sample=False) for i, ids in enumerate(texts() * 2)
        ]
        for i, (answer, ids) in enumerate(zip(answers, texts() * 2, strict=True)):
            assert answer.result(60) == plain(model, ids, 1 + 13 * i % 110)
        done.set()
        watcher.join()
        with pytest.raises(SpeculationError, match="max_tokens=512"):
            decoder.submit(texts()[0], max_new_tokens=500)
    assert max(load.reserved for load in seen) <= 512
    assert max(load.rows for load in seen) > 1


def test_first_come_first_served() -> None:
    """A long request at the head of the queue is not passed by short ones that would fit."""
    model, order = models.llama(), []
    with BatchDecoder(model, max_rows=4, max_tokens=512) as decoder, models.slow(model, 0.002):
        running = decoder.submit(texts()[0], max_new_tokens=60, do_sample=False)
        long = decoder.submit(texts()[1], max_new_tokens=300, do_sample=False)
        short = [decoder.submit(ids, max_new_tokens=3, do_sample=False) for ids in texts()[2:5]]
        for name, answer in (("running", running), ("long", long), *(("short", one) for one in short)):
            answer.future.add_done_callback(lambda _, name=name: order.append(name))
        first = next(iter(long))
        assert not any(answer.tokens for answer in short) and first is not None
    assert order[0] == "running"


def test_prefix_processors_see_drafts_beyond_the_buffers_end() -> None:
    """Buffers of ids grow by 256 columns; drafts that cross their end are read by processors, too."""
    model = models.llama()
    options: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.05}
    for drafter in (PromptLookupDrafter(min_match=1), PromptLookupDrafter(num_branches=3)):
        with BatchDecoder(model, drafter, max_rows=2) as decoder:
            answers = [decoder.submit(([7, 9, 11] * 90)[:n], max_new_tokens=30, **options) for n in (244, 250, 253)]
            for answer, n in zip(answers, (244, 250, 253), strict=True):
                assert answer.result(60) == plain(model, ([7, 9, 11] * 90)[:n], 30, **options)


def test_a_join_that_fails_fails_its_row_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.llama()
    join = JoiningRunner.join

    def failing(self: Any, *args: Any) -> None:
        raise RuntimeError("out of memory")

    with BatchDecoder(model, max_rows=2) as decoder:
        monkeypatch.setattr(JoiningRunner, "join", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            decoder.submit(texts()[0], max_new_tokens=4, do_sample=False).result(30)
        monkeypatch.setattr(JoiningRunner, "join", join)
        assert decoder.submit(texts()[0], max_new_tokens=4, do_sample=False).result(30) == plain(model, texts()[0], 4)


@pytest.mark.filterwarnings("ignore")
def test_nobody_waits_for_a_thread_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = BatchDecoder(models.llama(), max_rows=1)

    def breaking(*_: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(decoder._engine, "turn", breaking)
    monkeypatch.setattr(decoder._engine, "fail", breaking)
    answers = [decoder.submit(ids, max_new_tokens=4) for ids in texts()[:1]]
    for answer in answers:
        with pytest.raises(MemoryError):
            answer.result(30)
    until(lambda: not decoder.alive)
    with pytest.raises(SpeculationError, match="closed"):
        decoder.submit(texts()[0], max_new_tokens=4)
    decoder.close()


def test_a_full_queue_says_so() -> None:
    model = models.llama()
    with BatchDecoder(model, max_rows=1, max_waiting=2) as decoder, models.slow(model, 0.01):
        answers = [decoder.submit(texts()[0], max_new_tokens=50, do_sample=False)]
        next(iter(answers[0]))
        answers += [decoder.submit(texts()[1], max_new_tokens=2, do_sample=False) for _ in range(2)]
        with pytest.raises(QueueFull, match="max_waiting=2"):
            decoder.submit(texts()[1], max_new_tokens=2)
        answers[0].cancel()
        assert [answer.result(60) for answer in answers[1:]] == [plain(model, texts()[1], 2)] * 2


def test_a_model_that_fails_fails_those_who_are_there_and_nobody_after_them(target: Any) -> None:
    model = models.llama()
    forward, broken = model.forward, threading.Event()

    @functools.wraps(forward)
    def failing(*args: Any, **kwargs: Any) -> Any:
        if broken.is_set():
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    model.forward = failing
    with BatchDecoder(model, PromptLookupDrafter(), max_rows=3) as decoder:
        answers = [decoder.submit(ids, max_new_tokens=300, do_sample=False) for ids in texts()[:3]]
        for answer in answers:
            next(iter(answer))
        broken.set()
        for answer in answers:
            with pytest.raises(RuntimeError, match="out of memory"):
                answer.result(60)
            with pytest.raises(RuntimeError, match="out of memory"):
                list(answer)
        broken.clear()
        assert decoder.submit(texts()[0], max_new_tokens=9, do_sample=False).result(60) == plain(model, texts()[0], 9)


def test_what_is_wrong_with_one_request_ends_that_one_alone() -> None:
    model = models.llama()
    with BatchDecoder(model, PromptLookupDrafter(), max_rows=4) as decoder, models.slow(model, 0.002):
        beside = [decoder.submit(ids, max_new_tokens=40, do_sample=False) for ids in texts()[:3]]
        bad = decoder.submit(texts()[3], max_new_tokens=4, do_sample=False, sequence_bias={(5000,): 1.0})
        later = decoder.submit(texts()[4], max_new_tokens=4, do_sample=False, forced_eos_token_id=10**6)
        with pytest.raises((ValueError, IndexError)):
            bad.result(60)
        with pytest.raises(IndexError):  # raised when it is about to end, in a round of all
            later.result(60)
        assert [answer.result(60) for answer in beside] == [plain(model, ids, 40) for ids in texts()[:3]]


@pytest.mark.filterwarnings("ignore::hf_specdec.SpeculationWarning")
@pytest.mark.parametrize("fault", ["raises", "nonsense", "late", "too much"])
def test_a_drafter_can_only_cost_time(target: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def propose(context: Any, sequences: Any, budget: list[int]) -> Draft:
        nonlocal calls
        calls += 1
        if calls < 4:
            return Draft.from_lists([[5][:room] for room in budget])
        if fault == "raises":
            raise RuntimeError("no")
        if fault == "nonsense":
            return Draft.from_lists([[10**6][:room] for room in budget])
        if fault == "late":
            time.sleep(0.3)
        return Draft.from_lists([[5] * (300 if fault == "too much" else 1) for _ in budget])

    drafter = Toy(propose)
    monkeypatch.setattr(drafter.session_class, "patience", 0.1)
    with BatchDecoder(target, drafter, max_rows=4) as decoder:
        answers = [decoder.submit(ids, max_new_tokens=24, do_sample=False) for ids in texts()]
        assert [answer.result(60) for answer in answers] == [plain(target, ids, 24) for ids in texts()]


def test_a_session_knows_only_of_rows_that_are_there(target: Any) -> None:
    met: list[int] = []

    def propose(context: Any, sequences: Any, budget: list[int]) -> Draft:
        assert len(set(sequences.rows)) == len(sequences.rows) <= 2
        met.extend(sequences.rows)
        for tokens, length, ids in zip(sequences.tokens, sequences.lengths, sequences.ids, strict=True):
            assert tokens == ids[:length].tolist()
        return Draft.from_lists([[]] * len(budget))

    with BatchDecoder(target, Toy(propose), max_rows=2) as decoder:
        answers = [decoder.submit(ids, max_new_tokens=5, do_sample=False) for ids in texts()]
        for answer in answers:
            answer.result(60)
    assert set(met) <= set(range(len(REQUESTS))) and len(set(met)) > 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
        ({"logits_processor": [lambda ids, scores: scores]}, "model.generate"),
        ({"assistant_model": PromptLookupDrafter()}, "assistant_model"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"cache_implementation": "static"}, "dynamic cache"),
        ({"use_cache": False}, "dynamic cache"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}, "attention_mask"),
        ({"position_ids": torch.arange(5)[None] + 3}, "position_ids"),
        ({"output_scores": True}, "output_scores"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_a_row_cannot_have(target: Any, options: dict[str, Any], message: str) -> None:
    with BatchDecoder(target) as decoder:
        with pytest.raises(ValueError, match=message):
            decoder.submit(texts()[0], **{"max_new_tokens": 4} | options)
        for bad in ([], [[1, 2], [3, 4]], torch.zeros(1, 1, 1, dtype=torch.long), "a text", [10**6], [-1], [0.5]):
            with pytest.raises(SpeculationError, match="input_ids"):
                decoder.submit(bad, max_new_tokens=4)  # type: ignore[arg-type]
        with pytest.raises(SpeculationError, match="shorten the prompt"):
            decoder.submit([5] * 600, max_new_tokens=4)
        assert decoder.submit(texts()[0], max_new_tokens=4, do_sample=False).result(60) == plain(target, texts()[0], 4)
    with pytest.raises(SpeculationError, match="closed"):
        decoder.submit(texts()[0], max_new_tokens=4)


def test_a_criterion_that_raises_ends_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.llama()
    with BatchDecoder(model, max_rows=4) as decoder, models.slow(model, 0.002):
        beside = decoder.submit(texts()[0], max_new_tokens=40, do_sample=False)
        bad = decoder._row(texts()[1], None, {"max_new_tokens": 9, "do_sample": False})

        def raising(ids: Any, _: int) -> bool:
            if ids.shape[0] > len(texts()[1]) + 2:
                raise RuntimeError("no such string")
            return False

        monkeypatch.setattr(bad.call.stopping, "row", raising)
        with decoder._news:
            decoder._waiting.append(bad)
            decoder._news.notify_all()
        with pytest.raises(RuntimeError, match="no such string"):
            bad.answer.result(60)
        assert beside.result(60) == plain(model, texts()[0], 40)


def test_what_a_tokenizer_gives_is_a_prompt(target: Any) -> None:
    given = models.tokenizer()("abc", return_tensors="pt")
    with BatchDecoder(target) as decoder:
        answer = decoder.submit(given, max_new_tokens=4, do_sample=False)
        assert answer.result(60) == plain(target, given["input_ids"][0].tolist(), 4)
    stats = decoder.stats
    assert stats.tokens_per_second > 0 and stats.other_seconds >= 0 and stats.plain_steps == 3


def test_streams_stay_within_the_bound_of_the_cache() -> None:
    """A token's streams take slots, too."""
    target = target_of("Llama")
    with BatchDecoder(target, streams_of(target, copies=False, num_nodes=40), max_rows=8, max_tokens=1024) as decoder:
        held, play = [0], decoder._engine._play_round

        def look() -> None:
            play()
            if len(decoder._engine.rows):
                layers = decoder._engine.target.cache.layers
                held[0] = max(held[0], *(layer.keys.shape[0] * layer.keys.shape[2] for layer in layers))

        decoder._engine._play_round = look  # type: ignore[method-assign]
        options = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
        answers = [decoder.submit([5, 6, 7, 8, 9], **options) for _ in range(8)]
        assert all(len(answer.result(60)) for answer in answers)
    assert 0 < held[0] <= 1024


def test_what_no_batch_is_made_of(target: Any, draft: Any) -> None:
    with pytest.raises(SpeculationError, match="from_pretrained"):
        BatchDecoder(target, "prompt_lookup")  # type: ignore[arg-type]
    with pytest.raises(SpeculationError, match="order of its own"):
        BatchDecoder(target, PearlDrafter(draft))
    with pytest.raises(SpeculationError, match=r"model\.generate"):
        BatchDecoder(models.build("Bloom", "eager"))
    for name in ("max_rows", "max_tokens", "max_waiting"):
        for bad in (0, -1, 1.5, "8"):
            with pytest.raises(SpeculationError, match=name):
                BatchDecoder(target, **{name: bad})


def test_the_flag_names_the_drafter(target: Any, draft: Any) -> None:
    config = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=ENDS, pad_token_id=0)
    config.speculation_type = "prompt_lookup"
    with BatchDecoder(target, generation_config=config) as decoder:
        assert isinstance(decoder.drafter, PromptLookupDrafter)
        assert decoder.submit(texts()[0]).result(60) == plain(target, texts()[0], 12)
    with BatchDecoder(target, draft) as decoder:
        assert isinstance(decoder.drafter, DraftModelDrafter)


def test_closing_without_waiting_gives_everything_up() -> None:
    model = models.llama()
    with models.slow(model, 0.005):
        decoder = BatchDecoder(model, max_rows=2)
        answers = [decoder.submit(ids, max_new_tokens=400, do_sample=False) for ids in texts()[:5]]
        next(iter(answers[0]))
        decoder.close(wait=False)
    assert all(answer.done() for answer in answers) and not decoder.alive
    assert {answer.finish_reason for answer in answers} == {"cancelled"}


def test_others_wait_no_longer_than_a_round_for_a_prompt() -> None:
    """A piece of a prompt takes about as long as a round once both were measured, and is never shorter than pays."""
    model = models.llama()
    one = engine.Engine(model, None, 4, 4096)
    one.reading_speed, one.round_seconds = 1000.0, 0.2
    assert one._piece(2000) == engine.LONGEST_PIECE, "nobody waits"
    one.rows.all = [None]  # type: ignore[list-item]
    assert one._piece(2000) == 200 and one._piece(290) == 290
    one.round_seconds = 10.0
    assert one._piece(2000) == engine.LONGEST_PIECE
    one.round_seconds = 1e-6
    assert one._piece(2000) == engine.LEAST_PIECE
    one.reading_speed = 0.0
    assert one._piece(2000) == engine.LEAST_PIECE


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_a_cache_that_come_and_go(seed: int) -> None:
    """Against a list of rows that are simply there."""
    model, dice = models.llama(), random.Random(seed)
    runner, kept = JoiningRunner(model, 4, 2048), []
    for _ in range(40):
        if len(kept) < 4 and (not kept or dice.random() < 0.6):
            n = dice.randint(1, 90)
            read = DynamicCache(config=model.config)
            with torch.no_grad():
                model(torch.randint(2, 97, (1, n)), past_key_values=read)
            kept.append([(layer.keys[0].clone(), layer.values[0].clone()) for layer in read.layers])
            runner.join(read, n + dice.randint(0, 60))
        else:
            gone = dice.sample(range(len(kept)), dice.randint(1, len(kept)))
            kept = [kept[b] for b in runner.leave(gone)]
        assert runner.lengths == [row[0][0].shape[1] for row in kept]
        assert runner.reserved <= 2048
        for b, row in enumerate(kept):
            for (keys, values), (own_keys, own_values) in zip(row, runner.cache.row(b), strict=True):
                assert torch.equal(keys, own_keys) and torch.equal(values, own_values)
    assert isinstance(getattr(runner, "cache", None), (RaggedCache, type(None)))


def until(true: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "BatchDecoder"])


@pytest.mark.parametrize("window", [3, "auto"])
def test_drafts_stay_right_while_rows_come_and_go(window: Any) -> None:
    """A draft that is the target is always right, unless its cache holds something else than the text."""
    model = models.llama()
    lengths = [200, 5, 40, 9, 130, 3, 20, 60, 4, 11]
    with BatchDecoder(model, DraftModelDrafter(model, num_draft_tokens=window), max_rows=3) as decoder:
        answers = [
            decoder.submit(ids, max_new_tokens=new, do_sample=False) for ids, new in zip(texts(), lengths, strict=True)
        ]
        for answer, ids, new in zip(answers, texts(), lengths, strict=True):
            assert answer.result(60) == plain(model, ids, new)
    assert decoder.stats.drafted_tokens and not decoder.stats.rejections


def test_a_drafter_that_knows_nothing_of_batches_works(target: Any) -> None:
    """`propose` alone is enough."""

    def propose(context: Any, sequences: Any, budget: list[int]) -> Draft:
        return Draft.from_lists([tokens[-2:][:room] for tokens, room in zip(sequences.tokens, budget, strict=True)])

    drafter: Drafter = Toy(propose)
    with BatchDecoder(target, drafter, max_rows=3) as decoder:
        answers = [decoder.submit(ids, max_new_tokens=24, do_sample=False) for ids in texts()]
        assert [answer.result(60) for answer in answers] == [plain(target, ids, 24) for ids in texts()]
