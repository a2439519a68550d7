"""How rows take what was judged: each by itself, or all together."""

from collections.abc import Callable, Iterator, Sequence

import torch

from ..transfer import to_device
from ..verify.judging import Judge, Position
from ..verify.trial import Result, Trial, expect_token
from .call import Call
from .outputs import StepOutputs
from .rows import Row, Rows


class Ragged:
    """Every row takes its tokens by itself, up to where it stops, and maybe not too far ahead (staggered)."""

    outputs: StepOutputs | None = None
    """what is collected of each step"""

    def __init__(self, farthest: Callable[[int], int] | None = None) -> None:
        """
        Args:
            farthest: of so many rows, how many tokens one may be ahead of the slowest; None for any number.
        """
        self.farthest = farthest

    def take(self, judge: Judge, rows: Rows, places: Sequence[int], trial: Trial) -> list[Result]:
        """Append what the judge accepts to these rows."""
        return self._append(rows, places, trial, judge.verify(trial))

    def _append(self, rows: Rows, places: Sequence[int], trial: Trial, results: list[Result]) -> list[Result]:
        rows.write(trial.texts, places)
        for b, result in zip(places, results, strict=True):
            self._cut_at_stop(rows, b, result)
        if self.farthest is not None:
            self._hold_back(rows, results, self.farthest(len(rows)))
        for b, result in zip(places, results, strict=True):
            result.path = result.path[: len(result.tokens)]
            result.emitted = len(result.tokens) if rows.all[b].failed is None else 0
            rows.append(b, result.tokens)
        return results

    def _cut_at_stop(self, rows: Rows, b: int, result: Result) -> None:
        """Its tokens end with the first that stops the row."""
        row = rows.all[b]
        for n, token in enumerate(result.tokens, start=1):
            if self._stops(rows, b, row, row.length + n, token):
                row.stopped, result.tokens = True, result.tokens[:n]
                return

    def _stops(self, rows: Rows, b: int, row: Row, length: int, token: int) -> bool:
        expect_token(token)
        return row.call.stopping.row(rows.ids, b, length, token)

    def _hold_back(self, rows: Rows, results: list[Result], farthest: int) -> None:
        """Cut what would bring a row too far ahead of the slowest one that goes on."""
        pairs = list(zip(rows.all, results, strict=True))
        going = [row.length + len(result.tokens) for row, result in pairs if not row.stopped]
        if not going:
            return
        for row, result in pairs:
            most = max(1, farthest + min(going) - row.length)
            if len(result.tokens) > most:  # whatever it holds: rows kept where they stop would stop too often
                result.tokens, row.stopped = result.tokens[:most], False


class RaggedRequests(Ragged):
    """The same for rows of several requests: what one raises ends that one alone."""

    def take(self, judge: Judge, rows: Rows, places: Sequence[int], trial: Trial) -> list[Result]:
        try:
            results = judge.verify(trial)
        except Exception as error:  # of a processor
            for b in places:
                rows.all[b].failed, rows.all[b].stopped = error, True
            return [Result([], [0]) for _ in places]
        return self._append(rows, places, trial, results)

    def _stops(self, rows: Rows, b: int, row: Row, length: int, token: int) -> bool:
        try:
            return super()._stops(rows, b, row, length, token)
        except Exception as error:  # of a criterion, or no token can be drawn
            row.failed = error
            return True


class Lockstep:
    """All rows of a call together, as in plain decoding: a round ends where one of them disagrees with its draft."""

    def __init__(self, call: Call, outputs: StepOutputs | None) -> None:
        self.call, self.stopping, self.outputs = call, call.stopping, outputs
        self.has_read = False
        """whether the prompt's forward is over"""

    def take(self, judge: Judge, rows: Rows, places: Sequence[int], trial: Trial) -> list[Result]:
        """Plain decoding's own loop, position by position, over logits that are there already."""
        is_prompt, self.has_read = not self.has_read, True
        opaque, start = self.call.processing.opaque, rows.all[0].length
        if opaque:
            results = [Result(list(range(n)), [], n) for n in trial.draft.lengths]
            steps: Iterator[Position] = judge.stepwise(trial)
        else:
            results = judge.verify(trial)
            steps = self._replayed(rows, trial, results)
        new: list[list[int]] = [[] for _ in rows.all]
        accepted, emitted = [0] * len(rows), [0] * len(rows)
        for i, (tokens, agrees, scores) in enumerate(steps):
            passive = [row.pad is not None for row in rows.all]
            expect_token(min((token for token, out in zip(tokens, passive, strict=True) if not out), default=0))
            tokens = [self.call.pad_token_id if out else token for token, out in zip(tokens, passive, strict=True)]
            if opaque:
                rows.write(to_device(tokens, rows.device)[:, None], places)
            for b, token in enumerate(tokens):
                rows.append(b, [token])
                new[b].append(token)
                accepted[b] += agrees[b]
                emitted[b] += not passive[b]
            if self.outputs is not None:
                self.outputs.add(i, trial.forward, scores, is_prompt)
            newly = self._stop(rows, start + i + 1, tokens)
            if self.call.streamer is not None:
                self.call.streamer.put(torch.tensor(tokens, device="cpu"))
            in_step = all(agree or out for agree, out in zip(agrees, passive, strict=True))
            if not in_step or newly or all(row.stopped for row in rows.all):
                break
        for b, result in enumerate(results):
            result.path, result.tokens, result.emitted = result.path[: accepted[b]], new[b], emitted[b]
        return results

    def _stop(self, rows: Rows, length: int, tokens: list[int]) -> bool:
        """Which rows are finished; whether that changes what is fed, because one has become padding."""
        scores = None if self.outputs is None else self.outputs.scores
        stopped = self.stopping.batch(rows.ids, length, tokens, scores)
        newly = any(now and not row.stopped for now, row in zip(stopped, rows.all, strict=True))
        for now, row in zip(stopped, rows.all, strict=True):
            row.stopped |= now
        return newly and self.stopping.has_eos

    def _replayed(self, rows: Rows, trial: Trial, results: list[Result]) -> Iterator[Position]:
        """What was judged at once, position by position, while all rows agree with their drafts."""
        passive = [row.pad is not None for row in rows.all]
        width = min(len(result.tokens) for result, out in zip(results, passive, strict=True) if not out)
        texts = trial.texts  # which may go on: what lies past a row's end does not count
        if any(passive):
            texts = texts.masked_fill(to_device(passive, rows.device, torch.bool)[:, None], self.call.pad_token_id)
        rows.write(texts, range(len(rows)))
        wanted = self.outputs is not None and self.outputs.scores is not None
        for i in range(width):
            agrees = [i < len(result.path) for result in results]
            tokens = [result.tokens[min(i, len(result.tokens) - 1)] for result in results]
            yield tokens, agrees, trial.scores[:, i] if wanted else None


Taking = Ragged | Lockstep
