"""How rows take what was judged: each by itself, or all together."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..protocol import Draft, Forward
from ..schedule import Correct, Meanwhile
from ..transfer import to_device, to_host
from ..verify.block import Block, expect_token
from ..verify.drafts import is_sound
from ..verify.judging import Judge
from .call import Call
from .group import Group
from .outputs import StepOutputs
from .results import Result, depths
from .rows import Row, Rows


@dataclass
class Tested:
    """What a group's judge is asked about."""

    draft: Draft
    forward: Forward
    answered: list[int] | None = None
    """[B] nodes that the forward answers for; None for all"""
    correct: Correct | None = None
    """what to draw from after a rejection; None where `draft.q` says it"""
    meanwhile: Meanwhile | None = None
    """told of chains what is accepted before the host has read it"""
    sound: bool = field(default=True, init=False)
    """whether the draft's ids and probabilities were found to be in range"""

    def block(self, judge: Judge, rows: Rows, places: Sequence[int]) -> Block:
        """What the judge says of all positions at once."""
        logits, nodes, sequences = self.forward.logits, self.forward.nodes, rows.sequences(places)
        block = judge.block(self.draft, logits, sequences, nodes, self.answered, self.correct, self.meanwhile)
        self.sound = block.sound
        return block


class Each:
    """Every row takes its tokens by itself, up to where it stops (ragged), and maybe not too far ahead (staggered)."""

    def __init__(self, farthest: Callable[[int], int] | None = None) -> None:
        """
        Args:
            farthest: of so many rows, how many tokens one may be ahead of the slowest; None for any number.
        """
        self.farthest = farthest

    def take(self, group: Group, rows: Rows, places: Sequence[int], tested: Tested) -> list[Result]:
        """Append what the judge accepts to these rows."""
        return self._take(rows, places, tested, tested.block(group.judge, rows, places))

    def _take(self, rows: Rows, places: Sequence[int], tested: Tested, block: Block) -> list[Result]:
        rows.write(block.texts, places)
        new = [self._until_stop(rows, b, judgement.text) for b, judgement in zip(places, block.rows, strict=True)]
        if self.farthest is not None:
            self._hold_back(rows, new, self.farthest(len(rows)))
        results = []
        behind = block.likeliest or [[]] * len(places)
        for b, tokens, judgement, deep, likeliest in zip(
            places, new, block.rows, depths(tested.draft), behind, strict=True
        ):
            rows.append(b, tokens)
            emitted = 0 if rows.all[b].failed is not None else len(tokens)
            results.append(Result(deep, judgement.path[: len(tokens)], tokens, emitted, likeliest))
        return results

    def passive(self, rows: Rows) -> list[bool]:
        """[B] rows that are fed padding: none, as one that stops leaves."""
        return [False] * len(rows)

    def _until_stop(self, rows: Rows, b: int, text: list[int]) -> list[int]:
        """The tokens up to the first that stops the row, with it."""
        row = rows.all[b]
        for n, token in enumerate(text, start=1):
            if self._stops(rows, b, row, row.length + n, token):
                row.stopped = True
                return text[:n]
        return text

    def _stops(self, rows: Rows, b: int, row: Row, length: int, token: int) -> bool:
        expect_token(token)
        return row.call.stopping.row(rows.ids, b, length, token)

    def _hold_back(self, rows: Rows, new: list[list[int]], farthest: int) -> None:
        """Cut what would bring a row too far ahead of the slowest one that goes on."""
        going = [row.length + len(tokens) for row, tokens in zip(rows.all, new, strict=True) if not row.stopped]
        if not going:
            return
        for b, row in enumerate(rows.all):
            most = max(1, farthest + min(going) - row.length)
            if len(new[b]) > most:  # whatever it holds: rows that are kept where they stop would stop too often
                new[b], row.stopped = new[b][:most], False


class EachAlone(Each):
    """The same for rows of several requests: what one raises ends that one alone."""

    def take(self, group: Group, rows: Rows, places: Sequence[int], tested: Tested) -> list[Result]:
        try:
            block = tested.block(group.judge, rows, places)
        except Exception as error:  # of a processor
            for b in places:
                rows.all[b].failed, rows.all[b].stopped = error, True
            return [Result(0, [], [0], 0) for _ in places]
        return self._take(rows, places, tested, block)

    def _stops(self, rows: Rows, b: int, row: Row, length: int, token: int) -> bool:
        try:
            return super()._stops(rows, b, row, length, token)
        except Exception as error:  # of a criterion, or no token can be drawn
            row.failed = error
            return True


Step = tuple[list[int], list[bool], Tensor | None]
"""tokens [B], whether each row agrees with its draft, processed scores [B, V] where they are wanted"""


class Together:
    """All rows of a call in step, as in plain decoding: a round ends where one of them disagrees with its draft."""

    def __init__(self, call: Call, steps: StepOutputs) -> None:
        self.call, self.stopping, self.steps = call, call.stopping, steps
        self.has_read = False
        """whether the prompt's forward is over"""

    def take(self, group: Group, rows: Rows, places: Sequence[int], tested: Tested) -> list[Result]:
        """Plain decoding's own loop, position by position, over logits that are there already."""
        is_prompt, self.has_read = not self.has_read, True
        width = tested.draft.tokens.shape[1] + 1
        logits, outputs = tested.forward.logits, tested.forward.outputs
        likeliest: list[list[tuple[int, list[int]]]] = []
        if opaque := self.call.processing.opaque:
            logits = logits[:, : _places_of_all(tested.forward.nodes, logits.shape[1])]
            tested.sound = bool(is_sound(tested.draft, logits.shape[-1]).all())
            steps: Iterator[Step] = group.judge.stepwise(tested.draft, logits, rows.sequences(places), tested.correct)
            paths = [list(range(width))] * len(rows)
        else:
            block = tested.block(group.judge, rows, places)
            steps, likeliest = self._replayed(rows, block), block.likeliest
            paths = [judgement.path for judgement in block.rows]
        new: list[list[int]] = [[] for _ in rows.all]
        accepted, emitted, start = [0] * len(rows), [0] * len(rows), rows.all[0].length
        for i, (tokens, agrees, scores) in enumerate(steps):
            passive = self.passive(rows)
            expect_token(min((token for token, out in zip(tokens, passive, strict=True) if not out), default=0))
            tokens = [self.call.pad_token_id if out else token for token, out in zip(tokens, passive, strict=True)]
            if opaque:
                rows.write(to_device(tokens, rows.device)[:, None], places)
            for b, token in enumerate(tokens):
                rows.append(b, [token])
                new[b].append(token)
                accepted[b] += agrees[b]
                emitted[b] += not passive[b]
            self.steps.add(i, logits, scores, outputs, is_prompt)
            newly = self._stop(rows, start + i + 1, tokens)
            if self.call.streamer is not None:
                self.call.streamer.put(torch.tensor(tokens, device="cpu"))
            in_step = all(agree or out for agree, out in zip(agrees, passive, strict=True))
            if not in_step or newly or all(row.stopped for row in rows.all):
                break
        told = likeliest or [[]] * len(rows)
        parts = zip(depths(tested.draft), paths, new, accepted, emitted, told, strict=True)
        return [Result(deep, path[:n], tokens, count, said) for deep, path, tokens, n, count, said in parts]

    def passive(self, rows: Rows) -> list[bool]:
        """[B] rows that are finished and fed padding, as plain decoding does where there is an EOS."""
        return [row.stopped and self.stopping.has_eos for row in rows.all]

    def _stop(self, rows: Rows, length: int, tokens: list[int]) -> bool:
        """Which rows are finished; whether that changes what is fed, because one has become padding."""
        stopped = self.stopping.batch(rows.ids, length, tokens, self.steps.scores)
        newly = any(now and not row.stopped for now, row in zip(stopped, rows.all, strict=True))
        for now, row in zip(stopped, rows.all, strict=True):
            row.stopped |= now
        return newly and self.stopping.has_eos

    def _replayed(self, rows: Rows, block: Block) -> Iterator[Step]:
        """A block's judgement, position by position, while all rows agree with their drafts."""
        passive = self.passive(rows)
        width = min(len(judged.text) for judged, out in zip(block.rows, passive, strict=True) if not out)
        texts = block.texts  # which may go on: what lies past a row's end does not count
        if any(passive):
            texts = texts.masked_fill(to_device(passive, rows.device, torch.bool)[:, None], self.call.pad_token_id)
        rows.write(texts, range(len(rows)))
        for i in range(width):
            agrees = [i < len(judged.path) for judged in block.rows]
            tokens = [judged.text[min(i, len(judged.text) - 1)] for judged in block.rows]
            yield tokens, agrees, block.scores[:, i] if self.steps.scores is not None else None


Taking = Each | Together


def _places_of_all(nodes: Any, places: int) -> int:
    """Of a chain, how many leading places every row has logits for: behind them something was pruned in some row."""
    if nodes is None:
        return places
    return 1 + min(row.index(-1) if -1 in row else len(row) for row in to_host(nodes))
