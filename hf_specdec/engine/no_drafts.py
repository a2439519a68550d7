"""`NoDrafts`: the engine without drafts, for what it does beside drafting."""

from typing import Any

from torch import Tensor

from ..protocol import Draft, DraftContext, Sequences
from ..schedule import Guarded, Schedule
from ..session import DraftSession
from ..stats import SpeculationStats


class _Nothing(DraftSession):
    weighs = True

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        return Draft.from_lists([[]] * len(room))


class NoDrafts:
    """A drafter that drafts nothing."""

    proposes_trees = brings_runner = recordable = False
    because = ""

    def __init__(self) -> None:
        self.last_stats: SpeculationStats | None = None

    def start(self, context: DraftContext) -> DraftSession:
        return _Nothing(context)

    def why_not(self, prompt_ids: Tensor, source: dict[str, Any] | None) -> str:
        return ""

    def takes_ragged(self) -> bool:
        return True

    def schedule(self, session: Guarded, context: DraftContext) -> Schedule | None:
        return None
