"""Any drafter serves a target that is spread over several ranks."""

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
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_specdec import DraftModelDrafter, HybridDrafter, PearlDrafter, SpeculationWarning
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


def loaded_target(folder):
    """Spread over all ranks of the process group."""
    return AutoModelForCausalLM.from_pretrained(
        f"{folder}/target", distributed_config=DistributedConfig(tp_plan="auto")
    )


def decoded(model, drafter=None, lengths=(7,), seed=0, **options):
    torch.manual_seed(seed)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(**prompts(list(lengths), VOCAB, seed=4), assistant_model=drafter, **options)


def serial(folder):
    """On each rank: windows by the clock, seeds of their own, large answers."""
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


@pytest.mark.set_times  # forked ranks take this clock along, each its own
def test_any_drafter_serves_a_target_over_two_ranks(tmp_path: Path) -> None:
    saved_pair(tmp_path)
    ends = launch(2, serial, tmp_path)
    assert all(code == 0 and "all texts agree" in output for code, output in ends), ends
