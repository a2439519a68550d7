"""`hf-specdec train draft`: the target writes texts, a draft is cut out of it and learns from them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from typer import Option

from ...drafters.draft_model.cut import CutLlamaForCausalLM
from ...errors import SpeculationError
from ...loading.models import Pair, TargetSettings
from ...loading.prompts import sample_prompts
from .cutting import cut, most_frequent
from .distilling import Distillation, acceptance, collate
from .teacher import Lessons, read_lessons
from .writing import Text, own_prompts, prompts_of, write_texts


@dataclass(kw_only=True)
class DraftSettings(TargetSettings):
    """Arguments of the command."""

    output: Annotated[str, Option(help="Folder of the draft model; an interrupted run goes on from there.")]
    data: Annotated[
        list[str], Option(help="Prompts to answer, beside those the target writes itself; may be given several times.")
    ] = field(default_factory=list)
    own_prompts: Annotated[int, Option(help="Prompts that the target writes itself.")] = 2000
    limit: Annotated[int | None, Option(help="Prompts to take of each file, drawn at random.")] = None
    max_new_tokens: Annotated[int, Option(help="Tokens of an answer.")] = 224
    rows: Annotated[int, Option(help="Texts that are written at once.")] = 48
    raw: Annotated[float, Option(help="Share of the prompts continued as they are, without the chat template.")] = 0.2
    sampled: Annotated[float, Option(help="Share answered at temperature 1; the others greedily.")] = 0.4
    layers: Annotated[
        list[int],
        Option("--layer", help="Layer of the target to start as; may be given several times; first and last if not."),
    ] = field(default_factory=list)
    known_tokens: Annotated[int, Option(help="Tokens that the draft can write: those the target writes most.")] = 8192
    epochs: Annotated[float, Option(help="Times that every text is learned from.")] = 8.0
    batch_size: Annotated[int, Option(help="Texts per step of the training.")] = 16
    learning_rate: Annotated[float, Option(help="At its highest.")] = 1e-3
    held_out: Annotated[float, Option(help="Share of the prompts whose texts the draft never learns from.")] = 0.04
    seed: Annotated[int, Option(help="Of sampling, of the split and of the training.")] = 0

    def check(self) -> None:
        """
        Raises:
            SpeculationError: an argument out of range.
        """
        ranges: dict[str, tuple[float, float]] = {
            "own_prompts": (0, 10_000_000),
            "max_new_tokens": (2, 4096),
            "rows": (1, 1024),
            "raw": (0, 1),
            "sampled": (0, 1),
            "known_tokens": (16, 32_768),
            "epochs": (0.01, 1000),
            "batch_size": (1, 4096),
            "learning_rate": (1e-8, 1),
            "held_out": (0.001, 0.5),
        }
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                raise SpeculationError(f"{name} must be from {least} to {most}, got {getattr(self, name)}")
        if not self.data and not self.own_prompts:
            raise SpeculationError("there is nothing to answer: give data, or own_prompts above 0")


def train_draft(settings: DraftSettings) -> dict[str, float]:
    """Write texts, cut a draft, train it and save it to `output`; what is done already is not done again.

    Returns:
        `greedy_match` and `acceptance` on texts that were held out (see `distilling.acceptance`), `covered`, the share
        of the target's tokens that the draft knows, and `parameters`.

    Raises:
        SpeculationError: an argument out of range, or a target that no draft can be cut out of.
    """
    settings.check()
    work = Path(settings.output) / "training"
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpeculationError(f"cannot write to output {settings.output!r}: {error.strerror or error}") from error
    pair = settings.load()
    texts = _texts(settings, pair, work)
    config, tokenizer = pair.target.config.get_text_config(decoder=True), pair.tokenizer
    special = [i for i in tokenizer.all_special_ids if i < config.vocab_size]
    tokens, covered = most_frequent(texts, config.vocab_size, settings.known_tokens, special)
    learned, held_out = _halves(texts, settings.held_out, settings.seed)
    lessons = read_lessons(pair.target, learned, tokens, work / "lessons.safetensors")
    examination = read_lessons(pair.target, held_out, tokens, work / "held_out.safetensors")
    last = config.num_hidden_layers - 1
    draft = cut(pair.target, settings.layers or sorted({0, last}), tokens).float()
    _distil(settings, draft, lessons, examination, work)
    found = acceptance(draft, examination, settings.batch_size)
    draft.to(torch.bfloat16).save_pretrained(settings.output)
    return found | {"covered": covered, "parameters": float(draft.num_parameters())}


def _texts(settings: DraftSettings, pair: Pair, work: Path) -> list[Text]:
    questions = own_prompts(
        pair.target, pair.tokenizer, settings.own_prompts, settings.rows, settings.seed, work / "prompts.json"
    )
    for path in settings.data:
        questions += sample_prompts(path, settings.limit, settings.seed)
    if not questions:
        raise SpeculationError("the target wrote no prompt of its own; give prompts with data")
    random.Random(settings.seed).shuffle(questions)
    longest = settings.max_new_tokens * 2
    prompts = prompts_of(pair.tokenizer, questions, settings.raw, settings.sampled, longest, settings.seed)
    return write_texts(
        pair.target,
        pair.tokenizer,
        prompts,
        work / "texts.jsonl",
        settings.max_new_tokens,
        settings.rows,
        settings.seed,
    )


def _halves(texts: Sequence[Text], held_out: float, seed: int) -> tuple[list[Text], list[Text]]:
    """What the draft learns from, and what it is examined on: other prompts."""
    parts: tuple[list[Text], list[Text]] = ([], [])
    for text in texts:
        parts[random.Random(seed * 1_000_003 + text.prompt).random() < held_out].append(text)
    if not all(parts):
        raise SpeculationError(f"{len(texts)} texts are too few to hold some of them out; give more prompts")
    return parts


def _distil(
    settings: DraftSettings, draft: CutLlamaForCausalLM, lessons: Lessons, examination: Lessons, work: Path
) -> None:
    on_cpu = settings.device == "cpu"
    arguments = TrainingArguments(
        output_dir=str(work / "checkpoints"),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=50,
        weight_decay=0.01,
        max_grad_norm=1.0,
        use_cpu=on_cpu,
        bf16=settings.dtype == "bfloat16",
        eval_strategy="steps",
        eval_steps=200,
        save_steps=200,
        save_total_limit=1,
        logging_steps=50,
        remove_unused_columns=False,
        label_names=[],
        report_to=[],
        seed=settings.seed,
        disable_tqdm=False,
    )
    trainer = Distillation(
        model=draft,
        args=arguments,
        data_collator=collate,
        train_dataset=lessons,
        eval_dataset=examination,
        callbacks=[],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir) if _started(work) else None)


def _started(work: Path) -> bool:
    return (work / "checkpoints").is_dir()
