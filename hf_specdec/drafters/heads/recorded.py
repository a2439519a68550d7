"""`Recorded`: heads whose drafts are recorded steps, over static buffers."""

import torch
from torch import Tensor

from ...protocol import DraftContext, Sequences
from ...target.buffers import WIDEST, WIDTHS, Buffers, power_of_two
from ...target.cache import RaggedCache
from ...target.capturable import hindered, is_captured
from ...target.captured import MOST_AHEAD
from ...target.captured_cache import CapturedCache
from ...target.compiled import compiles
from ...verify.picking import DraftPicker
from ..drawn import Drawn
from .head import Head, News
from .states import States


def can_be_recorded(context: DraftContext, head: Head) -> bool:
    """Whether the call's forwards are captured, nothing of the head's make is against it, and draws go by logits
    alone."""
    pick = context.pick
    if context.target is None or not isinstance(pick, DraftPicker) or pick.recordable is None:
        return False
    if context.most_rows:  # rows of buffers do not join others
        return False
    captured = head.device == context.device and is_captured(context.target, context.forwards)
    return captured and not hindered(head.model) and not compiles(head.model)


class Recorded:
    """One draft is one step. The first draft of a call is made before: it reads the prompt, and shows what a slot of
    the cache takes."""

    def __init__(self, states: States) -> None:
        self.states, self.context, self.head = states, states.context, states.head

    def taken_over(self, cache: RaggedCache) -> CapturedCache:
        """The heads' cache, in static buffers.

        Raises:
            torch.OutOfMemoryError: there is no memory for them.
        """
        columns = min(self.context.max_length, self.context.prompt_ids.shape[1] + MOST_AHEAD)
        columns = max(columns, *cache.lengths)
        return CapturedCache(cache, [self.head.model, self.head.target], power_of_two(len(cache.lengths)), columns)

    def drafted(self, cache: CapturedCache, sequences: Sequences, candidates: int | None) -> tuple[Tensor, ...]:
        """What is drawn behind the sequences at all K places, as `Drawn.all` gives it."""
        pick, most, rows = self.context.pick, self.head.most, len(sequences.rows)
        assert isinstance(pick, DraftPicker), "which was asked whether it can be recorded"
        least = max(self.states.unread, self.head.usual)
        width = next((w for w in WIDTHS if w >= least), least)
        buffers = cache.with_room(width + self.head.beyond)
        cache.tell()
        news, numbers = self._fed(buffers, self.states.news(sequences.tokens, width)), None
        if self.context.do_sample:
            numbers = buffers.input("numbers", most, dtype=torch.float64)
            for i in range(most):
                numbers[:rows, i] = pick.numbers([n + i for n in sequences.lengths], sequences.rows, numbers.device)

        def step() -> tuple[Tensor, ...]:
            u = [None] * most if numbers is None else numbers.unbind(1)
            drawn = Drawn(lambda logits, i: pick.from_logits(logits, u[i], candidates))
            self.head.draft(news, cache, most, drawn.draw)
            return drawn.all()

        key = "heads", width, pick.recordable, candidates
        found = step() if width > WIDEST else cache.run(key, step)
        return tuple(several[:rows].clone() for several in found)

    def _fed(self, buffers: Buffers, news: News) -> News:
        """The news where a recorded step looks for them. Rows that nobody has read one place."""
        width = news.tokens.shape[1]
        counts = buffers.input("counts", dtype=torch.long)
        counts.fill_(1)
        counts[: len(news.counts)], buffers.offset[: len(news.first)] = news.counts, news.first
        states, chosen = buffers.put("states", news.states, width), buffers.put("chosen", news.tokens, width)
        return News(states, chosen, counts, buffers.offset)
