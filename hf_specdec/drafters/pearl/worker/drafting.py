"""`BackgroundDraft`: what a worker drafts for one call.

It drafts behind *branches*: each row's own text, and *forks* of it, in which a correction stands that the target is
likely to make (`foresight.py`). All branches share the draft's steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....clock import now
from ....target.devices import input_device
from ....transfer import to_device, to_host
from ...draft_model.model_draft import write_tokens
from ...draft_model.over_cache import DraftCall
from ...draft_model.translating import model_of, over_cache
from ..likely import TOLD, Likely
from .foresight import REMEMBERED, Place, likeliest
from .wire import Fork, Kind, Link, Order, Setup, Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...draft_model import Translated

BLOCK = 256
"""columns by which the buffer of token ids grows"""


class CancelledError(Exception):
    """The present order has become useless."""


@dataclass
class Branch:
    """A text that is drafted behind."""

    row: int
    """of the call's batch"""
    text: list[int]
    """by column, left padding and drafted tokens included"""
    q: dict[int, Tensor] = field(default_factory=dict)
    """[V] by drafted column"""
    places: dict[int, Place] = field(default_factory=dict)
    """by drafted column"""

    def go_on(self, start: int, tokens: list[int], unverified: int) -> int:
        """Take up the row's text of a new order: `tokens` from column `start` on. How many columns stay as they were.

        Args:
            unverified: how many of the last tokens are tested yet, so that their q is still wanted.
        """
        same = [a == b for a, b in zip(self.text[start:], tokens, strict=False)]
        kept = start + (same.index(False) if False in same else len(same))
        self.text[start:] = tokens
        wanted = range(len(self.text) - unverified, kept)
        self.q = {column: q for column, q in self.q.items() if column in wanted}
        self.places = {column: place for column, place in self.places.items() if column in wanted}
        return kept


class BackgroundDraft:
    """Told what to draft behind, it tells every token as soon as it is drawn."""

    def __init__(
        self,
        setup: Setup,
        draft: "PreTrainedModel | Translated",
        link: Link,
        is_useless: Callable[[int], bool],
    ) -> None:
        """
        Args:
            is_useless: whether the order of an epoch has been cancelled.
        """
        self.link, self.is_useless = link, is_useless
        self.epoch, self.began = -1, 0.0
        device = input_device(model_of(draft))
        self.picker = setup.picker.on(device)
        self.eos_token_ids, self.lockstep = setup.eos_token_ids, setup.lockstep
        prompt = setup.prompt_ids.to(device)
        self.model = over_cache(draft, DraftCall(prompt, setup.prompt_mask.to(device), setup.lockstep))
        self.ids = torch.nn.functional.pad(prompt, (0, BLOCK))
        """[L, capacity] the branches' texts on the model's device"""
        self.branches = [Branch(row, text) for row, text in enumerate(setup.prompt_ids.tolist())]
        self.forks: list[Fork] = []
        """that the session has not been told of"""

    @property
    def ends(self) -> list[int]:
        """[L] columns of each branch."""
        return [len(branch.text) for branch in self.branches]

    def follow(self, order: Order) -> None:
        """Draft `order.width` tokens behind each row, or fewer where the draft's context ends."""
        self.epoch, self.began, self.forks = order.epoch, now(), []
        rows = [self.branches[i] for i in order.branches]
        texts = zip(rows, order.starts, order.tokens, order.unverified, strict=True)
        kept = [branch.go_on(start, tokens, unverified) for branch, start, tokens, unverified in texts]
        width = min(order.width, self.model.context_limit - max(len(branch.text) for branch in rows))
        going = list(zip(rows, order.branches, kept, strict=True))
        if width > 0:
            going += [(fork, *going[b][1:]) for b, fork in self._foreseen(order, rows, order.unverified, first=0)]
        self._go_on_with(going, order.width)
        for step in range(width):
            if self.is_useless(self.epoch):
                raise CancelledError
            drawn = self._draw(self._logits(first=step == 0), order.corrections > 0)
            if step == 0 and width > 1:
                self._fork(order, rows)
            self._tell(*drawn)

    def _foreseen(
        self, order: Order, rows: list[Branch], unverified: list[int], first: int
    ) -> list[tuple[int, Branch]]:
        """Forks for the likely corrections of each row's last, unverified tokens, each with the row that it is of."""
        branches = []
        for b, (branch, most, wanted) in enumerate(zip(rows, unverified, order.wanted, strict=True)):
            end = len(branch.text)
            columns = range(end - most, end) if wanted and order.forking else range(0)
            places = [(column, branch.places[column]) for column in columns if column in branch.places]
            for column, token in likeliest(places, order.corrections * len(places)):
                self.forks.append(Fork(branch.row, column, token, first))
                branches.append((b, Branch(branch.row, [*branch.text[:column], token])))
        return branches

    def _fork(self, order: Order, rows: list[Branch]) -> None:
        """Let forks for the corrections of each row's first new token join the branches."""
        if forks := self._foreseen(order, rows, [1] * len(rows), first=1):
            going = [(branch, i, len(branch.text)) for i, branch in enumerate(self.branches)]
            self._go_on_with(going + [(fork, b, len(fork.text) - 1) for b, fork in forks], order.width)

    def _go_on_with(self, going: list[tuple[Branch, int, int]], width: int) -> None:
        """Replace the branches by others.

        Args:
            going: each with the number of the present branch that it was, and how many columns it shares with that.
            width: tokens that will be drafted behind them.
        """
        branches, origins, kept = map(list, zip(*going, strict=True))
        if origins != list(range(len(self.branches))):
            self.model.select(origins)
            self.ids = self.ids[origins]
        self.branches = branches
        if (missing := max(self.ends) + width + 1 - self.ids.shape[1]) > 0:
            self.ids = torch.nn.functional.pad(self.ids, (0, -(-missing // BLOCK) * BLOCK))
        starts = [min(most, end - 1) for most, end in zip(kept, self.ends, strict=True)]  # the last one is always fed
        new = [
            (line, column, token)
            for line, (branch, start) in enumerate(zip(branches, starts, strict=True))
            for column, token in enumerate(branch.text[start:], start)
        ]
        lines, columns, tokens = to_device(list(zip(*new, strict=True)), self.ids.device)
        self.ids[lines, columns] = tokens
        good = [min(held, start) for held, start in zip(self.model.held, starts, strict=True)]
        self.model.roll_back([min(good)] * len(good) if self.lockstep else good)

    def _logits(self, first: bool) -> Tensor:
        """[L, V] behind each branch.

        Args:
            first: of the order: more than a token may be missing in the cache.
        """
        ends = self.ends
        if first:
            return self.model.catch_up(self.ids, ends)
        last = self.ids.gather(1, to_device(ends, self.ids.device)[:, None] - 1)[:, 0]
        return self.model.feed(self.ids, ends, last)

    def _draw(self, logits: Tensor, remember: bool) -> tuple[list[int], list[float] | None, Likely | None]:
        """The next token of every branch; its q and the likeliest others where it was drawn at random.

        Args:
            remember: keep in mind what else was likely.
        """
        ends, rows = self.ends, [branch.row for branch in self.branches]
        scores = self.picker.scores(self.ids, ends, rows, logits)
        drawn, q = self.picker.pick(ends, rows, scores)
        write_tokens(self.ids, drawn, ends)
        told, chances = [drawn[:, None].double()], q
        if remember and chances is None:
            chances = scores.float().softmax(-1)
        if chances is not None:
            likely = chances.topk(min(TOLD if self.picker.do_sample else REMEMBERED + 1, chances.shape[1]))
            told += [chances.gather(1, drawn[:, None]).double(), likely.indices.double(), likely.values.double()]
        said = to_host(torch.cat(told, dim=1))  # one transfer a step
        for b, (branch, column) in enumerate(zip(self.branches, ends, strict=True)):
            branch.text.append(int(said[b][0]))
            if remember:
                branch.places[column] = self._place(said[b])
            if q is not None:
                branch.q[column] = q[b].clone()  # without the other branches'
        tokens = [int(one[0]) for one in said]
        if q is None:
            return tokens, None, None
        others, theirs = torch.tensor([one[2:] for one in said], dtype=torch.float64, device="cpu").chunk(2, dim=1)
        return tokens, [one[1] for one in said], Likely(others.long(), theirs.float())

    def _place(self, said: list[float]) -> Place:
        """What a step has said of one branch: its token and the token's chance, then likely tokens and theirs."""
        drafted, chance, *likely = said
        half, most = len(likely) // 2, REMEMBERED + 1
        others = [
            (int(token), other)
            for token, other in zip(likely[:half][:most], likely[half:][:most], strict=True)
            if token != drafted and other > 0 and token not in self.eos_token_ids
        ]
        return Place(chance, others[:REMEMBERED])

    def _tell(self, tokens: list[int], probs: list[float] | None, likely: Likely | None) -> None:
        ended = now()
        step = Step(self.epoch, self.model.stats.draft_calls, self.began, ended, tokens, probs, self.forks, likely)
        self.link.send(Kind.STEP, step.encode())
        self.began, self.forks = ended, []

    def answer(self, branch: int, column: int, tokens: list[int]) -> bytes:
        """float32 q of these tokens (all, where none are named) at a drafted column of a branch."""
        q = self.branches[branch].q[column]
        return (q[tokens] if tokens else q).float().cpu().numpy().astype("<f4").tobytes()
