"""`hf-specdec generate --prompts`: a file of prompts becomes a file of answers, many rows at once."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm

from ...drafters import Drafter
from ...errors import SpeculationError, one_line
from ...generate.decoder import BatchDecoder
from ...stats import SpeculationStats
from ...target.devices import input_device
from ..answers import AnswerFile
from ..instruments.ends import end_tokens, until_end
from ..loading.chat import batch, prompt_ids
from ..loading.checks import check_tokens
from ..loading.models import Pair
from ..loading.prompts import Prompt

FAILED, INTERRUPTED = 1, 130
"""exit statuses"""
ALIKE = 8
"""prompts in a row that fail with the same words: it is not the prompts"""


@dataclass
class Answering:
    """How a prompt is answered."""

    pair: Pair
    drafter: Drafter
    options: dict[str, Any]
    """of `generate`"""
    raw: bool = False
    system: str | None = None
    decoder: BatchDecoder | None = None
    """for rows that are decoded together; without it one prompt is decoded after the other"""
    alone: SpeculationStats = field(default_factory=SpeculationStats)
    """of what was decoded without one"""
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock)
    """tokenizers are, and torch's seed"""

    def fields(self, prompt: Prompt, seed: int) -> dict[str, Any]:
        """The line of a prompt: of a conversation with several turns the answers below each other, in `texts`, too."""
        texts: list[str] = []
        stats = SpeculationStats()
        while prompt.turns:
            tokens, new = self._decode(prompt, seed)
            with self.one_at_a_time:
                texts.append(self.pair.tokenizer.decode(tokens, skip_special_tokens=True))
            prompt, stats = prompt.after(texts[-1]), stats + new
        several = {"texts": texts} if len(texts) > 1 else {}
        reason = "stop" if tokens[-1] in end_tokens(self.pair.target) else "length"
        return {"text": texts[-1], **several, "finish_reason": reason, "stats": stats.to_dict()}

    def _decode(self, prompt: Prompt, seed: int) -> tuple[list[int], SpeculationStats]:
        """The new tokens of its first turn."""
        with self.one_at_a_time:
            ids = prompt_ids(self.pair.tokenizer, prompt, self.raw, self.system)
            check_tokens(torch.tensor(ids), prompt.turns[0])
            torch.manual_seed(seed)
            if self.decoder is None:
                return self._alone(ids)
            answer = self.decoder.submit(ids, **self.options)
        return answer.result(), answer.stats

    def _alone(self, ids: Sequence[int]) -> tuple[list[int], SpeculationStats]:
        target = self.pair.target
        inputs = batch([list(ids)], self.options["pad_token_id"], input_device(target))
        output: Any = target.generate(**inputs, assistant_model=self.drafter, **self.options)
        assert self.drafter.last_stats is not None
        self.alone += self.drafter.last_stats
        return until_end(target, output[0, len(ids) :].tolist()), self.drafter.last_stats


def answer_all(
    console: Console, file: AnswerFile, prompts: Sequence[Prompt], answering: Answering, max_rows: int
) -> int:
    """Answer what is missing, and put all in order; returns the exit status.

    Raises:
        SpeculationError: nothing can be written, or what fails is not one prompt but all of them.
    """
    left, failed = len(file.missing), 0
    failures: deque[str] = deque(maxlen=ALIKE)
    """of the last prompts in a row"""
    try:
        with ExitStack() as stack:
            answering.decoder = _joined(stack, answering, max_rows)
            bar = stack.enter_context(tqdm(total=len(prompts), initial=len(prompts) - left, unit="prompt"))
            for number, fields in _each(stack, file, prompts, answering, max_rows):
                file.add(number, **fields)
                bar.update()
                failed += "error" in fields
                failures.append(fields["error"]) if "error" in fields else failures.clear()
                if len(failures) == failures.maxlen and len(set(failures)) == 1:
                    raise SpeculationError(f"{len(failures)} prompts in a row fail alike: {failures[0]}")
    except KeyboardInterrupt:
        console.print(f"\nstopped; run the same command again to go on with {file.path}", markup=False)
        return INTERRUPTED
    file.finish()
    stats = answering.alone if answering.decoder is None else answering.decoder.stats
    console.print(f"{left - failed} of {left} prompts answered, in {file.path}", markup=False)
    if failed:
        console.print("the other lines say what failed; run the same command again to try those", markup=False)
    console.print(stats.summary(), markup=False)
    return FAILED if failed else 0


def _joined(stack: ExitStack, answering: Answering, max_rows: int) -> BatchDecoder | None:
    """None for one row, and where rows cannot come and go, which is said."""
    if max_rows == 1:
        return None
    try:
        return stack.enter_context(BatchDecoder(answering.pair.target, answering.drafter, max_rows=max_rows))
    except SpeculationError as reason:
        tqdm.write(f"prompts are decoded one by one: {reason}")
        return None


def _each(
    stack: ExitStack, file: AnswerFile, prompts: Sequence[Prompt], answering: Answering, max_rows: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and line of each prompt that is missing, as they come."""

    def one(number: int) -> tuple[int, dict[str, Any]]:
        try:
            return number, answering.fields(prompts[number], seed=int(file.ids[number], 16))
        except Exception as error:
            return number, {"error": one_line(error) or type(error).__name__}

    if answering.decoder is None:
        return map(one, file.missing)
    return stack.enter_context(ThreadPool(max_rows)).imap_unordered(one, file.missing)
