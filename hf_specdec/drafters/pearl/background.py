"""`BackgroundDraft`: what a worker drafts, in lines that share the draft's steps.

Besides each row's own text it drafts behind *forks* of it, the corrections that the target is likely to make
(`foresight.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ...clock import now
from ...target.devices import input_device
from ...transfer import to_device, to_host
from ...verify.picking import DraftPicker
from ..draft_model.model_draft import write_tokens
from ..draft_model.translating import Translated, model_of, over_cache
from .foresight import REMEMBERED, Place, likeliest
from .link import Fork, Kind, Link, Order, Step, encode_forks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 256
"""columns by which the buffer of token ids grows"""


@dataclass
class Setup:
    """What a session tells its worker, once."""

    prompt_ids: Tensor
    """[B, P] left-padded, on the CPU"""
    prompt_mask: Tensor
    max_length: int
    eos_token_ids: frozenset[int]
    lockstep: bool
    autocast: dict[str, torch.dtype]
    """what the caller's autocast casts to, by the types of devices for which it is on"""
    picker: DraftPicker
    """It draws each position's draft with one number, however often it is drafted: only the last draft of a position
    is ever tested, and nothing else depends on the others. So without copies a seeded text depends on no fixed window,
    no timing."""

    def cast(self, device_type: str) -> torch.autocast:
        """The caller's autocast, for a thread of its own."""
        return torch.autocast(device_type, dtype=self.autocast.get(device_type), enabled=device_type in self.autocast)


class CancelledError(Exception):
    """The present order has become useless."""


@dataclass
class Line:
    """A text that is drafted behind: a row's own, or one with a correction in it."""

    row: int
    q: dict[int, Tensor] = field(default_factory=dict)
    """[V] by drafted column"""
    places: dict[int, Place] = field(default_factory=dict)
    """by drafted column"""

    def forget_all_but(self, columns: range) -> None:
        """What was drafted elsewhere is verified, or was in vain."""
        self.q = {column: q for column, q in self.q.items() if column in columns}
        self.places = {column: place for column, place in self.places.items() if column in columns}


class Cancelling(Protocol):
    """Who knows which orders have become useless."""

    cancelled: int


class BackgroundDraft:
    """Told what to draft behind, it tells every token as soon as it is drawn. All lines, the rows' own first, share the
    draft's steps."""

    def __init__(self, setup: Setup, draft: "PreTrainedModel | Translated", link: Link, desk: Cancelling) -> None:
        self.link, self.desk, self.epoch = link, desk, -1
        self.began, self.sent = 0.0, 0
        device = input_device(model_of(draft))
        self.picker = setup.picker.on(device)
        self.eos_token_ids, self.lockstep = setup.eos_token_ids, setup.lockstep
        prompt = setup.prompt_ids.to(device)
        self.model = over_cache(draft, prompt, setup.prompt_mask.to(device), setup.lockstep)
        self.ids = torch.nn.functional.pad(prompt, (0, BLOCK))
        self.rows = list(range(len(prompt)))
        self.lines = [Line(row) for row in self.rows]
        self.ends: list[int] = []
        """[L] columns of each line"""

    def follow(self, order: Order) -> None:
        """Draft `order.width` tokens behind each row, or fewer where the draft's context ends."""
        self.epoch, self.sent, self.began = order.epoch, 0, now()
        ends = [keep + len(tail) for keep, tail in zip(order.keeps, order.tails, strict=True)]
        width = min(order.width, self.model.context_limit - max(ends))
        lines = [self.lines[i] for i in order.lines]
        for line, end, most, keep in zip(lines, ends, order.unverified, order.keeps, strict=True):
            line.forget_all_but(range(end - most, keep))  # behind it stand tokens that were not drafted here
        self._take_up(order, ends, self._foreseen(order, lines, ends, order.unverified, 0) if width > 0 else [])
        if width < 1:
            return
        logits = self._step(lambda: self.model.catch_up(self.ids, self.ends))
        for step in range(width):
            tokens, probs = self._draw(logits, order.corrections > 0)
            if step == 0 and width > 1:
                self._fork(self._foreseen(order, self.lines[: len(ends)], self.ends, [1] * len(ends), 1))
            self._tell(tokens, probs)
            if step + 1 < width:
                last = self.ids.gather(1, to_device(self.ends, self.ids.device)[:, None] - 1)[:, 0]
                logits = self._step(lambda: self.model.feed(self.ids, self.ends, last))  # noqa: B023  (called at once)

    def _foreseen(
        self, order: Order, lines: list[Line], ends: list[int], unverified: list[int], first: int
    ) -> list[tuple[int, Fork]]:
        """The likely corrections of each row's last, unverified tokens, each with the row's line; they are told."""
        forks = []
        for b, (line, end, most, budget) in enumerate(zip(lines, ends, unverified, order.budgets, strict=False)):
            columns = range(end - most, end) if budget and order.forking else range(0)
            places = [(column, line.places[column]) for column in columns if column in line.places]
            for column, token in likeliest(places, order.corrections * len(places)):
                forks.append((b, Fork(line.row, column, token, first)))
        if forks:
            self.link.send(Kind.FORKS, encode_forks(order.epoch, [fork for _, fork in forks]))
        return forks

    def _take_up(self, order: Order, ends: list[int], forks: list[tuple[int, Fork]]) -> None:
        """Each row goes on from a line of the last order, and forks from there; the other lines are forgotten."""
        came_from = [*range(len(ends)), *(b for b, _ in forks)]
        self._select([order.lines[b] for b in came_from])
        missing = max(ends) + order.width + 1 - self.ids.shape[1]
        if missing > 0:
            self.ids = torch.nn.functional.pad(self.ids, (0, -(-missing // BLOCK) * BLOCK))
        for i, b in enumerate(came_from):
            if order.tails[b]:
                self.ids[i, order.keeps[b] : ends[b]] = to_device(order.tails[b], self.ids.device)
        self.ends = list(ends)
        self._correct([fork for _, fork in forks], [order.keeps[b] for b in came_from])

    def _fork(self, forks: list[tuple[int, Fork]]) -> None:
        """Open lines for corrections in the lines that there are."""
        if forks:
            self._select([*range(len(self.lines)), *(b for b, _ in forks)])
            self._correct([fork for _, fork in forks], self.model.held)

    def _correct(self, forks: list[Fork], held: list[int]) -> None:
        """Write the forks' corrections into the last lines. Of each line's text the cache holds at most `held`, and
        the last token is always fed."""
        first = len(self.lines) - len(forks)
        self.ends += [fork.column + 1 for fork in forks]
        if forks:
            lines, columns = list(range(first, len(self.lines))), [fork.column for fork in forks]
            self.ids[lines, columns] = to_device([fork.token for fork in forks], self.ids.device)
        lengths = zip(self.model.held, held, self.ends, strict=True)
        good = [min(length, most, end - 1) for length, most, end in lengths]
        self.model.roll_back([min(good)] * len(good) if self.lockstep else good)

    def _select(self, lines: list[int]) -> None:
        """Go on with these lines; one that is there a second time is a fork."""
        if lines == list(range(len(self.lines))):
            return
        self.model.select(lines)
        self.ids = self.ids[lines]
        self.rows = [self.rows[i] for i in lines]
        self.lines = [Line(self.lines[i].row) if i in lines[:n] else self.lines[i] for n, i in enumerate(lines)]

    def _step(self, forward: Callable[[], Tensor]) -> Tensor:
        if self.desk.cancelled >= self.epoch:
            raise CancelledError
        return forward()

    def _draw(self, logits: Tensor, forking: bool) -> tuple[list[int], list[float] | None]:
        """The next token of every line, and its q where it was drawn at random.

        Args:
            forking: remember what else was likely.
        """
        scores = self.picker.scores(self.ids, self.ends, self.rows, logits)
        drawn, q = self.picker.pick(self.ends, self.rows, scores)
        write_tokens(self.ids, drawn, self.ends)
        told, chances = [drawn[:, None].double()], q
        if forking and chances is None:
            chances = scores.float().softmax(-1)
        if chances is not None:
            told.append(chances.gather(1, drawn[:, None]).double())
        if forking and chances is not None:
            likely = chances.topk(min(REMEMBERED + 1, chances.shape[1]))
            told += [likely.indices.double(), likely.values.double()]
        rows = to_host(torch.cat(told, dim=1))  # one transfer a step
        for b, (line, column) in enumerate(zip(self.lines, self.ends, strict=True)):
            if forking:
                line.places[column] = self._place(rows[b])
            if q is not None:
                line.q[column] = q[b].clone()  # without the other lines'
        self.ends = [end + 1 for end in self.ends]
        return [int(row[0]) for row in rows], None if q is None else [row[1] for row in rows]

    def _place(self, told: list[float]) -> Place:
        """What a step has told of one line: the token and its chance, likely ones and theirs."""
        drafted, chance, *likely = told
        half = len(likely) // 2
        others = [
            (int(token), other)
            for token, other in zip(likely[:half], likely[half:], strict=True)
            if token != drafted and other > 0 and token not in self.eos_token_ids
        ]
        return Place(chance, others[:REMEMBERED])

    def _tell(self, tokens: list[int], probs: list[float] | None) -> None:
        ended = now()
        step = Step(self.epoch, self.model.stats.draft_calls, self.began, ended, tokens, probs)
        self.link.send(Kind.STEP, step.encode())
        self.began, self.sent = ended, self.sent + 1

    def answer(self, line: int, column: int, tokens: list[int]) -> bytes:
        """float32 q of these tokens (all, where none are named) at a drafted position of a line."""
        q = self.lines[line].q[column]
        return (q[tokens] if tokens else q).float().cpu().numpy().astype("<f4").tobytes()
