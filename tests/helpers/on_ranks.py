"""What the ranks of a launch do in a test, and how to launch them."""

import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from close_drafts import close_to
from models import hooked, llama, prompts
from processes import free_port
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_specdec import DraftModelDrafter, HybridDrafter, PearlDrafter, SpeculationError, SpeculationWarning
from hf_specdec.budget import Learned, Overlap
from hf_specdec.target.ranks import ranks_of

VOCAB = 96
"""some releases of transformers spread even vocabularies only"""


def launch(ranks, function, folder, timeout=200):
    """Run `function(folder)` on so many ranks, each a process of its own with what a launcher would tell it; (exit
    status, output) of each. They are forked, which saves the seconds that importing all this would take on each."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    children = {}
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            os.environ.update(told | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            AcceleratorState._reset_state(reset_partial_state=True)  # what a training here has told accelerate
            _run(function, folder, rank)
        children[rank] = child
    until, codes = time.monotonic() + timeout, {}
    while len(codes) < ranks:
        for rank, child in children.items():
            if rank not in codes:
                if time.monotonic() > until:
                    os.kill(child, signal.SIGKILL)
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return [(codes[rank], Path(folder, f"rank{rank}").read_text()) for rank in range(ranks)]


def _run(function, folder, rank):
    """One rank, which never comes back into the test."""
    code = 1
    try:
        sys.stdout = sys.stderr = open(f"{folder}/rank{rank}", "w", buffering=1)  # noqa: SIM115
        function(folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def pair():
    """The target of the tests on ranks, and a draft that is right now and then."""
    target = llama(VOCAB, seed=1)
    return target, close_to(target, 0.05)


def saved_pair(folder):
    for name, model in zip(("target", "draft"), pair(), strict=True):
        model.save_pretrained(f"{folder}/{name}")


def drafter_of(folder, **options):
    """On a target's rank the draft has no weights."""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        return PearlDrafter(AutoModelForCausalLM.from_pretrained(f"{folder}/draft"), worker="rank", **options).join()
    with torch.device("meta"):
        draft = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(f"{folder}/draft"))
    return PearlDrafter(draft, worker="rank", **options).join()


def loaded_target(folder):
    """Spread over all ranks of the process group."""
    return AutoModelForCausalLM.from_pretrained(
        f"{folder}/target", distributed_config=DistributedConfig(tp_plan="auto")
    )


def decoded(model, drafter=None, lengths=(7,), seed=0, **options):
    torch.manual_seed(seed)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(**prompts(list(lengths), VOCAB, seed=4), assistant_model=drafter, **options)


def at_token(count, action):
    """A streamer that does something at some token."""

    class Streamer:
        left = count

        def put(self, value):
            self.left -= 1
            if self.left == 0:
                action()

        def end(self):
            pass

    return Streamer()


# ---------------------------------------------------------------------- what the ranks do


def texts(folder, windows=range(1, 9)):
    """Greedy text is plain decoding's, seeded text the thread worker's, on a grid."""
    drafter = drafter_of(folder, window=1)
    if drafter.drafts:
        with pytest.raises(SpeculationError, match="which drafts"):
            decoded(pair()[0], drafter)
        return drafter.serve()
    alone, draft = pair()
    target, rank = loaded_target(folder), drafter.seat.rank
    with pytest.raises(SpeculationError, match="must be called once, on the drafting rank"):
        drafter.serve()
    assert drafter.draft_model.device.type == "meta"
    if drafter.seat.targets > 1:
        with pytest.raises(SpeculationError, match="2 ranks for the target, and this target is on 1"):
            decoded(alone, drafter)
    messages = 0
    with drafter:
        for window in windows:
            drafter.planners = Learned(lambda w=window: Overlap(w, overlapped=True))
            for lengths in ((7,), (5, 9, 1, 7)):
                assert torch.equal(decoded(target, drafter, lengths), decoded(alone, None, lengths)), window
                messages += drafter.last_timeline.messages if rank == 0 else 0
                # The leader's seed counts.
                text = decoded(target, drafter, lengths, seed=window + 100 * rank, do_sample=True)
                messages += drafter.last_timeline.messages if rank == 0 else 0
                threaded = PearlDrafter(draft, worker="thread", window=window)
                assert torch.equal(text, decoded(alone, threaded, lengths, seed=window, do_sample=True)), window
        line = drafter.last_timeline
        assert (line is None) == (rank > 0)
        if rank == 0:
            first, last = min(line.target)[0], max(line.target)[1]
            assert messages > 0 and all(first - 1 < began < ended < last + 1 for began, ended in line.draft)
        drafter.planners = Learned(Overlap)
        for _ in range(3):
            assert torch.equal(decoded(target, drafter, max_new_tokens=60), decoded(alone, None, max_new_tokens=60))
    with pytest.raises(SpeculationError, match="was closed"):
        decoded(target, drafter)
    print("all texts agree")


def some_texts(folder):
    texts(folder, [1, 4])


def killed_draft(folder):
    """The drafting rank dies in the middle of a call: the target's ranks finish alone, then and later."""
    drafter = drafter_of(folder, window=3)
    if drafter.drafts:
        Path(folder, "pid").write_text(str(os.getpid()))
        return drafter.serve()
    alone, target, leads = pair()[0], loaded_target(folder), drafter.seat.rank == 0
    decoded(target, drafter)

    def kill():
        if leads:
            os.kill(int(Path(folder, "pid").read_text()), signal.SIGKILL)

    for streamer in (at_token(6, kill), None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            text = decoded(target, drafter, streamer=streamer, max_new_tokens=40)
        assert torch.equal(text, decoded(alone, max_new_tokens=40))
        told = [w for w in caught if issubclass(w.category, SpeculationWarning)]
        assert len(told) == (1 if leads else 0), [str(w.message) for w in caught]
    print("finished alone")


def killed_target(folder):
    """The leading rank dies in the middle of a call: the drafting one returns with a warning."""
    drafter = drafter_of(folder, window=3)
    if drafter.drafts:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            drafter.serve()
        (told,) = [w for w in caught if issubclass(w.category, SpeculationWarning)]
        assert "closed the connection" in str(told.message)
        return print("noticed")
    decoded(loaded_target(folder), drafter, streamer=at_token(6, lambda: os.kill(os.getpid(), signal.SIGKILL)))


def serial(folder):
    """A target over all ranks, without a drafting one: windows by the clock, seeds of their own, large answers."""
    rank = PartialState(cpu=True).process_index
    (alone, draft), target = pair(), loaded_target(folder)
    ranks = ranks_of(target)
    assert ranks_of(alone) is None and ranks.size == 2 and ranks.leads == (rank == 0)
    for size in (0, 1, 900, 1016, 1017, 5000):
        sent = {"text": "x" * size, "q": torch.arange(size)[::2]}
        got = ranks.share(sent if rank == 0 else None)
        assert got["text"] == sent["text"] and torch.equal(got["q"], sent["q"])
    drafters = (DraftModelDrafter(draft), HybridDrafter(draft), PearlDrafter(draft, worker="thread"))
    for drafter in drafters:
        for lengths in ((7,), (5, 9, 1, 7)):
            for new in (10, 40):
                text = decoded(target, drafter, lengths, max_new_tokens=new)
                assert torch.equal(text, decoded(alone, None, lengths, max_new_tokens=new))
    fixed = DraftModelDrafter(draft, num_draft_tokens=3)
    text = decoded(target, fixed, seed=rank, do_sample=True)
    assert torch.equal(text, decoded(alone, fixed, seed=0, do_sample=True))
    with hooked(draft, lambda *_: 1 / 0, before=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(decoded(target, fixed), decoded(alone))
    told = [w for w in caught if issubclass(w.category, SpeculationWarning)]
    assert len(told) == (1 if rank == 0 else 0)
    print("all texts agree")
