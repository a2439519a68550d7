"""A round's times: on a device a forward goes on after its launch, until its results are looked at."""

import pytest
import torch

from hf_specdec import clock
from hf_specdec.engine import watch as watches
from hf_specdec.engine.watch import Watch

DRAFT, LAUNCH, TEST, READ = 1.0, 0.01, 0.002, 0.04


def watched(device: str, beside: bool) -> Watch:
    seconds = 0.0
    with clock.use(lambda: seconds):
        watch = Watch(torch.device(device))
        for passes in (DRAFT, LAUNCH, TEST):
            seconds += passes
            watch.lap()
        seconds += READ
        watch.judged(beside)
    return watch


@pytest.mark.parametrize(
    ("device", "beside", "forward", "draft"),
    [
        ("cpu", False, LAUNCH, DRAFT + TEST),
        ("cpu", True, LAUNCH, DRAFT + TEST),
        ("mps", False, LAUNCH + TEST + READ, DRAFT),
        ("mps", True, LAUNCH + TEST, DRAFT),  # the schedule's test has waited for the forward and for the draft
    ],
)
def test_what_is_waited_for_belongs_to_the_forward(device: str, beside: bool, forward: float, draft: float) -> None:
    watch = watched(device, beside)
    assert watch.forward_seconds == pytest.approx(forward) and watch.draft_seconds == pytest.approx(draft)


class Event:
    """A device that is so many seconds behind the host when it gets here."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def elapsed_time(self, later: "Event") -> float:
        return 1e3 * (later.seconds - self.seconds)


def test_a_gpu_says_itself_how_long_parts_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host asks for all of a round at once; the device takes a second to draft, half of one to verify."""
    reached = iter([0.0, 1.0, 1.5, 1.5, 1.5])
    monkeypatch.setattr(watches, "mark", lambda _: clock.Moment(0.0, Event(next(reached))))
    watch = Watch(torch.device("cuda"))
    for _ in range(3):
        watch.lap()
    watch.judged(beside=False)
    assert (watch.forward_seconds, watch.draft_seconds) == pytest.approx((0.5, 1.0))
