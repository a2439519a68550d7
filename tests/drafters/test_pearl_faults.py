"""A worker that dies, hangs, raises or answers garbage costs time and one warning, and leaves nothing behind."""

import itertools
import multiprocessing.connection
import os
import pickle
import random
import signal
import socket
import struct
import threading
import time
import warnings
from contextlib import suppress

import pytest
import torch
from close_drafts import close_to
from models import hooked, llama
from pearl_pairs import DRAFTS, TARGET, generate, pearl, workers_in_threads
from processes import until
from transformers import AutoModelForCausalLM

from hf_specdec import PearlDrafter, SpeculationWarning
from hf_specdec.drafters.pearl import PearlSession
from hf_specdec.drafters.pearl.worker import serving, workers
from hf_specdec.drafters.pearl.worker.serving import serve
from hf_specdec.drafters.pearl.worker.wire import Link, Setup, packed
from hf_specdec.drafters.pearl.worker.workers import Worker, Workers
from hf_specdec.verify.picking import DraftPicker
from hf_specdec.verify.processing import Processing
from hf_specdec.verify.randomness import Randomness

DROPPED = "PearlDrafter was dropped"


def left_behind():
    """Threads of ours, and open files and sockets."""
    return len(workers_in_threads()), len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    generate(None)
    before = left_behind()
    yield
    assert left_behind() == before


@pytest.fixture
def short_patience(monkeypatch):
    monkeypatch.setattr(PearlSession, "patience", 0.5)


def answers(make):
    """A worker that answers every message with bytes of its own."""

    def serve(link, model, stream=None):
        try:
            while True:
                name, *content = link.receive()
                for part in make(name, *content):
                    os.write(link.connection.fileno(), part)
        except OSError:
            link.close()

    return serve


def frame(message, size=None):
    """A message as a connection has it, whose length may be a lie."""
    size = len(message) if size is None else size
    header = struct.pack("!i", size) if size < 2**31 else struct.pack("!iQ", -1, size)
    return header + message


def says(*message):
    """A worker that answers every message with this one."""
    return answers(lambda *_: [frame(packed(*message))])


def a_step(*tokens, number=None, forks=(), cut=None):
    """A worker's answer to each order: a step of these tokens, or the first bytes of it."""

    def make(name, *content):
        if name != "draft":
            return []
        step = "step", content[0] if number is None else number, 1, 0.0, 0.0, [*tokens], [*forks]
        return [frame(packed(*step)[:cut])]

    return make


def quits_after(messages):
    left = [messages]

    def make(*_):
        left[0] -= 1
        if left[0] < 0:
            raise OSError("gone")
        return []

    return answers(make)


def changed(name, change):
    """A worker that does its work, but for the messages of one name."""

    def serve_changed(link, model, stream=None):
        send = link.send
        link.send = lambda *message: send(*(change(*message) if message[0] == name else message))
        serve(link, model)

    return serve_changed


def with_fork(first, *more):
    """A step that tells of one more fork."""
    return lambda *step: (*step[:-1], [*step[-1], (0, 9, 1, first, *more)])


class Named:
    """What is found by its name."""


noise = random.Random(0)
FAULTS = {
    "hangs": answers(lambda *_: []),
    "noise": answers(lambda *_: [noise.randbytes(200)]),
    "noise in a message": answers(lambda *_: [frame(noise.randbytes(200))]),
    "half a message": answers(lambda *_: [frame(b"abc", size=100)]),
    "a huge message": answers(lambda *_: [frame(b"abc", size=2**60)]),
    "an empty message": answers(lambda *_: [frame(b"")]),
    "no message": answers(lambda *_: [frame(pickle.dumps(7))]),
    "an unknown message": says("stop"),
    "a class": says("step", Named),
    "an object": says("done", Named()),
    "ids out of range": answers(a_step((10**9,))),
    "negative ids": answers(a_step((-1,))),
    "ids that are none": answers(a_step(("a",))),
    "rows that do not exist": answers(a_step((1,), (2,), (3,))),
    "no rows": answers(a_step()),
    "steps of nothing": says("step"),
    "steps without content": says("step", 1),
    "half a step": answers(a_step((1,), cut=20)),
    "done with nothing": says("done"),
    "an error": says("error", "boom \ufffd"),
    "an error without a word": says("error", 7),
    "hangs up at once": quits_after(0),
    "hangs up after the first order": quits_after(1),
    "hangs up in the second round": quits_after(2),
    "one step for ever": answers(lambda *order: itertools.repeat(*a_step((1,))(*order) or [b"", 0])),
    "old news for ever": answers(lambda *_: itertools.repeat(frame(packed("done", -5)))),
    "old steps for ever": answers(lambda *_: itertools.repeat(frame(packed("step", -5, "of whatever kind")))),
    "forks of no step": changed("step", with_fork(7)),
    "forks without a text": changed("step", with_fork(0)),
    "more than a fork": changed("step", with_fork(1, 2)),
}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_bad_workers_are_dropped(fault, do_sample, monkeypatch, short_patience):
    monkeypatch.setattr(serving, "serve", FAULTS[fault])
    began = time.perf_counter()
    with pytest.warns(SpeculationWarning, match=DROPPED) as warned:
        text = generate(pearl(window=3), do_sample=do_sample)
    assert len([w for w in warned if issubclass(w.category, SpeculationWarning)]) == 1
    assert text.shape == (1, 7 + 24) and ((text >= 0) & (text < TARGET.config.vocab_size)).all()
    assert do_sample or torch.equal(text, generate(None))
    assert time.perf_counter() - began < 25  # others have a patience of 30


DISTRIBUTIONS = {
    "none": ([], []),
    "of other tokens": ([2, 3], [0.5, 0.5]),
    "one with 0": ([1, 2], [0.0, 1.0]),
    "one below 0": ([1, 2], [1.5, -0.5]),
    "too much": ([1, 2], [0.5, 0.7]),
    "too little": ([1, 2], [0.5, 0.3]),
    "no numbers": ([1, 2], ["a", "b"]),
    "no number": ([1, 2], [0.5, float("nan")]),
    "infinite": ([1, 2], [float("inf"), 0.5]),
    "one missing": ([1, 2], [1.0]),
    "one twice": ([1, 1], [0.5, 0.5]),
    "of no token": ([1, 10**9], [0.5, 0.5]),
}


@pytest.mark.parametrize("q", DISTRIBUTIONS)
def test_distributions_that_are_none_are_dropped(q, monkeypatch, short_patience):
    monkeypatch.setattr(serving, "serve", answers(a_step((1, *DISTRIBUTIONS[q]))))
    drafter, close, clean = pearl(window=3), PearlSession.close, []
    monkeypatch.setattr(PearlSession, "close", lambda session: (clean.append(session.call.clean), close(session)))
    with pytest.warns(SpeculationWarning, match=DROPPED) as warned:
        assert generate(drafter, do_sample=True).shape == (1, 31)
    assert len([w for w in warned if issubclass(w.category, SpeculationWarning)]) == 1 and clean == [False]


@pytest.mark.parametrize("lengths", [(7,), (5, 9, 1, 7)], ids=str)
@pytest.mark.parametrize("after", [0, 1, 2, 5, 9])
def test_a_draft_that_raises_is_dropped(after, lengths):
    draft = close_to(TARGET, 0.01)
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) > after:
            raise RuntimeError("the draft broke")

    drafter = pearl(draft, window=4)
    broken = pytest.warns(SpeculationWarning, match="the draft broke")
    with hooked(draft, fail, before=True), broken as warned:
        assert torch.equal(generate(drafter, lengths), generate(None, lengths))
    assert len([w for w in warned if issubclass(w.category, SpeculationWarning)]) == 1


class Interrupt:
    """A streamer that does something at its n-th token."""

    def __init__(self, at, action):
        self.left, self.action = at, action

    def put(self, value):
        self.left -= 1
        if self.left == 0:
            self.action()

    def end(self):
        pass


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("at", [2, 3, 6])
def test_ctrl_c_leaves_no_thread(at):
    with pytest.raises(KeyboardInterrupt):
        generate(pearl(window=4), streamer=Interrupt(at, interrupt))


def test_two_calls_at_once_get_a_worker_each():
    drafter, texts = pearl(DRAFTS["good"], window=3), []
    inner = lambda: texts.append(generate(drafter))  # noqa: E731
    outer = generate(drafter, streamer=Interrupt(5, inner))
    assert torch.equal(outer, generate(None)) and torch.equal(texts[0], generate(None))


def test_messages_stay_small_beside_whole_distributions(monkeypatch):
    vocab = 128_000
    config = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    target = llama(vocab=vocab, seed=1, **config)
    drafter, sizes = pearl(close_to(target, 0.1), window=4, corrections=0), []
    connection = multiprocessing.connection.Connection
    send = connection.send_bytes
    monkeypatch.setattr(connection, "send_bytes", lambda self, data: (sizes.append(len(data)), send(self, data)))
    generate(drafter, target=target, do_sample=True, max_new_tokens=30, top_k=0, temperature=0.7)
    assert drafter.last_stats.rejections > 5
    assert max(sizes) < 0.02 * 4 * vocab


@pytest.mark.grid
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("lengths", [(7,), (5, 9, 1, 7)], ids=str)
def test_a_line_may_break_at_any_moment(lengths, do_sample, monkeypatch):
    moments, broken = random.Random(0), []

    def serve_for_a_while(link, model, stream=None):
        def cut():
            with suppress(OSError), socket.socket(fileno=os.dup(link.connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(moments.uniform(0.0, 0.08), cut)
        timer.start()
        serve(link, model)
        timer.join()

    monkeypatch.setattr(serving, "serve", serve_for_a_while)
    drafter, plain = pearl(DRAFTS["good"], window=3), generate(None, lengths, max_new_tokens=40)
    for _ in range(25):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            text = generate(drafter, lengths, max_new_tokens=40, do_sample=do_sample)
        assert text.shape == plain.shape and (do_sample or torch.equal(text, plain))
        broken.append(sum(DROPPED in str(w.message) for w in caught))
    assert set(broken) <= {0, 1} and sum(broken) > 5


def is_gone(process):
    return process.poll() is not None


def test_a_process_is_used_again_and_ended():
    with PearlDrafter(DRAFTS["good"], window=3, worker="process") as drafter:
        for lengths in ((7,), (5, 9, 1, 7)):
            assert torch.equal(generate(drafter, lengths), generate(None, lengths))
            (worker,) = drafter.workers.free
        torch.manual_seed(1)
        sampled = generate(drafter, do_sample=True)
        torch.manual_seed(1)
        assert torch.equal(sampled, generate(pearl(DRAFTS["good"], window=3), do_sample=True))
        assert drafter.workers.free == [worker]
        with pytest.raises(KeyboardInterrupt):
            generate(drafter, streamer=Interrupt(4, interrupt))
        with pytest.warns(SpeculationWarning, match=DROPPED) as warned:
            stop = Interrupt(4, lambda: (drafter.workers.free or [worker])[0].process.kill())
            assert torch.equal(generate(drafter, streamer=stop), generate(None))
        assert len([w for w in warned if issubclass(w.category, SpeculationWarning)]) == 1 and is_gone(worker.process)
    assert is_gone(worker.process) and drafter.workers.free == []


@pytest.mark.fresh_python
def test_a_stopped_process_is_given_up(short_patience):
    drafter = PearlDrafter(DRAFTS["good"], window=3, worker="process")
    generate(drafter)
    (worker,) = drafter.workers.free
    with pytest.warns(SpeculationWarning, match="gave no usable answer") as warned:
        stop = Interrupt(4, lambda: os.kill(worker.process.pid, signal.SIGSTOP))
        assert torch.equal(generate(drafter, streamer=stop), generate(None))
    assert len([w for w in warned if issubclass(w.category, SpeculationWarning)]) == 1 and is_gone(worker.process)
    del drafter


@pytest.mark.parametrize("used", [False, True])
def test_a_drafter_that_is_forgotten_ends_its_process(used):
    drafter = PearlDrafter(DRAFTS["good"], window=3, worker="process")
    if used:
        generate(drafter)
    process = drafter.workers.free[0].process
    del drafter
    assert is_gone(process)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: PearlDrafter.from_pretrained(folder, worker="process"),
        pytest.param(lambda _: PearlDrafter(DRAFTS["good"], window=3, worker="process"), marks=pytest.mark.slow),
    ],
    ids=["loaded", "made"],
)
def test_a_process_starts_with_its_drafter(make, tmp_path):
    """Not with the first call, which would wait for its imports; made or loaded, and with no thread left behind."""
    PearlDrafter(DRAFTS["good"], window=3, worker="thread").save_pretrained(str(tmp_path))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with make(str(tmp_path)) as drafter:
        (launched,) = drafter.workers.free
        assert launched.draft is None and not is_gone(launched.process)
        assert torch.equal(generate(drafter), generate(None))
        assert drafter.workers.free == [launched] and launched.draft is not None
    assert is_gone(launched.process)
    del drafter, launched
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after <= before
    assert not workers_in_threads()


def test_a_process_that_had_nothing_to_draft_is_used_again(recwarn):
    """Nor had it read the prompt, as drafting had not paid in the last call."""
    with PearlDrafter(DRAFTS["good"], window=3, worker="process") as drafter:
        drafter.planners.of(TARGET, (1, False)).resting = True
        assert torch.equal(generate(drafter, max_new_tokens=2), generate(None, max_new_tokens=2))
        (worker,) = drafter.workers.free
        assert torch.equal(generate(drafter), generate(None)) and drafter.last_stats.draft_calls > 0
        assert drafter.workers.free == [worker]
    assert not [w for w in recwarn if DROPPED in str(w.message)]


def test_a_process_that_died_between_two_calls_is_replaced(recwarn):
    with PearlDrafter(DRAFTS["good"], window=3, worker="process") as drafter:
        generate(drafter)
        process = drafter.workers.free[0].process
        process.kill()
        process.wait()
        assert torch.equal(generate(drafter), generate(None))
        assert drafter.last_stats.draft_calls > 0
    assert not [w for w in recwarn if DROPPED in str(w.message)]


def test_a_worker_in_use_when_its_drafter_is_closed_ends_after_the_call():
    with PearlDrafter(DRAFTS["good"], window=3, worker="process") as drafter:
        generate(drafter)
        process = drafter.workers.free[0].process
        assert torch.equal(generate(drafter, streamer=Interrupt(4, drafter.close)), generate(None))
        assert is_gone(process) and drafter.workers.free == []


def test_a_message_that_nobody_takes_is_given_up():
    mine, theirs = map(Link, socket.socketpair())
    mine.doubt(0.1)
    with pytest.raises(OSError, match="unavailable"):
        mine.send("open", bytes(1 << 24))
    mine.close(), theirs.close()


def test_a_worker_is_lent_once():
    pool, lent = Workers(in_threads=True), []
    workers = [Worker(None, lambda: None) for _ in range(200)]
    pool.free.extend(workers)
    threads = [threading.Thread(target=lambda: lent.extend(iter(pool.reuse, None))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lent) == 200 and {id(worker) for worker in lent} == {id(worker) for worker in workers}


def test_a_thread_whose_draft_hangs_is_left_behind_until_it_goes_on(monkeypatch):
    monkeypatch.setattr(workers, "GRACE", 0.2)
    drafting, go_on = threading.Event(), threading.Event()
    draft = close_to(TARGET, 0.01)
    draft.register_forward_pre_hook(lambda *_: (drafting.set(), go_on.wait(20)))
    worker = Workers(in_threads=True).take(draft, torch.device("cpu"))
    picker = DraftPicker(Processing([]), TARGET.config.vocab_size, False, Randomness(0), torch.device("cpu"))
    setup = Setup(torch.ones(1, 3).long(), torch.ones(1, 3).long(), frozenset(), True, {}, picker)
    worker.link.send("open", setup)
    assert drafting.wait(10)
    worker.close()
    assert not go_on.is_set()
    go_on.set()
    until(lambda: not workers_in_threads())


def test_a_process_ends_with_its_owner():
    """As when that is killed: nobody is left to end it, whatever it is at."""
    worker = workers.launched()
    worker.process.stdin.close()
    assert worker.process.wait(60) == 0
    worker.close()


@pytest.mark.slow
def test_killed_at_any_moment():
    moments = random.Random(0)
    with PearlDrafter(DRAFTS["good"], window=3, worker="process") as drafter:
        for _ in range(100):
            generate(drafter)
            process = drafter.workers.free[0].process
            timer = threading.Timer(moments.uniform(0, 0.2), process.kill)
            timer.start()
            assert torch.equal(generate(drafter, max_new_tokens=60), generate(None, max_new_tokens=60))
            timer.join()
            process.wait()
            drafter.close()


def test_a_saved_drafter_comes_back(tmp_path):
    drafter = PearlDrafter(llama(seed=2), window=3, post_verify=False)
    drafter.save_pretrained(str(tmp_path))
    again = PearlDrafter.from_pretrained(str(tmp_path))
    assert again.config.window == 3 and again.config.post_verify is False
    assert isinstance(again.draft_model, type(AutoModelForCausalLM.from_config(drafter.draft_model.config)))


def test_serve_ends_with_its_line():
    worker = Workers(in_threads=True).take(TARGET, torch.device("cpu"))
    worker.close()
    assert callable(serve)
