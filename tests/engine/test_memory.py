"""A call leaves nothing behind, holds nothing twice, and gives the caller's cache back whatever happens."""

import gc
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import compare
import models
import pytest
import torch
import toy_drafters as drafters
from close_drafts import close_to
from processes import children
from random_walks import documents
from seam import HeadDrafter, StreamDrafter
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache
from transformers.generation import StoppingCriteria

from hf_specdec.drafters import (
    DiscoDrafter,
    DraftModelDrafter,
    HybridDrafter,
    NGramDrafter,
    PearlDrafter,
    PromptLookupDrafter,
    SuffixDrafter,
)
from hf_specdec.drafters.disco import StopClassifier
from hf_specdec.target import ragged
from hf_specdec.target.cache import BLOCK, RaggedCache
from hf_specdec.tools.instruments.provenance import peak_memory_bytes, reset_peak_memory
from hf_specdec.train.ngram import train_ngram

TARGET = models.llama(num_hidden_layers=3, seed=1)
DRAFT = close_to(TARGET, 0.05)
NGRAMS = train_ngram(documents(models.VOCAB), models.VOCAB, order=3)
MAKES: dict[str, Callable[[], Any]] = {
    "draft_model": lambda: DraftModelDrafter(DRAFT),
    "disco": lambda: DiscoDrafter(DRAFT, StopClassifier(10, 8)),
    "pearl": lambda: PearlDrafter(DRAFT, worker="thread"),
    "prompt_lookup": lambda: PromptLookupDrafter(num_branches=2),
    "suffix": lambda: SuffixDrafter(memory_mb=1, num_branches=2),
    "ngram": lambda: NGramDrafter(NGRAMS),
    "hybrid": lambda: HybridDrafter(DRAFT),
    "head": HeadDrafter,
    "stream": StreamDrafter,
}
WITH_DRAFT = ("draft_model", "disco", "pearl", "hybrid")
DRAFTERS = pytest.mark.parametrize("kind", MAKES)
BATCHES = pytest.mark.parametrize("lengths", [[9], [9, 5, 1, 7]], ids=["one row", "four rows"])


def generate(drafter: Any = None, lengths: list[int] | None = None, seed: int = 0, **options: Any) -> Any:
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "assistant_model": drafter} | options
    return TARGET.generate(**models.prompts(lengths or [9], seed=seed), **options)


# ---------------------------------------------------------------------- nothing stays


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


LEARNED = {"Evidence", "Record", "Proposer", "Times"}
"""what is kept for the next call, a bounded number of each: a call may meet evidence, or a size of a batch, that
those before it did not"""


def alive() -> Counter[str]:
    """Objects of ours, caches and tensors, by type. What hangs in a reference cycle is among them."""
    types = (type(thing) for thing in gc.get_objects())
    ours = ("hf_specdec", "seam", "transformers.cache_utils")
    return Counter(
        kind.__name__
        for kind in types
        if kind in (torch.Tensor, torch.nn.Parameter) or str(kind.__module__).startswith(ours)
    )


class Look(StoppingCriteria):
    """Counts what is alive in the middle of a call."""

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.seen = alive()
        return torch.zeros(len(ids), dtype=torch.bool)


def test_the_count_sees_a_call() -> None:
    generate(HeadDrafter(), stopping_criteria=[look := Look()])
    assert {"Generation", "Rows", "HeadSession", "DynamicCache", "Tensor"} <= set(look.seen)


@pytest.mark.grid
@BATCHES
@DRAFTERS
def test_a_finished_call_leaves_nothing(kind: str, lengths: list[int]) -> None:
    drafter = MAKES[kind]()
    ends = {"eos_token_id": compare.uneven_eos(TARGET, lengths)} if len(lengths) > 1 else {}
    for options in (ends, {"return_dict_in_generate": True}, {"do_sample": True}):
        for _ in range(3):  # a drafter may learn, and static buffers get inputs of further widths
            generate(drafter, lengths, **options)
        with without_collector():
            before = alive()
            generate(drafter, lengths, **options)
            assert not {kind for kind in alive() - before if kind not in LEARNED}


# ---------------------------------------------------------------------- nothing is held twice


def peak(call: Callable[[], Any]) -> int:
    """Bytes of tensors, at most, that were allocated at once in a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        call()
    now = most = 0
    for event in watched.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize("kind", ["draft_model", "disco", "prompt_lookup", "hybrid"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.eager  # static buffers are larger, and stay
def test_the_peak_is_plains_and_the_drafts_own(kind: str, rows: int) -> None:
    narrow = HybridDrafter(DRAFT, num_draft_tokens=4, num_candidates=1, num_branches=1, num_recycled=0)
    drafter, lengths = narrow if kind == "hybrid" else MAKES[kind](), [400] * rows  # a wide tree needs room of its own
    plain, own = peak(lambda: generate(None, lengths)), 0
    if kind in WITH_DRAFT:
        with torch.no_grad():
            cache = DRAFT(**models.prompts(lengths)).past_key_values
        own = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        own += own * BLOCK // 400  # room to grow, which long prompts do not notice
        assert 0 < own < plain
    assert peak(lambda: generate(drafter, lengths)) <= 1.05 * (plain + own)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system does not count anew")
def test_the_benchmarks_peak_is_of_one_call() -> None:
    """What came before does not count, though it was larger and its memory is still the process's."""
    cpu, peaks = torch.device("cpu"), []
    for megabytes in (64, 8, 32):
        reset_peak_memory(cpu)
        before = peak_memory_bytes(cpu)
        pieces = [torch.ones(25_000) for _ in range(10 * megabytes)]
        peaks.append((peak_memory_bytes(cpu) - before) / 1e6)
        del pieces
    assert peaks == pytest.approx([64, 8, 32], rel=0.3)


@pytest.mark.eager  # static buffers are larger, and stay
def test_the_prompts_keys_and_values_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer: what the ragged cache holds has left the stock one."""
    sizes = []

    class Watched(RaggedCache):
        def __init__(self, stock: DynamicCache) -> None:
            held = [layer.keys.numel() for layer in stock.layers]
            super().__init__(stock)
            assert all(held) and not any(layer.keys.numel() + layer.values.numel() for layer in stock.layers)
            assert [layer.keys[:, :, : self.lengths[0]].numel() for layer in self.layers] == held
            for layer in stock.layers:
                sizes.append(layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes())

    models.probed(TARGET)
    monkeypatch.setattr(ragged, "RaggedCache", Watched)
    generate(PromptLookupDrafter(), [9, 5, 1, 7])
    assert sizes == [0, 0, 0]


@BATCHES
@pytest.mark.parametrize("kind", WITH_DRAFT)
def test_the_drafts_prefill_makes_its_last_logits_only(kind: str, lengths: list[int]) -> None:
    made: list[tuple[int, int]] = []

    def heard(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        made.append((kwargs["input_ids"].shape[1], output.logits.shape[1]))

    hook = DRAFT.register_forward_hook(heard, with_kwargs=True)
    try:
        generate(MAKES[kind](), lengths)  # the first call probes the draft
        made.clear()
        generate(MAKES[kind](), lengths)
    finally:
        hook.remove()
    assert made[0] == (max(lengths), 1)


# ---------------------------------------------------------------------- an interrupt


class Interrupt(StoppingCriteria):
    """Ctrl-C after some tokens: as a criterion, as a streamer, or as a hook in the middle of a forward."""

    def __init__(self, at: int) -> None:
        self.left = at

    def count(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    put = count

    def end(self) -> None:
        raise AssertionError("it was not interrupted")

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.count()
        return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.grid
@BATCHES
@pytest.mark.parametrize("where", ["criterion", "streamer", "forward"])
@pytest.mark.parametrize("kind", [*MAKES])
def test_an_interrupt_leaves_the_prompt_in_the_users_cache(kind: str, where: str, lengths: list[int]) -> None:
    expected, cache = DynamicCache(config=TARGET.config), DynamicCache(config=TARGET.config)
    batch = models.prompts(lengths)
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    stop = Interrupt(at=2 if where == "forward" else 4)
    options: dict[str, Any] = {"eos_token_id": compare.uneven_eos(TARGET, lengths)} if len(lengths) > 1 else {}
    options |= {"criterion": {"stopping_criteria": [stop]}, "streamer": {"streamer": stop}, "forward": {}}[where]
    drafter = MAKES[kind]()
    # With a hook forwards are eager: so the first call's are, too, and nothing new is learned of them.
    forwards: dict[str, Any] = {"speculation": {"forwards": "eager"}} if where == "forward" else {}
    with torch.no_grad():
        TARGET(**batch, position_ids=positions, past_key_values=expected)
    counts = stop.count if where == "forward" else lambda *_: None  # half of the layers have written their keys
    at, stop.left = stop.left, 1 << 30
    hook = TARGET.model.layers[1].register_forward_hook(models.spy(counts))
    generate(drafter, lengths, **forwards)
    stop.left = at
    with without_collector():
        before = alive()
        try:
            with pytest.raises(KeyboardInterrupt):
                generate(drafter, lengths, past_key_values=cache, **options, **forwards)
        finally:
            hook.remove()
        assert not (alive() - before).keys() - {"Tensor", "Evidence", "Proposer"}  # the cache's, and what was learned
    for mine, theirs in zip(cache.layers, expected.layers, strict=True):
        for got, wanted in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert got.shape == wanted.shape
            for b, n in enumerate(lengths):
                torch.testing.assert_close(got[b, :, -n:], wanted[b, :, -n:])


@BATCHES
def test_an_interrupt_while_the_prompt_is_read_is_what_is_raised(lengths: list[int]) -> None:
    stop = Interrupt(1)
    hook = TARGET.model.layers[1].register_forward_hook(models.spy(stop.count))
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            generate(PromptLookupDrafter(), lengths, past_key_values=DynamicCache(config=TARGET.config))
    finally:
        hook.remove()
    assert raised.value.__context__ is None


def test_an_interrupt_of_the_last_forward_leaves_the_prompt_too() -> None:
    """The one that feeds rows what plain decoding fed them behind their ends."""
    cache, lengths = DynamicCache(config=TARGET.config), [9, 5, 1, 7]
    ends = {"eos_token_id": compare.uneven_eos(TARGET, lengths)}
    plain = generate(None, lengths, **ends)
    drafter = drafters.oracle(drafters.Future(plain), 30)  # the prompt, a round, and that one
    stop = Interrupt(1 << 30)
    hook = TARGET.model.layers[1].register_forward_hook(models.spy(stop.count))
    models.probed(TARGET)
    stop.left = 3
    try:
        with pytest.raises(KeyboardInterrupt):
            generate(drafter, lengths, past_key_values=cache, **ends)
    finally:
        hook.remove()
    assert [layer.keys.shape[2] for layer in cache.layers] == [9] * 3


@pytest.mark.parametrize("new", [2, 12])
def test_a_sliding_cache_is_rolled_back_while_it_can_be(new: int) -> None:
    """Prompt and text within the window. Beyond it, it is at least usable: it records no past any more."""
    model = models.build("Mistral")
    cache = DynamicCache(config=model.config)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "past_key_values": cache}
    with pytest.raises(KeyboardInterrupt):
        model.generate(
            **models.prompts([2]), assistant_model=DraftModelDrafter(model), streamer=Interrupt(1 + new), **options
        )
    assert not any(layer.record_past for layer in cache.layers)
    if new < models.WINDOW - 2:
        assert [(layer.get_seq_length(), layer.keys.shape[2]) for layer in cache.layers] == [(2, 2)] * 2


# ---------------------------------------------------------------------- many calls, and calls at once


@pytest.mark.grid
@pytest.mark.parametrize("kind", [kind for kind in MAKES if kind != "stream"])  # that one hooks into the target
def test_calls_at_once_share_a_drafter(kind: str) -> None:
    drafter = MAKES[kind]()
    batches = [([9], 0), ([5, 9], 1), ([9, 5, 1, 7], 2), ([3], 3)]
    plain = [generate(None, lengths, seed) for lengths, seed in batches]

    def calls(thread: int) -> None:
        for i in range(3):
            lengths, seed = batches[(thread + i) % len(batches)]
            got = generate(drafter, lengths, seed)
            assert torch.equal(got, plain[(thread + i) % len(batches)])

    with warnings.catch_warnings(record=True) as heard, ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("always")
        list(pool.map(calls, range(8)))
    assert [str(warning.message) for warning in heard] == []


def used() -> dict[str, int]:
    """What this process holds of its system."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": threading.active_count(),
        "children": len(children(os.getpid())),
        "files": len(os.listdir("/proc/self/fd")),
    }


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("kind", [*MAKES, "pearl process"])
def test_a_thousand_calls_take_no_more_than_fifty(kind: str) -> None:
    drafter = PearlDrafter(DRAFT, worker="process") if kind == "pearl process" else MAKES[kind]()
    before: dict[str, int] = {}
    for i in range(1000):
        lengths = [[9], [5, 9], [9, 5, 1, 7]][i % 3]
        generate(drafter, lengths, seed=i, max_new_tokens=4, do_sample=i % 2 == 0)
        if i == 49:
            before = used()
    after = used()
    print(f"\n{kind}: {before} -> {after}, RSS {(after['rss'] - before['rss']) / 2**20:+.2f} MiB")
    assert after["rss"] <= before["rss"] + 8 * 2**20
    assert {name: after[name] for name in after if name != "rss"} == {n: before[n] for n in before if n != "rss"}
    if kind == "pearl process":
        drafter.close()
