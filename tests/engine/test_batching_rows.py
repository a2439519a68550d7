"""Rows that come and go: whose turn it is, and that what a row held is free once it has left."""

import random
import threading
import time
from typing import Any

import models
import pytest
import torch
from batch_requests import REQUESTS, TARGET, made, plain, texts
from processes import until
from stream_models import streams_of, target_of
from toy_drafters import Toy
from transformers import DynamicCache

from hf_specdec import BatchDecoder, PromptLookupDrafter, SpeculationError
from hf_specdec.engine import requests as engine
from hf_specdec.engine.answer import QueueFull
from hf_specdec.protocol import Draft
from hf_specdec.target.cache import RaggedCache
from hf_specdec.target.joining import JoiningRunner

pytestmark = pytest.mark.usefixtures("no_decoder_is_left")


@pytest.mark.eager
@pytest.mark.parametrize("kind", ["lookup", "suffix", "hybrid", "DISCO, budget"])
def test_cancelled_rows_leave_and_free_their_room(kind: str) -> None:
    target_without_end = models.llama()
    drafter = made(kind)
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


def test_the_cache_stays_within_its_bound() -> None:
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


@pytest.mark.eager
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


@pytest.mark.eager
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


def test_a_session_knows_only_of_rows_that_are_there() -> None:
    met: list[int] = []

    def propose(context: Any, sequences: Any, room: list[int]) -> Draft:
        assert len(set(sequences.rows)) == len(sequences.rows) <= 2
        met.extend(sequences.rows)
        for tokens, length, ids in zip(sequences.tokens, sequences.lengths, sequences.ids, strict=True):
            assert tokens == ids[:length].tolist()
        return Draft.from_lists([[]] * len(room))

    with BatchDecoder(TARGET, Toy(propose), max_rows=2) as decoder:
        answers = [decoder.submit(ids, max_new_tokens=5, do_sample=False) for ids in texts()]
        for answer in answers:
            answer.result(60)
    assert set(met) <= set(range(len(REQUESTS))) and len(set(met)) > 5


def test_streams_stay_within_the_bound_of_the_cache() -> None:
    """A token's streams take slots, too."""
    target = target_of("Llama")
    with BatchDecoder(target, streams_of(target, copies=False, num_nodes=40), max_rows=8, max_tokens=1024) as decoder:
        held, play = [0], decoder._engine.play_round

        def look() -> None:
            play()
            if len(decoder._engine.rows):
                layers = decoder._engine.target.cache.layers
                held[0] = max(held[0], *(layer.keys.shape[0] * layer.keys.shape[2] for layer in layers))

        decoder._engine.play_round = look  # type: ignore[method-assign]
        options = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
        answers = [decoder.submit([5, 6, 7, 8, 9], **options) for _ in range(8)]
        assert all(len(answer.result(60)) for answer in answers)
    assert 0 < held[0] <= 1024


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
    one = engine.Requests(model, None, 4, 4096)
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
