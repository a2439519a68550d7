"""`BackgroundDraft`: what a worker drafts for one call.

It drafts behind *texts*: each row's own, and *forks* of it, in which a correction stands that the target is likely to
make (`foresight.py`). All texts share the draft's steps.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....clock import now
from ....target.devices import input_device
from ....transfer import to_device, to_host
from ....verify.largest import topk
from ...draft_model.over_cache import DraftCall
from ...draft_model.translating import model_of, over_cache
from ...drawn import write_tokens
from ..token import LIKELY, DraftToken
from .foresight import likeliest
from .wire import Fork, Order, RowOrder, Setup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...draft_model import Translated

BLOCK = 256
"""columns by which the buffer of token ids grows"""
FORESEEN = 9
"""tokens among which corrections are sought, where the draft does not sample"""


@dataclass
class DraftText:
    """What is drafted behind."""

    row: int
    """of the call's batch"""
    tokens: list[int]
    """by column, left padding and drafted tokens included"""
    origin: int
    """number of the text that it goes on from"""
    kept: int = 0
    """leading columns that it has in common with that"""
    drafted: dict[int, DraftToken] = field(default_factory=dict)
    """by column, those that are not tested yet"""

    def go_on(self, order: RowOrder) -> None:
        """Take up the row's text of a new order."""
        same = [a == b for a, b in zip(self.tokens[order.start :], order.tokens, strict=False)]
        self.origin, self.kept = order.text, order.start + (same.index(False) if False in same else len(same))
        self.tokens[order.start :] = order.tokens
        untested = range(len(self.tokens) - order.unverified, self.kept)
        self.drafted = {column: drafted for column, drafted in self.drafted.items() if column in untested}

    def fork(self, column: int, token: int) -> "DraftText":
        """The text up to there, and a correction."""
        return DraftText(self.row, [*self.tokens[:column], token], self.origin, min(self.kept, column))


class BackgroundDraft:
    """Told what to draft behind, it gives every token as soon as it is drawn."""

    def __init__(self, setup: Setup, draft: "PreTrainedModel | Translated") -> None:
        device = input_device(model_of(draft))
        self.picker = setup.picker.on(device)
        self.eos_token_ids, self.lockstep = setup.eos_token_ids, setup.lockstep
        prompt = setup.prompt_ids.to(device)
        self.model = over_cache(draft, DraftCall(prompt, setup.prompt_mask.to(device), setup.lockstep))
        self.ids = torch.nn.functional.pad(prompt, (0, BLOCK))
        """[L, capacity] the texts on the model's device"""
        self.texts = [DraftText(row, text, row) for row, text in enumerate(setup.prompt_ids.tolist())]
        self.order = Order([], 0, False)
        self.forks: list[Fork] = []
        """that the session has not been told of"""
        self.steps = 0
        """that the order may take"""
        self.began = 0.0

    @property
    def ends(self) -> list[int]:
        """[L] columns of each text."""
        return [len(text.tokens) for text in self.texts]

    def follow(self, order: Order) -> int:
        """Go on behind the rows of an order; how many steps that may take: fewer where the draft's context ends."""
        self.order, self.began, self.forks = order, now(), []
        rows = [self.texts[row.text] for row in order.rows]
        for text, row in zip(rows, order.rows, strict=True):
            text.go_on(row)
        self._go_on_with(rows)
        self.steps = min(order.width, self.model.context_limit - max(self.ends))
        self._fork(first=0)
        return self.steps

    def step(self, index: int) -> tuple[int, float, float, list[tuple], list[tuple]]:
        """Draft one token behind each text.

        Returns:
            Forwards since the call was opened; when the step began and ended by `clock.now`, which all processes of a
            machine share; a `DraftToken` of each text; and in the first step all forks of the order. All as tuples.
        """
        tokens = self._draw(self._logits(first=index == 0))
        if index == 0:
            self._fork(first=1)
        began, self.began = self.began, now()
        forks, self.forks = self.forks, []
        return self.model.stats.draft_calls, began, self.began, [*map(tuple, tokens)], [*map(tuple, forks)]

    def _fork(self, first: int) -> None:
        """Let texts with likely corrections of each row's last tokens join the others: before the first step of those
        that the target has not seen, behind it of the new one.

        Args:
            first: the step that gives the first token behind them.
        """
        if not self.order.forking or self.steps <= first:
            return
        for number, text in enumerate(self.texts):
            text.origin, text.kept = number, len(text.tokens)
        forks = []
        for text, row in zip(self.texts, self.order.rows, strict=False):  # rows come first
            columns = range(text.kept - (1 if first else row.unverified), text.kept) if row.wanted else ()
            drafted = [(column, text.drafted[column]) for column in columns if column in text.drafted]
            for place in likeliest(drafted, self.order.corrections * len(drafted), self.eos_token_ids):
                self.forks.append(Fork(text.row, *place, first))
                forks.append(text.fork(*place))
        if forks:
            self._go_on_with(self.texts + forks)

    def _go_on_with(self, texts: list[DraftText]) -> None:
        """Replace the texts by others, which go on from them."""
        origins = [text.origin for text in texts]
        if origins != list(range(len(self.texts))):
            self.model.select(origins)
            self.ids = self.ids[origins]
        self.texts = texts
        if (missing := max(self.ends) + self.order.width + 1 - self.ids.shape[1]) > 0:
            self.ids = torch.nn.functional.pad(self.ids, (0, -(-missing // BLOCK) * BLOCK))
        starts = [min(text.kept, end - 1) for text, end in zip(texts, self.ends, strict=True)]  # the last is always fed
        new = [
            (line, column, token)
            for line, (text, start) in enumerate(zip(texts, starts, strict=True))
            for column, token in enumerate(text.tokens[start:], start)
        ]
        lines, columns, tokens = to_device(list(zip(*new, strict=True)), self.ids.device)
        self.ids[lines, columns] = tokens
        good = [min(held, start) for held, start in zip(self.model.held, starts, strict=True)]
        self.model.roll_back([min(good)] * len(good) if self.lockstep else good)

    def _logits(self, first: bool) -> Tensor:
        """[L, V] behind each text.

        Args:
            first: of the order: more than a token may be missing in the cache.
        """
        ends = self.ends
        if first:
            return self.model.catch_up(self.ids, ends)
        last = self.ids.gather(1, to_device(ends, self.ids.device)[:, None] - 1)[:, 0]
        return self.model.feed(self.ids, ends, last)

    def _draw(self, logits: Tensor) -> list[DraftToken]:
        """The next token of every text, which is one of its likeliest."""
        ends, rows, picker = self.ends, [text.row for text in self.texts], self.picker
        scores = picker.scores(self.ids, ends, rows, logits)
        most = min(LIKELY if picker.do_sample else FORESEEN if self.order.corrections else 1, scores.shape[1])
        likely = topk(scores, most)[1].sort().values  # in an order that rounding does not change
        scores = scores.gather(1, likely)
        place, drawn_from = picker.pick(ends, rows, scores)
        drawn, chances = likely.gather(1, place[:, None]), scores.softmax(-1) if drawn_from is None else drawn_from
        write_tokens(self.ids, drawn[:, 0], ends)
        said = to_host(torch.cat([drawn.double(), likely.double(), chances.double()], dim=1))  # one transfer a step
        tokens = []
        for text, column, (token, *others) in zip(self.texts, ends, said, strict=True):
            able = {
                int(other): chance for other, chance in zip(others[:most], others[most:], strict=True) if chance > 0
            }
            text.tokens.append(int(token))
            text.drafted[column] = DraftToken(int(token), list(able), list(able.values()))
            tokens.append(text.drafted[column] if picker.do_sample else DraftToken(int(token)))
        return tokens
