"""`Engine`: the round. Draft, one forward of the target, judge, keep, roll back, tell, leave.

`generate` admits all rows of its call at once (`generation`); `BatchDecoder` and the server admit them as they come
(`requests`). Both play the same rounds. Rows may advance in three ways, which differ in the runner and in how a row
takes its tokens (`taking`): in lockstep, staggered, or ragged.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from ..budget import Cost
from ..protocol import Draft, Finder, Forward, Runner, Verdict
from ..stats import SpeculationStats
from ..target.captured import Captured
from ..target.devices import input_device
from ..transfer import moved, to_device, waits
from ..verify.drafts import parents_of
from ..verify.greedy import GreedyFinder
from ..verify.trial import Result
from .drafting import Drafting
from .fitting import LEAST_FED, MOST_FED, UNSOUND, no_draft
from .modes import Mode
from .parts import BatchPart, in_order, parts_of, rows_of_forward, together
from .rows import Row, Rows
from .taking import Taking
from .verdicts import verdict_of
from .watch import Watch, count_forward, count_row

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Engine:
    """Rows of one target. Subclasses say who joins, who leaves, and who is told."""

    runner: Runner

    def __init__(
        self,
        model: "PreTrainedModel",
        vocab: int,
        rows: Rows,
        mode: Mode,
        taking: Taking,
        cost: Cost,
        stats: SpeculationStats,
    ) -> None:
        """
        Args:
            vocab: size of its logits.
            taking: how rows take the tokens that were judged.
            cost: of the target's forwards; kept from call to call.
            stats: of all rounds.
        """
        self.model, self.rows, self.mode, self.taking, self.cost, self.stats = model, rows, mode, taking, cost, stats
        self.vocab = vocab
        self.widest = MOST_FED + 1
        """tokens per row of a forward"""
        self.device = input_device(model)  # asked once: transformers looks for it among the parameters
        self._unsettled: Callable[[], None] | None = None

    def play_round(self) -> None:
        """One round, in eight steps. Before and after it the runner holds each row's tokens but for the last one. Where
        the device works by itself a round is counted while the next one's forward is under way.

        In the letters of Leviathan et al. (2023), Algorithm 1: γ drafted tokens with their q are in
        `BatchPart.judged`, the target's p come from `forward.logits`, and of each row n tokens are accepted
        (`Result.path`) and n + 1 appended: fewer where the row stops, and n where a token that was drafted beside the
        forward was the last to pass.
        """
        rows, watch = self.rows, Watch(self.rows.device)
        active = [not row.stopped for row in rows.all]  # in lockstep a finished row stays, is fed padding, not counted

        # 1. Draft: each drafter proposes tokens for its rows, no more than there is room for.
        self.cost.pads_to(self.runner.widths)
        parts = parts_of(rows)
        for part in parts:
            part.fed = part.judged = self._draft(part)
        fed = together(parts, len(rows), rows.device)
        width = fed.tokens.shape[1] + 1

        # 2. Verify: the target reads each row's last token and its draft, in one forward.
        watch.lap()
        starts = list(self.runner.lengths)
        forward = self._forward(fed, parts)
        watch.lap()
        self.settle()

        # 3. What is judged: a schedule that drafted meanwhile may add to what was fed.
        serial = True
        for part in parts:
            if part.drafting is not None and (order := part.drafting.order) is not None:
                part.judged, part.answered = order.test(part.fed)
                serial = False
        watch.lap()

        # 4. Judge and keep: each row takes the accepted tokens and one of the target's own, until it stops.
        rows.reserve(max(width - 1, *(part.judged.tokens.shape[1] for part in parts)) + 1)
        for part in parts:
            self._judge(part, forward)
        results = in_order(parts)
        watch.judged(beside=not serial)

        # 5. Roll back: rejected tokens leave the cache. It was fed the row's last token and the draft, and keeps that
        # token and the n accepted ones. What is now the row's last token is not in it: the next round feeds it.
        if fed.parents is None:
            self.runner.truncate([start + len(result.tokens) for start, result in zip(starts, results, strict=True)])
        elif forward.found is not None:  # a finished row was fed no padding behind its last token
            self.runner.truncate([start + 1 + len(result.kept) for start, result in zip(starts, results, strict=True)])
        else:
            self.runner.keep([start + 1 for start in starts], [result.kept for result in results])

        # 6. Learn: drafters are told what became of their drafts.
        watch.draft_seconds += sum([part.drafting.held_up for part in parts if part.drafting is not None])
        for part in parts:
            if part.drafting is not None:
                if not part.sound:
                    part.drafting.session.drop(UNSOUND)
                verdict = self._verdict(part, forward)
                verdict.seconds, verdict.draft_seconds = watch.forward_seconds, watch.draft_seconds
                part.drafting.observe(verdict)

        # 7. Settle: what a round took and gave is counted, and whoever waits for a row gets its tokens.
        stopped = [b for b, row in enumerate(rows.all) if row.stopped]
        between = watch.since_forward()
        times = None
        if serial and watch.usual:  # beside a worker in the background a forward takes longer
            refed = max(starts) - min(starts) if self.mode.staggered else 0  # what faster rows have ahead
            times = len(rows), refed + width, between
        self._unsettled = partial(self._settle, parts, active, width, watch, times)
        if stopped or not waits(self.rows.device):
            self.settle()

        # 8. Leave: rows that have stopped make room.
        self._leave(stopped)

    def settle(self) -> None:
        """What of the last round is not settled yet."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is not None:
            unsettled()

    def _settle(
        self,
        parts: Sequence[BatchPart],
        active: Sequence[bool],
        width: int,
        watch: Watch,
        times: tuple[int, int, float] | None,
    ) -> None:
        """
        Args:
            times: rows, tokens per row of a forward with what was fed again, and seconds of the round beside it; None
                where they say nothing of others.
        """
        self._count(parts, active, width, watch)
        for part in parts:
            for row, result in zip(part.rows, part.results, strict=True):
                self._tell(row, result)
        if times is not None:
            rows, fed, between = times
            self.cost.observe_forward(rows, fed, watch.forward_seconds)
            self.cost.observe_between(width, between)

    # ------------------------------------------------------------------ the parts of a round

    def _draft(self, part: BatchPart) -> Draft:
        """What is fed of a part: a tree where that is welcome, else a chain; in lockstep all are equally long."""
        rows, drafting = part.rows, part.drafting
        if drafting is None:
            return no_draft(len(rows), self.rows.device)
        most = self.cost.within(min(self.widest - 1, max(MOST_FED // len(self.rows), LEAST_FED)))
        room = [0 if row.stopped else max(0, min(most, row.end - row.length)) for row in rows]
        drafting.cost.beside = len(self.rows) - len(rows)
        return drafting.draft(self.rows.sequences(part.places, copied=True), room, most, [row.pad for row in rows])

    def _forward(self, fed: Draft, parts: Sequence[BatchPart]) -> Forward:
        """The target's, over each row's last token and its draft, which is brought to the device."""
        tokens = self.rows.before(fed)
        if (finder := self._finder(parts)) is not None:
            assert isinstance(self.runner, Captured)
            return self.runner.find(tokens, parents_of(fed), fed.lengths, finder)
        if not isinstance(tokens, Tensor):
            tokens = to_device(tokens, self.rows.device)
        sound = tokens if fed.known is not None else tokens.clamp(0, self.vocab - 1)
        forward = self.runner.forward(moved(sound, self.device), parents_of(fed))
        fed.tokens = tokens[:, 1:]
        forward.logits = moved(forward.logits, self.rows.device)
        return forward

    def _finder(self, parts: Sequence[BatchPart]) -> Finder | None:
        """What can be found with the forward: where its steps are recorded, and all rows are judged by what is
        likeliest."""
        if not (isinstance(self.runner, Captured) and self.runner.is_captured) or self.taking.outputs is not None:
            return None
        (part, *others), judges = parts, {id(row.judge) for row in self.rows.all}
        if others or len(judges) > 1 or not part.rows[0].judge.takes_likeliest:
            return None
        drafting = part.drafting
        if drafting is not None and drafting.order is not None:
            return None
        return GreedyFinder(self.vocab, self._successors(drafting))

    @staticmethod
    def _successors(drafting: Drafting | None) -> int:
        """How many of the target's likeliest tokens drafters are told of."""
        return drafting.traits.likeliest if drafting is not None and drafting.session.alive else 0

    def _judge(self, part: BatchPart, forward: Forward) -> None:
        """Have a part's rows take what their judges accept."""
        drafting, results, judged = part.drafting, dict[int, Result](), part.by_judge()
        for mine in judged:
            places = [part.places[i] for i in mine]
            trial = part.trial(mine, forward, self.rows.sequences(places))
            trial.successors = self._successors(drafting)
            early = drafting is not None and drafting.session.alive and drafting.traits.drafts_early
            if drafting is not None and early and drafting.order is None and len(judged) == 1:
                trial.meanwhile, trial.last = drafting.draft_early, self.rows.last(places)
            results |= zip(mine, self.taking.take(part.rows[mine[0]].judge, self.rows, places, trial), strict=True)
            part.sound &= trial.sound
        part.results = [results[i] for i in range(len(part.rows))]

    def _verdict(self, part: BatchPart, forward: Forward) -> Verdict:
        seen = rows_of_forward(forward, part.places, part.judged.tokens.shape[1])
        return verdict_of(part.rows, part.judged, seen, part.results)

    def _count(self, parts: Sequence[BatchPart], active: Sequence[bool], width: int, watch: Watch) -> None:
        """Statistics, over the rows that were not finished before the round."""
        for stats in [self.stats, *[row.stats for part in parts for row in part.rows if row.stats is not None]]:
            count_forward(stats, width, watch.forward_seconds, watch.draft_seconds)
        for part in parts:
            draft = part.judged
            for i, (b, row, result) in enumerate(zip(part.places, part.rows, part.results, strict=True)):
                source = (draft.sources[i] if draft.lengths[i] else "none") if draft.sources else ""
                for stats in [self.stats] if row.stats is None else [self.stats, row.stats]:
                    count_row(stats, result, active[b], source)

    def _tell(self, row: Row, result: Result) -> None:
        """A row has grown."""

    def _leave(self, places: list[int]) -> None:
        """These rows have stopped."""
        raise NotImplementedError
