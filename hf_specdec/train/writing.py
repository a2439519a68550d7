"""The target writes what its draft will learn from: prompts of its own, and answers to these and to others.

A draft is right where the target is predictable, so the best text for it is the target's own, greedy and sampled.
Finished texts go to a file, and an interrupted run goes on after them.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters import Drafter
from ..errors import SpeculationError
from ..files import write_whole
from ..protocol import Draft, DraftContext, Sequences
from ..session import DraftSession
from ..target.devices import input_device
from ..tools.instruments.ends import until_end
from ..tools.loading.chat import ask, batch
from ..tools.loading.sampling import sampling_at

PLACE = "\u241f"
"""Stands for a message's text in a chat template; no template contains this character."""
SHORTEST = 15
"""Characters that a prompt must exceed; shorter ones are dropped."""
FRUITLESS = 20
"""Batches in a row without a prompt, after which no more are asked for."""


@dataclass(frozen=True)
class Text:
    """A prompt with what the target wrote behind it."""

    ids: list[int]
    start: int
    """where the target's own text begins"""
    temperature: float
    prompt: int
    """which prompt it continues; texts of one prompt are held out together"""


@dataclass(frozen=True)
class Asked:
    """What the target is to continue."""

    ids: list[int]
    temperature: float
    number: int


class Undrafted(Drafter):
    """Drafts nothing. Unlike plain `generate`, the engine lets finished rows leave the batch."""

    def start(self, context: DraftContext) -> DraftSession:
        return _NoDraft(context)


class _NoDraft(DraftSession):
    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        return Draft.from_lists([[]] * len(room))


def write_texts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Asked],
    file: Path,
    max_new_tokens: int,
    rows: int,
    seed: int,
) -> list[Text]:
    """The texts of all prompts, in their order. Those in the file are read; the others are written and appended."""
    known = {_key(text.ids[: text.start], text.temperature): text for text in read_texts(file)}
    _end_with_a_line(file)
    with file.open("a") as out, tqdm(total=len(prompts), desc="texts", unit="text") as bar:
        for some in _batches(prompts, rows):  # the same ones wherever a run was stopped
            missing = [prompt for prompt in some if _key(prompt.ids, prompt.temperature) not in known]
            for text in _continue(target, tokenizer, missing, max_new_tokens, seed + some[0].number):
                out.write(json.dumps(asdict(text)) + "\n")
                known[_key(text.ids[: text.start], text.temperature)] = text
            out.flush()
            bar.update(len(some))
            bar.set_postfix_str(f"{sum(len(text.ids) - text.start for text in known.values()):,} tokens")
    # The number is the prompt's of this run: more data, or others, number them anew.
    return [replace(known[_key(prompt.ids, prompt.temperature)], prompt=prompt.number) for prompt in prompts]


def read_texts(file: Path) -> list[Text]:
    """The texts of a file. Lines that hold no text, such as the last one of an interrupted run, are left out."""
    texts = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            texts.append(Text(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return texts


def most_frequent(texts: Sequence[Text], vocab_size: int, known: int, special: Sequence[int]) -> tuple[Tensor, float]:
    """The tokens that the target wrote most, sorted, and the share of its tokens that they are.

    Args:
        known: how many; all where the vocabulary is smaller.
        special: tokens to keep in any case.
    """
    written = torch.tensor([token for text in texts for token in text.ids[text.start :]], dtype=torch.long)
    read = torch.tensor([token for text in texts for token in text.ids], dtype=torch.long)
    counts = torch.bincount(written, minlength=vocab_size)
    # Among tokens that were written equally often, those that were read, and then those of small ids, are more common.
    order = counts.double() + torch.bincount(read, minlength=vocab_size).clamp(max=999) / 1e3
    order = order + torch.arange(vocab_size, 0, -1) / vocab_size / 1e4
    order[list(special)] = torch.inf
    tokens = order.topk(min(known, vocab_size)).indices.sort().values
    return tokens, float(counts[tokens].sum() / counts.sum())


def own_prompts(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, rows: int, seed: int, file: Path
) -> list[str]:
    """What the target asks itself: user turns that it writes where its chat template begins one, sampled.

    A tokenizer without a template begins at its first token, and a text's beginning is the prompt.

    Raises:
        SpeculationError: there is no such place to begin, or the target writes nothing there.
    """
    known = json.loads(file.read_text()) if file.exists() else []
    fruitless = 0
    with tqdm(total=count, desc="prompts of its own", unit="prompt") as bar:
        bar.update(min(len(known), count))
        while len(known) < count:
            some, before = [Asked(_begin_of_a_turn(tokenizer), 1.0, i) for i in range(rows)], len(known)
            for text in _continue(target, tokenizer, some, 80, seed + before + 1_000_003 * fruitless):
                words = tokenizer.decode(text.ids[text.start :], skip_special_tokens=True).strip()
                if len(words) > SHORTEST:
                    known.append(words)
            fruitless = fruitless + 1 if len(known) == before else 0
            if fruitless == FRUITLESS:
                raise SpeculationError(
                    f"the target wrote {fruitless * rows} prompts of its own, none longer than {SHORTEST} "
                    "characters; set own_prompts to 0 and give data"
                )
            write_whole(file, json.dumps(known))
            bar.update(min(len(known), count) - bar.n)
    return known[:count]


def _begin_of_a_turn(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.chat_template is None:
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if first is None:
            raise SpeculationError(
                "the target's tokenizer has neither a chat template nor a first token, so it cannot begin a prompt of "
                "its own; set own_prompts to 0 and give data"
            )
        return [first]
    message = [{"role": "user", "content": PLACE}]
    text: Any = tokenizer.apply_chat_template(message, tokenize=False)
    return tokenizer(text[: text.index(PLACE)], add_special_tokens=False)["input_ids"]


def prompts_of(
    tokenizer: PreTrainedTokenizerBase, questions: Sequence[str], raw: float, sampled: float, longest: int, seed: int
) -> list[Asked]:
    """Questions as prompts: in the chat template or, a share `raw` of them, as they are; greedy or sampled.

    Prompts of more than `longest` tokens are left out, and a question that comes twice. How one is put depends on the
    question alone, so that a training with more of them finds the answers of one with fewer.
    """
    prompts: dict[str, Asked] = {}
    for number, question in enumerate(questions):
        rng = random.Random(f"{seed} {question}")
        as_it_is, temperature = rng.random() < raw, float(rng.random() < sampled)
        ids = ask(tokenizer, question, raw=as_it_is)
        if 0 < len(ids) <= longest:
            prompts.setdefault(question, Asked(ids, temperature, number))
    return list(prompts.values())


def _key(ids: Sequence[int], temperature: float) -> tuple[tuple[int, ...], float]:
    return tuple(ids), temperature


def _end_with_a_line(file: Path) -> None:
    """Remove an incomplete last line, so that nothing is appended to it."""
    if file.exists():
        with file.open("r+b") as content:
            content.truncate(content.read().rfind(b"\n") + 1)


def _batches(prompts: Sequence[Asked], rows: int) -> Iterator[list[Asked]]:
    """Batches of prompts of one temperature and about one length, from each piece of the list in turn."""
    piece = 8 * rows
    for at in range(0, len(prompts), piece):
        for temperature in (0.0, 1.0):
            some = [prompt for prompt in prompts[at : at + piece] if prompt.temperature == temperature]
            some.sort(key=lambda prompt: len(prompt.ids))
            for first in range(0, len(some), rows):
                yield some[first : first + rows]


def _continue(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Asked], most: int, seed: int
) -> list[Text]:
    if not prompts:
        return []
    inputs = batch([prompt.ids for prompt in prompts], tokenizer.pad_token_id, input_device(target))
    temperature, pad = prompts[0].temperature, tokenizer.pad_token_id or 0
    torch.manual_seed(seed)
    output: Any = target.generate(
        **inputs,
        max_new_tokens=most,
        pad_token_id=pad,
        assistant_model=Undrafted(),
        **sampling_at(temperature),
    )
    columns = inputs["input_ids"].shape[1]
    return [
        Text(prompt.ids + until_end(target, row[columns:]), len(prompt.ids), temperature, prompt.number)
        for prompt, row in zip(prompts, output.tolist(), strict=True)
    ]
