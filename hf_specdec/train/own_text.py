"""Trainings on text that the target writes: the settings and the texts that they have in common."""

import random
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from ..errors import SpeculationError
from ..target.inputs import position_limit
from ..tools.loading.chat import prompt_ids
from ..tools.loading.checks import SEEDS, Range
from ..tools.loading.models import Pair, TargetSettings
from ..tools.loading.prompts import sample_examples, sample_prompts
from ..tools.loading.rows import PROMPT_SOURCES
from .writing import Text, own_prompts, prompts_of, write_texts

texts_option: Any = partial(Option, rich_help_panel="Texts that the target writes")
training_option: Any = partial(Option, rich_help_panel="Training")


@dataclass(kw_only=True)
class TextSettings(TargetSettings):
    """What decides which texts are written."""

    output: Annotated[str, Option(help="Folder to write to; the same command continues an interrupted training there.")]
    data: Annotated[
        list[str],
        Option(
            help=f"More prompts for the target to answer: {PROMPT_SOURCES}; may be given several times. Of a data set "
            "the split train is the default."
        ),
    ] = field(default_factory=list)
    answers: Annotated[
        Literal["own", "given"], Option(help="Train on the target's own answers, or on those given in --data.")
    ] = "own"
    own_prompts: Annotated[
        int, texts_option(help="Number of prompts that the target makes up itself."), Range(0, 10_000_000)
    ] = 2000
    limit: Annotated[
        int | None, texts_option(help="Take only this many prompts of each --data, at random; default: all."), Range(1)
    ] = None
    max_new_tokens: Annotated[int, texts_option(help="Tokens per answer, at most."), Range(2, 4096)] = 224
    rows: Annotated[int, texts_option(help="Batch size when the target writes."), Range(1, 1024)] = 48
    raw: Annotated[
        float, texts_option(help="Share of prompts continued as plain text, without the chat template."), Range(0, 1)
    ] = 0.2
    sampled: Annotated[
        float, texts_option(help="Share answered at temperature 1; the others are greedy."), Range(0, 1)
    ] = 0.4

    def questions(self) -> list[str]:
        """The prompts of the data files that the target is to answer."""
        if self.answers == "given":
            return []
        prompts = [prompt for path in self.data for prompt in sample_prompts(path, self.limit, self.seed)]
        return [prompt.turns[0] for prompt in prompts]

    seed: Annotated[int, training_option(help="Seed of sampling, of the split and of the training."), SEEDS] = 0


@dataclass(kw_only=True)
class OwnTextSettings(TextSettings):
    """Arguments of a command that trains on such text."""

    epochs: Annotated[float, training_option(help="Times that each text is trained on."), Range(0.01, 1000)] = 8.0
    batch_size: Annotated[int, training_option(help="Texts per training step."), Range(1, 4096)] = 16
    learning_rate: Annotated[float, training_option(help="Peak learning rate."), Range(1e-8, 1)] = 1e-3
    held_out: Annotated[float, training_option(help="Share of the prompts kept for testing."), Range(0.001, 0.5)] = 0.04

    def check(self) -> None:
        """
        Raises:
            SpeculationError: an argument out of range.
        """
        super().check()
        if self.answers == "given" and not self.data:
            raise SpeculationError("answers='given' needs data; name files with prompts and answers")
        if not self.data and not self.own_prompts:
            raise SpeculationError("there are no prompts to answer; give data, or set own_prompts above 0")

    def course(self) -> dict[str, Any]:
        """What changes the course of a training on the same texts."""
        texts = {f.name for f in fields(TextSettings)} - {"seed", "dtype"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in texts}


def own_texts(settings: OwnTextSettings, pair: Pair, given: list[str], work: Path) -> list[Text]:
    """The target's answers to its own prompts and to given ones. Answers that `work` holds are not written again."""
    questions = own_prompts(
        pair.target, pair.tokenizer, settings.own_prompts, settings.rows, settings.seed, work / "prompts.json"
    )
    questions += given
    random.Random(settings.seed).shuffle(questions)
    longest = int(min(settings.max_new_tokens * 2, position_limit(pair.target) - settings.max_new_tokens))
    prompts = prompts_of(pair.tokenizer, questions, settings.raw, settings.sampled, longest, settings.seed)
    if not prompts:
        raise SpeculationError(
            f"every prompt is longer than the {longest} tokens that max_new_tokens={settings.max_new_tokens} "
            "and the target's context leave room for; give shorter prompts"
        )
    return write_texts(
        pair.target,
        pair.tokenizer,
        prompts,
        work / "texts.jsonl",
        settings.max_new_tokens,
        settings.rows,
        settings.seed,
    )


def try_it(settings: Any, option: str) -> Iterator[str]:
    """Where the result is, and a command that generates with it.

    Args:
        option: of `generate`, that names what was trained.
    """
    yield f"saved to {settings.output}; try it:"
    own = [] if settings.gguf_file is None else ["--gguf-file", settings.gguf_file]
    trained = [option, settings.output, "--prompt", "..."]
    yield shlex.join(["hf-specdec", "generate", "--target", settings.target, *own, *trained])


def special_tokens(pair: Pair, vocab: int, known: int) -> list[int]:
    """The tokenizer's special tokens that the target has, all of which are to be known.

    Raises:
        SpeculationError: they are more than the `known` tokens.
    """
    special = [token for token in set(pair.tokenizer.all_special_ids) if token < vocab]
    if len(special) > known:
        raise SpeculationError(
            f"known_tokens must be {len(special)} or more, the number of the target's special tokens, got {known}"
        )
    return special


def given_texts(settings: OwnTextSettings, pair: Pair) -> list[Text]:
    """The examples of the data files: prompts as conversations, and the answers given there, to their end."""
    end = pair.tokenizer.eos_token_id
    ends = [] if end is None else [end]
    examples = [one for path in settings.data for one in sample_examples(path, settings.limit, settings.seed)]
    texts, limit = [], position_limit(pair.target)
    for number, (prompt, answer) in enumerate(examples):
        ids = prompt_ids(pair.tokenizer, replace(prompt, chat=True))
        said = pair.tokenizer(answer, add_special_tokens=False)["input_ids"] + ends
        if 2 <= len(said) <= settings.max_new_tokens and len(ids) + len(said) <= limit:
            texts.append(Text(ids + said, len(ids), 0.0, number))
    if not texts:
        raise SpeculationError(
            f"no example has an answer of 2 to {settings.max_new_tokens} tokens; set max_new_tokens higher"
        )
    return texts


def halves(texts: Sequence[Text], held_out: float, seed: int) -> tuple[list[Text], list[Text]]:
    """The texts to learn from, and those to be examined on, which continue other prompts; one prompt each at least."""
    places = {text.prompt: random.Random(seed * 1_000_003 + text.prompt).random() for text in texts}
    if len(places) < 2:
        raise SpeculationError(f"{len(texts)} texts are too few to train on some and test on others; give more prompts")
    least = sorted(places.values())
    border = min(max(held_out, least[1]), least[-1])  # one prompt is examined, and one is learned from, in any case
    parts: tuple[list[Text], list[Text]] = ([], [])
    for text in texts:
        parts[places[text.prompt] < border].append(text)
    return parts
