"""When each model was busy, for any drafter: PEARL records it, for the others it is read off the forwards."""

from collections.abc import Sequence

from ...drafters.base import Drafter
from ...drafters.pearl import Timeline
from ..instruments.meter import Meter, Role
from ..instruments.recording import Round


def timeline_of(drafter: Drafter, meter: Meter, rounds: Sequence[Round]) -> Timeline:
    """The decoding rounds of a generation. In a serial schedule the target waits for every draft.

    A draft without a model is busy while it drafts; only drafters that ran elsewhere record what they did.
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


def _spans(meter: Meter, role: Role) -> list[tuple[float, float]]:
    """When the model's forwards began and ended, prefills left out."""
    forwards = [f for f in meter.of(role) if f.context]
    return [(meter.began + f.start, meter.began + f.start + f.seconds) for f in forwards]
