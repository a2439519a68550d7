"""`Engine`: the round. Draft, one forward of the target, judge, keep, roll back, tell, leave.

`generate` admits all rows of its call at once (`generation`); `BatchDecoder` and the server admit them as they come
(`requests`). Both play the same rounds. Rows may advance in three ways, which differ in the runner and in how a row
takes its tokens (`taking`): in lockstep, staggered, or ragged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..budget import Cost
from ..protocol import Draft, Forward, Runner, Verdict
from ..schedule import Round
from ..stats import SpeculationStats
from ..target.devices import input_device
from ..transfer import moved, to_device
from ..verify.drafts import as_chain, in_step, inputs_of
from .checks import cut, most_nodes
from .drafting import Drafting
from .group import Group
from .modes import Mode
from .results import Result, rows_of_draft, rows_of_forward, verdict_of
from .rows import Row, Rows
from .taking import Taking, Tested
from .watch import Watch, count_forward, count_row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNSOUND = "it returned token ids or probabilities out of range, or a q that does not match them"


@dataclass
class Share:
    """The rows of one drafter in a round."""

    drafting: Drafting | None
    """None where nobody drafts for them"""
    places: list[int]
    """in the batch"""
    fed: Draft = field(init=False)
    """what the target reads"""
    judged: Draft = field(init=False)
    """what is judged: that, or more where drafting went on meanwhile"""
    answered: list[int] | None = field(default=None, init=False)
    """[B] nodes that the forward answers for; None for all"""
    sound: bool = field(default=True, init=False)
    """whether its ids and probabilities were in range"""


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
        self.device = input_device(model)  # asked once: transformers looks for it among the parameters

    def play_round(self) -> None:
        """One round, in eight steps. Before and after it the runner holds each row's tokens but for the last one.

        In the letters of Leviathan et al. (2023), Algorithm 1: γ drafted tokens with their q are in `Share.judged`, the
        target's p come from `forward.logits`, and of each row n tokens are accepted (`Result.path`) and n + 1 appended:
        fewer where the row stops, and n where a token that was drafted beside the forward was the last to pass.
        """
        rows, watch = self.rows, Watch(self.rows.device)
        active = [not row.stopped for row in rows.all]  # in lockstep a finished row stays, is fed padding, not counted

        # 1. Draft: each drafter proposes tokens for its rows, no more than there is room for.
        shares = list(self._shares())
        for share in shares:
            share.fed = share.judged = self._draft(share)
        fed = self._together(shares)

        # 2. Verify: the target reads each row's last token and its draft, in one forward.
        watch.drafted()
        starts = list(self.runner.lengths)
        forward = self._forward(fed)
        watch.launched()

        # 3. What is judged: a schedule that drafted meanwhile may add to what was fed.
        for share in shares:
            if share.drafting is not None:
                share.judged, share.answered = share.drafting.test(share.fed)
        serial = all(share.drafting is None or share.drafting.serial for share in shares)
        watch.tested()

        # 4. Judge and keep: each row takes the accepted tokens and one of the target's own, until it stops.
        rows.reserve(max(fed.tokens.shape[1], *(share.judged.tokens.shape[1] for share in shares)) + 1)
        results: dict[int, Result] = {}
        for share in shares:
            results |= self._judge(share, forward)
        found = [results[b] for b in range(len(rows))]
        watch.judged(beside=not serial)

        # 5. Roll back: rejected tokens leave the cache. It was fed the row's last token and the draft, and keeps that
        # token and the n accepted ones. What is now the row's last token is not in it: the next round feeds it.
        if fed.parents is None:
            self.runner.truncate([start + len(result.tokens) for start, result in zip(starts, found, strict=True)])
        else:
            self.runner.keep([start + 1 for start in starts], [result.kept for result in found])

        # 6. Count.
        width = fed.tokens.shape[1] + 1
        held_up = sum(share.drafting.held_up for share in shares if share.drafting is not None)
        stood_still = watch.draft_seconds + held_up
        self._count(shares, found, active, watch, width, stood_still)
        if serial and watch.usual:  # beside a worker in the background a forward takes longer
            refed = max(starts) - min(starts) if self.mode.staggered else 0  # what faster rows have ahead
            self.cost.observe_forward(len(rows), refed + width, watch.forward_seconds)

        # 7. Tell: drafters learn what became of their drafts, and whoever waits for a row gets its tokens.
        for share in shares:
            if share.drafting is not None:
                if not share.sound:
                    share.drafting.session.drop(UNSOUND)
                verdict = self._verdict(share, forward, results)
                verdict.seconds, verdict.draft_seconds = watch.forward_seconds, stood_still
                share.drafting.observe(verdict)
        for row, result in zip(rows.all, found, strict=True):
            self._tell(row, result)

        # 8. Leave: rows that have stopped make room.
        self._leave([b for b, row in enumerate(rows.all) if row.stopped])
        if serial and watch.usual:
            self.cost.observe_between(width, watch.since_forward())

    # ------------------------------------------------------------------ who drafts, and who chooses

    def _shares(self) -> Iterator[Share]:
        """Who drafts for which rows; rows for which nobody drafts are the share of nobody."""
        places: dict[int, Share] = {}
        for b, row in enumerate(self.rows.all):
            drafting = row.group.drafting
            places.setdefault(id(drafting), Share(drafting, [])).places.append(b)
        yield from places.values()

    def _groups(self, places: Sequence[int]) -> Iterator[tuple[Group, list[int]]]:
        """Of these rows those of equal settings."""
        groups: dict[int, tuple[Group, list[int]]] = {}
        for b in places:
            group = self.rows.all[b].group
            groups.setdefault(id(group), (group, []))[1].append(b)
        yield from groups.values()

    # ------------------------------------------------------------------ the parts of a round

    def _draft(self, share: Share) -> Draft:
        """What is fed of a share: a tree where that is welcome, else a chain; in lockstep all are equally long."""
        rows, drafting = [self.rows.all[b] for b in share.places], share.drafting
        alive = drafting is not None and drafting.session.alive
        for group, places in self._groups(share.places):
            group.randomness.advance([self.rows.all[b].number for b in places])
            group.judge.likeliest = drafting.likeliest if drafting is not None and alive else 0
        if drafting is None:
            return Draft.from_lists([[]] * len(rows), self.rows.device)
        most = self._most_nodes(drafting)
        room = [0 if row.stopped else max(0, min(most, row.end - row.length)) for row in rows]
        everywhere = self.taking.passive(self.rows)
        passive = [everywhere[b] for b in share.places]
        round = Round(self.rows.view(share.places), room, passive, not self.mode.ragged)
        draft = drafting.feed(round, beside=len(self.rows) - len(rows))
        if max(draft.lengths) > most:
            draft = cut(draft, [min(n, most) for n in draft.lengths])
        if not self.mode.trees:
            draft = as_chain(draft)
        if not self.mode.ragged and draft.parents is None:
            draft = in_step(draft, passive, rows[0].call.pad_token_id)
        return draft

    def _most_nodes(self, drafting: Drafting) -> int:
        """That a row may draft."""
        return most_nodes(len(self.rows))

    def _together(self, shares: Sequence[Share]) -> Draft:
        """What the target is fed: the drafts of all rows, in their places."""
        if len(shares) == 1:
            return shares[0].fed
        rows, width = len(self.rows), max(share.fed.tokens.shape[1] for share in shares)
        tokens = torch.zeros(rows, width, dtype=torch.long, device=self.rows.device)
        lengths, parents = [0] * rows, [list(range(-1, width - 1)) for _ in range(rows)]
        for share in shares:
            draft = share.fed
            tokens[to_device(share.places, tokens.device), : draft.tokens.shape[1]] = draft.tokens
            for i, b in enumerate(share.places):
                lengths[b] = draft.lengths[i]
                if draft.parents is not None:
                    parents[b] = [*draft.parents[i], *[-1] * (width - draft.tokens.shape[1])]
        trees = any(share.fed.parents is not None for share in shares)
        return Draft(tokens, lengths, parents if trees else None)

    def _forward(self, fed: Draft) -> Forward:
        tokens, parents = inputs_of(self.rows.last(), fed, self.vocab)
        forward = self.runner.forward(moved(tokens, self.device), parents)
        forward.logits = moved(forward.logits, self.rows.device)
        return forward

    def _judge(self, share: Share, forward: Forward) -> dict[int, Result]:
        """Results of a share's rows, by their places."""
        drafting, width = share.drafting, share.judged.tokens.shape[1]
        correct = None if drafting is None else drafting.correct
        results: dict[int, Result] = {}
        groups, place_in_share = list(self._groups(share.places)), {b: i for i, b in enumerate(share.places)}
        meanwhile = None
        if drafting is not None and drafting.drafts_early and len(groups) == 1:
            meanwhile = drafting.drafts_on(self.rows.last(), share.places)
        for group, places in groups:
            mine = [place_in_share[b] for b in places]
            draft = rows_of_draft(share.judged, mine)
            answered = None if share.answered is None else [share.answered[i] for i in mine]
            # A schedule that corrects drafts for one group only, whose rows are the share's.
            tested = Tested(draft, rows_of_forward(forward, places, width), answered, correct, meanwhile)
            results |= zip(places, self.taking.take(group, self.rows, places, tested), strict=True)
            share.sound &= tested.sound
        return results

    def _verdict(self, share: Share, forward: Forward, results: dict[int, Result]) -> Verdict:
        rows, mine = [self.rows.all[b] for b in share.places], [results[b] for b in share.places]
        seen = rows_of_forward(forward, share.places, share.judged.tokens.shape[1])
        return verdict_of([row.number for row in rows], [row.stopped for row in rows], share.judged, seen, mine)

    def _count(
        self,
        shares: Sequence[Share],
        results: Sequence[Result],
        active: Sequence[bool],
        watch: Watch,
        width: int,
        stood_still: float,
    ) -> None:
        """Statistics, over the rows that were not finished before the round.

        Args:
            stood_still: seconds for which the target waited for drafts.
        """
        everybody = {id(stats): stats for row in self.rows.all for stats in self._stats_of(row)}
        for stats in everybody.values():
            count_forward(stats, width, watch.forward_seconds, stood_still)
        for share in shares:
            draft = share.judged
            for i, b in enumerate(share.places):
                row = self.rows.all[b]
                source = (draft.sources[i] if draft.lengths[i] else "none") if draft.sources else ""
                for stats in self._stats_of(row):
                    stats.emitted_tokens += results[b].emitted
                    if active[b]:
                        count_row(stats, results[b], source)

    def _stats_of(self, row: Row) -> list[SpeculationStats]:
        """Where a row is counted."""
        return [self.stats]

    def _tell(self, row: Row, result: Result) -> None:
        """A row has grown."""

    def _leave(self, places: list[int]) -> None:
        """These rows have stopped."""
        raise NotImplementedError
