"""`Engine`: rows that come and go, round by round: read, draft, one forward for all, judge, keep, leave.

A round is that of `engine/loop.py`. Rows of different settings share its forward and nothing else: each has its own
judge and, unless the drafter lives inside the target, its own session.
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..budget import Cost, Learned
from ..clock import now
from ..errors import SpeculationError
from ..protocol import Draft, Forward, Runner, Sequences
from ..schedule import AnyDrafter
from ..stats import SpeculationStats
from ..target.devices import input_device
from ..target.inputs import as_when_decoding, position_limit
from ..target.joining import SPARE, JoiningRunner, Reading
from ..target.probe import Support, ability
from ..transfer import moved
from ..verify.drafts import inputs_of
from ..verify.randomness import RowRandomness
from .checks import cut, most_nodes
from .counts import count_forward, count_row
from .drafting import Drafting
from .groups import Group, Part
from .rows import Row, Rows
from .shares import Result, of_draft, of_forward, together, verdict_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

MOST_NOTES = 8
"""of what sessions said, that are kept"""
LEAST_PIECE, LONGEST_PIECE = 128, 512
"""tokens of a prompt that are read between two rounds: fewer take hardly less time"""

_costs: Learned[Cost] = Learned(Cost)
"""of each target's forwards over such batches"""


class Engine:
    """Knows nothing of threads: one of them calls it."""

    def __init__(self, model: "PreTrainedModel", drafter: AnyDrafter | None, most_rows: int, most_tokens: int) -> None:
        """
        Args:
            most_tokens: slots of all rows together.

        Raises:
            SpeculationError: the model does not take rows of uneven lengths.
        """
        if ability(model).support is not Support.RAGGED:
            raise SpeculationError(
                f"BatchDecoder needs a model that decodes rows of different lengths, and {type(model).__name__} "
                f"{ability(model).why}; use model.generate"
            )
        self.model, self.drafter, self.most_rows, self.most_tokens = model, drafter, most_rows, most_tokens
        self.vocab, self.limit = ability(model).vocab_size, position_limit(model)
        self.cost = _costs.of(model, most_rows)
        self.rows = Rows(input_device(model))
        self.target = JoiningRunner(model, most_rows, most_tokens)
        self.runner: Runner = self.target
        """the drafter's own, where it brings one"""
        self.shared: Drafting | None = None
        """of a drafter that lives inside the target: one session for all rows, with the settings of the first; what
        it drafts are point masses"""
        self.groups: dict[Hashable, Group] = {}
        self.reading: tuple[Row, Reading] | None = None
        self.stats = SpeculationStats(mode="joined")
        self.round_seconds = self.reading_seconds = 0.0
        """of the last round, and of all prompts"""
        self.reading_speed = 0.0
        """tokens per second"""

    # ------------------------------------------------------------------ who is there

    def fits(self, row: Row) -> bool:
        """Whether there is room for one more."""
        there = len(self.rows) + (self.reading is not None)
        wanted = [*self.target.wanted, *([self.reading[0].end] if self.reading else []), row.end]
        return there < self.most_rows and self.target.slots_for(wanted) <= self.most_tokens

    def ever_fits(self, row: Row) -> bool:
        """Whether there would be, were it alone."""
        return self.target.slots_for([row.end]) <= self.most_tokens

    @property
    def busy(self) -> bool:
        """Whether anything is being decoded or read."""
        return bool(len(self.rows)) or self.reading is not None

    def admit(self, row: Row) -> None:
        """Begin to read its prompt."""
        row.began = now()
        self.reading = row, Reading(self.model, row.call.input_ids, row.call.model_kwargs)

    def drop(self) -> None:
        """Rows whose requests were cancelled go."""
        if self.reading is not None and self.reading[0].answer.cancelled:
            self.reading[0].finish()
            self.reading = None
        self._leave([b for b, row in enumerate(self.rows.all) if row.answer.cancelled])

    def turn(self) -> None:
        """Read a piece of the prompt that is being read, then play a round of the rows that are there."""
        began = now()
        with torch.no_grad():
            if self.reading is not None:
                self._read()
            if len(self.rows):
                with as_when_decoding(self.model):
                    self._play_round()
        self.stats.total_seconds += now() - began

    def clock(self) -> float:
        """Seconds, but for those in which prompts are read."""
        return now() - self.reading_seconds

    def present(self) -> list[Row]:
        """Whoever is being decoded or read."""
        return [*self.rows.all, *([] if self.reading is None else [self.reading[0]])]

    def fail(self, error: BaseException) -> None:
        """Something is wrong with the model: every row ends with this error, and the next ones begin anew."""
        for row in self.present():
            row.finish(error)
        self.close()
        self.rows, self.reading = Rows(input_device(self.model)), None
        self.target = self.runner = JoiningRunner(self.model, self.most_rows, self.most_tokens)

    def close(self) -> None:
        """All sessions end."""
        for group in self.groups.values():
            self._close(group.drafting)
        self._close(self.shared)
        self.groups, self.shared, self.runner = {}, None, self.target

    # ------------------------------------------------------------------ reading

    def _read(self) -> None:
        """One more piece; what is wrong with a request ends that request alone."""
        assert self.reading is not None
        row, reading = self.reading
        left, began = reading.left, now()
        try:
            logits = moved(reading.read(self._piece(left)), self.rows.device)
            if reading.cache.get_seq_length() != reading.done:
                raise SpeculationError(
                    f"{type(self.model).__name__} keeps its prompt outside the cache, which BatchDecoder cannot "
                    "use; use model.generate"
                )
            first = None if reading.left else self._first(row, logits)
        except Exception as error:
            self.reading = None
            self._forget(row)
            row.finish(error)
            return
        seconds = now() - began
        speed = (left - reading.left) / max(seconds, 1e-9)
        self.reading_speed = 0.7 * (self.reading_speed or speed) + 0.3 * speed
        self.reading_seconds += seconds
        for stats in (self.stats, row.answer.stats):
            stats.prefill_seconds += seconds
        if first is not None:
            self._join(row, reading.cache, first)

    def _piece(self, left: int) -> int:
        """Of so many tokens how many to read now: others are to wait about as long as a round takes."""
        fair = int(self.reading_speed * self.round_seconds) if len(self.rows) else LONGEST_PIECE
        piece = min(max(LEAST_PIECE, fair), LONGEST_PIECE)
        return left if left <= 1.5 * piece else piece

    def _first(self, row: Row, logits: Tensor) -> list[int]:
        """The row's first token: the prompt's forward was the verification of an empty draft."""
        group = self._group(row)
        group.rows.add(row.number)
        group.randomness.of[row.number] = row.randomness
        ids, tokens = row.call.input_ids, list(row.tokens)
        prompt = Sequences(moved(ids, self.rows.device).clone(), [len(tokens)], [row.number], [tokens])
        return group.judge.block(Draft.from_lists([[]], self.rows.device), logits, prompt).rows[0].text

    def _join(self, row: Row, read: "Cache", first: list[int]) -> None:
        """The row is one of the batch."""
        self.target.join(read, row.end)
        self.rows.join(row)
        self.reading = None
        place = len(self.rows) - 1
        stopped = self.rows.append([*[[]] * place, first])[place]
        for stats in (self.stats, row.answer.stats):
            stats.target_calls += 1
            stats.emitted_tokens += 1
        self._tell(row, first)
        self._leave([place] if stopped else [])

    def _group(self, row: Row) -> Group:
        if row.settings not in self.groups:
            randomness = RowRandomness()
            judge = row.call.judge(randomness, self.stats, joined=True)
            drafting = self._drafting(row)
            judge.likeliest = 0 if drafting is None else drafting.likeliest
            self.groups[row.settings] = Group(judge, randomness, None if drafting is self.shared else drafting)
        return self.groups[row.settings]

    def _drafting(self, row: Row) -> Drafting | None:
        if self.drafter is None or self.shared is not None:
            return self.shared
        columns = min(self.limit, self.most_tokens)
        bounds = self.vocab, columns, self.most_rows, self.most_tokens
        drafting = Drafting(self.drafter, self.model, self.cost, self.clock, row, *bounds)
        if drafting.guarded.brings_runner:
            self.shared, self.runner = drafting, drafting.runner(self.target)
        return drafting

    # ------------------------------------------------------------------ a round

    def _play_round(self) -> None:
        """Draft, verify in one forward, keep what the judges accept, roll the rest back."""
        began, rows = now(), self.rows
        parts = self._parts()
        fed = self._fed(parts)
        for row in rows.all:
            row.randomness.round += 1
        rows.reserve(max(rows.lengths) + fed.tokens.shape[1] + 1)
        verifying, starts = now(), list(self.runner.lengths)
        forward = self.runner.forward(*inputs_of(rows.last(), fed, self.vocab))
        forward.logits = moved(forward.logits, rows.device)
        width, seconds = fed.tokens.shape[1] + 1, now() - verifying
        results: dict[int, Result] = {}
        for part in parts:
            results |= zip(part.places, part.judged(rows, forward, self.shared), strict=True)
        if rows.device.type != "cpu":  # a forward is over only when its results have been looked at
            seconds = now() - verifying
        found = [results[b] for b in range(len(rows))]
        ended = rows.append([result.tokens for result in found])
        for row, start, result, ends in zip(rows.all, starts, found, ended, strict=True):
            result.end(len(row.tokens) - start - 1, ends)
        self._keep(starts, fed, found)
        self.cost.observe_forward(len(rows), width, seconds)
        self._observe(parts, fed, forward, found, seconds)
        count_forward(self.stats, width, seconds, verifying - began)
        for row, result in zip(rows.all, found, strict=True):
            count_forward(row.answer.stats, width, seconds, verifying - began)
            count_row(row.answer.stats, result)
            count_row(self.stats, result)
            self._tell(row, result.tokens)
        stats = self.stats  # plain rows would have come as far in so many rounds
        stats.plain_steps = round(stats.verify_widths.total() * stats.mean_acceptance_length)
        self._leave([b for b, ends in enumerate(ended) if ends])
        ended_at = now()
        self.cost.observe_between(width, ended_at - verifying - seconds)
        self.round_seconds = ended_at - began

    def _parts(self) -> list[Part]:
        """The groups with their places."""
        where = {row.number: b for b, row in enumerate(self.rows.all)}
        return [Part(group, sorted(where[number] for number in group.rows)) for group in self.groups.values()]

    def _fed(self, parts: Sequence[Part]) -> Draft:
        """All rows' drafts, of each part its own."""
        if self.shared is not None:
            fed = self._drafted(self.shared, range(len(self.rows)))
            for part in parts:
                part.draft = of_draft(fed, part.places)
            return fed
        for part in parts:
            if part.group.drafting is not None:
                part.draft = self._drafted(part.group.drafting, part.places)
            else:
                part.draft = Draft.from_lists([[]] * len(part.places), self.rows.device)
        return together([part.draft for part in parts], [part.places for part in parts], self.rows.device)

    def _drafted(self, drafting: Drafting, places: Sequence[int]) -> Draft:
        rows = [self.rows.all[b] for b in places]
        most = max(0, min(SPARE // drafting.slots_per_token - 2, most_nodes(len(self.rows))))
        room = [max(0, min(most, min(row.end - 1, self.limit) - len(row.tokens))) for row in rows]
        draft = drafting.draft(self.rows.view(places), rows, room, len(self.rows) - len(rows))
        return draft if max(draft.lengths) <= most else cut(draft, [min(n, most) for n in draft.lengths])

    def _keep(self, starts: list[int], fed: Draft, results: Sequence[Result]) -> None:
        """Of what was fed the accepted tokens stay in the cache, but for the last: it is fed again."""
        if fed.parents is None:
            self.runner.truncate([start + len(found.tokens) for start, found in zip(starts, results, strict=True)])
        else:
            kept = [found.path[: len(found.tokens) - 1] for found in results]
            self.runner.keep([start + 1 for start in starts], kept)

    def _observe(
        self, parts: Sequence[Part], fed: Draft, forward: Forward, results: Sequence[Result], seconds: float
    ) -> None:
        """Sessions are told what became of their drafts."""
        shares = [(part.group.drafting, part.places, part.draft) for part in parts]
        if self.shared is not None:
            shares = [(self.shared, list(range(len(self.rows))), fed)]
        for drafting, places, draft in shares:
            if drafting is not None:
                rows, mine = [self.rows.all[b].number for b in places], [results[b] for b in places]
                share = of_forward(forward, places, draft.tokens.shape[1])
                drafting.observe(verdict_of(rows, draft, share, mine, seconds))

    # ------------------------------------------------------------------ telling, leaving

    def _tell(self, row: Row, tokens: list[int]) -> None:
        """The request's owner gets the tokens; one who does not want them any more is let go."""
        if row.failed is not None:
            return
        row.answer.extend(tokens)
        if row.call.streamer is not None and not row.answer.cancelled:
            try:
                for token in tokens:
                    row.call.streamer.put(torch.tensor([token]))
            except Exception:  # who was to read it has gone
                row.answer.cancelled = True

    def _leave(self, places: Sequence[int]) -> None:
        """Rows that have ended go, and their part of the cache is free."""
        if not places:
            return
        for b in places:
            self._forget(self.rows.all[b])
            self.rows.all[b].finish(self.rows.all[b].failed)
        order = self.target.leave(list(places))
        self.rows.leave(order)
        if not order:
            self._close(self.shared)
            self.shared, self.runner = None, self.target

    def _forget(self, row: Row) -> None:
        """Nobody holds anything of it any more; a group without rows is none."""
        if (group := self.groups.get(row.settings)) is None:
            return
        group.rows.discard(row.number)
        group.randomness.of.pop(row.number, None)
        for drafting in filter(None, (group.drafting, self.shared)):
            drafting.forget(row.number)
        if not group.rows:
            self._close(self.groups.pop(row.settings).drafting)

    def _close(self, drafting: Drafting | None) -> None:
        if drafting is not None:
            told = drafting.close()
            self.stats.draft_calls += told.draft_calls
            new = [note for note in told.notes if note not in self.stats.notes]
            self.stats.notes = [*self.stats.notes, *new][-MOST_NOTES:]
