"""A round's times: on a device a forward goes on after its launch, until its results are looked at."""

import pytest
import torch

from hf_specdec import clock
from hf_specdec.engine.watch import Watch

DRAFT, LAUNCH, TEST, READ = 1.0, 0.01, 0.002, 0.04


def watched(device: str, beside: bool) -> Watch:
    seconds = 0.0
    with clock.use(lambda: seconds):
        watch = Watch(torch.device(device))
        for passes, over in ((DRAFT, watch.drafted), (LAUNCH, watch.launched), (TEST, watch.tested)):
            seconds += passes
            over()
        seconds += READ
        watch.judged(beside)
    return watch


@pytest.mark.parametrize(
    ("device", "beside", "forward", "draft"),
    [
        ("cpu", False, LAUNCH, DRAFT + TEST),
        ("cpu", True, LAUNCH, DRAFT + TEST),
        ("cuda", False, LAUNCH + TEST + READ, DRAFT),
        ("cuda", True, LAUNCH + TEST, DRAFT),  # the schedule's test has waited for the forward and for the draft
    ],
)
def test_what_is_waited_for_belongs_to_the_forward(device: str, beside: bool, forward: float, draft: float) -> None:
    watch = watched(device, beside)
    assert watch.forward_seconds == pytest.approx(forward) and watch.draft_seconds == pytest.approx(draft)
