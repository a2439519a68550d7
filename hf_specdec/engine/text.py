"""`Text`: the accepted tokens of a call, which rows have stopped, and what the caller sees of it.

The buffer of ids lies on the target's device, lengths and tokens on the host too. Drafters are shown a copy, which
grows along: what they write into it spoils their own drafts only.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..protocol import Sequences
from ..transfer import to_device
from ..verify.block import Block, expect_token
from .call import Call
from .outputs import StepOutputs

BLOCK = 256
"""columns by which the buffer of token ids grows"""

Step = tuple[list[int], list[bool], Tensor]
"""tokens [B], whether each row agrees with its draft, processed scores [B, V]"""


class Text:
    """Rows that grow, by themselves (ragged) or together (lockstep)."""

    def __init__(self, call: Call, ragged: bool) -> None:
        self.call, self.ragged, self.stopping = call, ragged, call.stopping
        self.rows, self.prompt_columns = call.input_ids.shape
        prompt = call.input_ids.long()  # plain decoding's output is int64, whatever its input was
        self.device = call.input_ids.device
        self.sequences = Sequences(
            ids=torch.nn.functional.pad(prompt, (0, BLOCK)),
            lengths=[self.prompt_columns] * self.rows,
            rows=list(range(self.rows)),
            tokens=[
                [token for token, seen in zip(ids, mask, strict=True) if seen]
                for ids, mask in zip(call.input_ids.tolist(), call.prompt_mask.tolist(), strict=True)
            ],
        )
        self.shown_ids = self.sequences.ids.clone()
        self.shown_tokens = [list(tokens) for tokens in self.sequences.tokens]
        self.ends = torch.full((self.rows,), self.prompt_columns, device=self.device)
        """[B] the rows' lengths on the device"""
        self.finished = [False] * self.rows
        """by the rows' index in the call's batch"""
        self.texts: dict[int, Tensor] = {}
        """of ragged rows that have stopped"""
        self.steps = StepOutputs(call.config)

    def view(self) -> Sequences:
        """What a drafter may see of the present state."""
        s = self.sequences
        return Sequences(self.shown_ids[:], list(s.lengths), list(s.rows), list(self.shown_tokens))

    def last(self) -> Tensor:
        """The last accepted token of each row [B, 1]."""
        s = self.sequences
        if len(set(s.lengths)) == 1:
            return s.ids[:, s.lengths[0] - 1 : s.lengths[0]]
        return s.ids.gather(1, self.ends[:, None] - 1)

    def passive(self) -> list[bool]:
        """[B] rows of a lockstep batch that are finished and fed padding, as in plain decoding."""
        if self.ragged or not self.stopping.has_eos:
            return [False] * len(self.sequences.rows)
        return [self.finished[row] for row in self.sequences.rows]

    def reserve(self, columns: int) -> None:
        """Room for that many more tokens in every row."""
        s = self.sequences
        missing = max(s.lengths) + columns - s.ids.shape[1]
        if missing > 0:
            more = -(-missing // BLOCK) * BLOCK
            s.ids = torch.nn.functional.pad(s.ids, (0, more))
            self.shown_ids = torch.nn.functional.pad(self.shown_ids, (0, more))

    # ------------------------------------------------------------------ growing

    def grow_ragged(self, block: Block, farthest: int | None = None) -> list[list[int]]:
        """Each row by itself, cut where it stops; returns the tokens appended.

        Args:
            farthest: tokens that a row may be ahead of the slowest one that goes on; None for any number.
        """
        s = self.sequences
        self._write(block.texts)
        emitted = []
        for b, judgement in enumerate(block.rows):
            length = s.lengths[b]
            grown = enumerate(judgement.text, start=1)
            cut = next((n for n, token in grown if self._ends(b, length + n, token)), None)
            self.finished[s.rows[b]] = cut is not None
            emitted.append(judgement.text[:cut])
        going = [b for b, row in enumerate(s.rows) if not self.finished[row]]
        if farthest is not None and going:
            end = farthest + min(s.lengths[b] + len(emitted[b]) for b in going)
            for b, row in enumerate(s.rows):
                most = max(1, end - s.lengths[b])
                if len(emitted[b]) > most:  # whatever it holds: rows that are kept where they stop would stop too often
                    emitted[b], self.finished[row] = emitted[b][:most], False
        for b, new in enumerate(emitted):
            self._append(b, new)
        self.ends = to_device(s.lengths, self.device)
        return emitted

    def _ends(self, b: int, length: int, token: int) -> bool:
        expect_token(token)
        return self.stopping.row(self.sequences.ids, b, length, token)

    def _write(self, texts: Tensor) -> None:
        """Put what was judged behind each row's end; the columns past a row's text stay undefined."""
        s = self.sequences
        width = texts.shape[1]
        for ids in (s.ids, self.shown_ids):
            if len(set(s.lengths)) == 1:
                ids[:, s.lengths[0] : s.lengths[0] + width] = texts
            else:
                ids.scatter_(1, self.ends[:, None] + torch.arange(width, device=self.device), texts)

    def _append(self, b: int, new: list[int]) -> None:
        s = self.sequences
        s.tokens[b].extend(new)
        s.lengths[b] += len(new)
        self.shown_tokens[b].extend(new)

    def grow_together(
        self, steps: Iterator[Step], logits: Tensor, outputs: Any, is_prompt: bool, written: bool
    ) -> "Together":
        """All rows together, position by position: plain decoding's own loop over logits that are already there.

        Args:
            written: whether the ids are in place (see `replay`).
        """
        s, start = self.sequences, self.sequences.lengths[0]
        grown = Together([[] for _ in s.rows], [0] * len(s.rows), 0)
        for i, (tokens, agrees, scores) in enumerate(steps):
            passive = self.passive()
            expect_token(min((x for x, out in zip(tokens, passive, strict=True) if not out), default=0))
            tokens = [self.call.pad_token_id if out else x for x, out in zip(tokens, passive, strict=True)]
            if not written:
                s.ids[:, start + i] = self.shown_ids[:, start + i] = to_device(tokens, self.device)
            for b, token in enumerate(tokens):
                self._append(b, [token])
                grown.emitted[b].append(token)
                grown.accepted[b] += agrees[b]
                grown.counted += not passive[b]
            self.steps.add(i, logits, scores, outputs, is_prompt)
            stopped = self.stopping.batch(s.ids[:, : start + i + 1], tokens, self.steps.scores)
            newly = any(now and not before for now, before in zip(stopped, self.finished, strict=True))
            self.finished = [now or before for now, before in zip(stopped, self.finished, strict=True)]
            if self.call.streamer is not None:
                self.call.streamer.put(torch.tensor(tokens))
            together = all(agree or out for agree, out in zip(agrees, passive, strict=True))
            if all(self.finished) or not together or (newly and self.stopping.has_eos):
                break
        self.ends = torch.full_like(self.ends, s.lengths[0])
        return grown

    def replay(self, block: Block) -> Iterator[Step]:
        """A block's judgement, position by position, while all rows agree with their drafts."""
        passive = self.passive()
        width = min(len(j.text) for j, out in zip(block.rows, passive, strict=True) if not out)
        texts = block.texts[:, :width]
        if any(passive):
            texts = texts.masked_fill(to_device(passive, self.device, torch.bool)[:, None], self.call.pad_token_id)
        self._write(texts)
        for i in range(width):
            agrees = [i < len(judgement.path) for judgement in block.rows]
            tokens = [judgement.text[min(i, len(judgement.text) - 1)] for judgement in block.rows]
            yield tokens, agrees, block.scores[:, i]

    # ------------------------------------------------------------------ leaving

    def leaving(self) -> list[int]:
        """Ragged rows that have stopped leave the batch; returns those that stay, by their place."""
        s = self.sequences
        stay = [b for b, row in enumerate(s.rows) if not self.finished[row]]
        if not self.ragged or len(stay) == len(s.rows):
            return list(range(len(s.rows)))
        for b in set(range(len(s.rows))) - set(stay):
            self.texts[s.rows[b]] = s.ids[b, self.prompt_columns : s.lengths[b]].clone()
        index = to_device(stay, self.device)
        s.ids, self.ends, self.shown_ids = s.ids[index], self.ends[index], self.shown_ids[index]
        for name in ("lengths", "tokens", "rows"):
            setattr(s, name, [getattr(s, name)[b] for b in stay])
        self.shown_tokens = [self.shown_tokens[b] for b in stay]
        return stay

    def longest(self) -> int:
        """New tokens of the longest row."""
        s = self.sequences
        ends = [*s.lengths, *(self.prompt_columns + len(text) for text in self.texts.values())]
        return max(ends) - self.prompt_columns

    def ids(self) -> Tensor:
        """The whole output [B, columns], padded on the right."""
        if not self.ragged:
            return self.sequences.ids[:, : self.sequences.lengths[0]].clone()
        longest = max(len(text) for text in self.texts.values())
        prompt = self.call.input_ids.long()
        ids = prompt.new_full((self.rows, self.prompt_columns + longest), self.call.pad_token_id)
        ids[:, : self.prompt_columns] = prompt
        for row, text in self.texts.items():
            ids[row, self.prompt_columns : self.prompt_columns + len(text)] = text
        return ids


class Together:
    """What a round in lockstep has added."""

    def __init__(self, emitted: list[list[int]], accepted: list[int], counted: int) -> None:
        self.emitted, self.accepted, self.counted = emitted, accepted, counted
        """tokens and accepted ones per row, padding included; tokens that are no padding"""
