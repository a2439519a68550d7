"""The simulated GPU: what it takes is what was asked of it, each at its price, and the same every time."""

import models
import pytest
import simulated
import torch
from close_drafts import nearly
from laboratory import script
from simulated import CALL, KERNEL, LAUNCH, MEASURED, TRANSFER, Device, forward_seconds

import hf_specdec
from hf_specdec import DraftModelDrafter, PromptLookupDrafter, clock, transfer
from hf_specdec.target.recorded import RecordedSteps, at_once

HERE = torch.device("cpu")


def test_forwards_between_two_widths_lie_on_their_line() -> None:
    assert [forward_seconds(width) for width in MEASURED] == pytest.approx(list(MEASURED.values()))
    assert forward_seconds(24) == pytest.approx((MEASURED[16] + MEASURED[32]) / 2)
    assert forward_seconds(96) == pytest.approx(MEASURED[64] + (MEASURED[64] - MEASURED[32]))


def test_a_round_takes_what_its_parts_take() -> None:
    """The device works while the host goes on; who reads waits for what was asked for until then."""
    model, ids = models.llama(), torch.zeros(1, 8, dtype=torch.long)
    device = Device(model)

    def step() -> torch.Tensor:
        return model(ids).logits.argmax(-1) + 1

    with device.simulated(), torch.no_grad():
        steps = RecordedSteps(HERE)
        with at_once(lambda: None):
            steps.run("step", step)
        transfer.to_host(ids)
        device.met.clear()
        host, began = device.host, clock.mark(HERE)
        chosen = steps.run("step", step)
        ended = clock.mark(HERE)
        answer = transfer.to_host(chosen + 1, meanwhile=lambda: transfer.to_device([1], HERE) * 2)
    assert answer == (model(ids).logits.argmax(-1) + 2).tolist()
    counts = {"calls": 1, "graphs": 1, "slots": 8, "launches": 2, "writes": 1, "reads": 1}
    assert device.met == counts, device.functions
    forward = CALL + LAUNCH + MEASURED[8] + 2 * KERNEL
    assert ended.since(began) == pytest.approx(forward) and ended.at - began.at == pytest.approx(CALL + LAUNCH)
    assert device.host - host == pytest.approx(forward + KERNEL + TRANSFER)
    assert device.busy - host == pytest.approx(forward + 2 * KERNEL)  # behind the answer, which waits for none of it


def test_what_is_not_recorded_holds_up_the_host() -> None:
    model, other = models.llama(), models.llama(seed=1)
    device = Device(model)
    with device.simulated(), torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long)), other(torch.zeros(1, 1, dtype=torch.long))
        assert bool(torch.ones(1)[0])
    assert device.met["eager"] == 2 and device.met["reads"] == 1
    assert device.host > (1 + simulated.C) * simulated.EAGER and device.host == pytest.approx(device.busy + TRANSFER)
    assert device.seconds["target"] == forward_seconds(4) and device.seconds["draft"] == simulated.C * MEASURED[1]


def test_a_prediction_is_the_same_twice() -> None:
    """But for a call or two of what this process has met before."""
    laboratory = script("simulated_device")
    lines = []
    for _ in range(3):  # what is remembered of this process is remembered after the first
        model, prompts = models.llama(), [models.prompts([9])["input_ids"]]
        lines.append([float(cell) for cell in laboratory.predicted(model, PromptLookupDrafter(), prompts, 12).cells])
    assert lines[1] == pytest.approx(lines[2], rel=0.02) and lines[1][3] >= 1e3 * MEASURED[1]


def test_a_warm_up_makes_drafts_look_no_dearer_than_they_are() -> None:
    """All chains and lengths of text are recorded there, with any that is met: once, and that is no cost."""
    model = models.llama()
    drafter, device, call = DraftModelDrafter(nearly(model)), Device(model), {"do_sample": False, "pad_token_id": 0}
    call |= {"max_new_tokens": 60, "speculation": {"forwards": "captured"}}
    with device.simulated():
        hf_specdec.warm_up(model, drafter, **models.prompts([9]), **call)
        drafter.last_stats = None
        model.generate(**models.prompts([9], seed=1), **call, assistant_model=drafter)
    stats = drafter.last_stats
    assert stats is not None and stats.draft_calls > stats.target_calls and not stats.notes, stats
