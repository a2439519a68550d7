"""When each model was busy, for any drafter: PEARL records it, for the others it is read off the forwards."""

from collections.abc import Sequence
from pathlib import Path

from ...drafters.base import Drafter
from ...drafters.pearl import Timeline
from ...drafters.pearl.timeline import Spans
from ...errors import SpeculationError
from ..instruments.bare import decode_forwards
from ..instruments.meter import Forward, Meter, Role
from ..instruments.recording import Round


def timeline_of(drafter: Drafter, meter: Meter, rounds: Sequence[Round]) -> Timeline:
    """The decoding rounds of a generation, in which the target of a serial schedule waits for every draft.

    A draft without a model is busy while it drafts; only drafters that ran elsewhere have to record what they did.
    """
    recorded = getattr(drafter, "last_timeline", None)
    if isinstance(recorded, Timeline):
        return recorded
    target, draft = (_spans(meter, role) for role in ("target", "draft"))
    if not meter.of("draft"):
        draft = [(began - r.draft_seconds, began) for (began, _), r in zip(target, rounds, strict=False) if r.drafted]
    return Timeline(
        target=target,
        draft=draft,
        waited=sum(r.draft_seconds for r in rounds),
        tests=[(r.drafted, r.accepted) for r in rounds],
    )


def _spans(meter: Meter, role: Role) -> Spans:
    """By `clock.now`, as a worker records its own."""
    return [(meter.began + f.start, meter.began + f.start + f.seconds) for f in decode_forwards(meter.of(role))]


def see_worker(meter: Meter, timeline: Timeline) -> None:
    """Put the draft steps into the meter that it could not see: made in another process, or without a model."""
    if not meter.of("draft"):
        meter.forwards += [Forward("draft", 1, 1, 1, a - meter.began, b - a) for a, b in timeline.draft]


def save_timeline(timeline: Timeline, path: Path) -> None:
    """Draw it into a PNG.

    Raises:
        SpeculationError: it cannot be written, or matplotlib is not installed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        timeline.plot(path)
    except (OSError, ValueError) as error:  # matplotlib: a file format that it does not know
        raise SpeculationError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
