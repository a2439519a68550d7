"""`hf-specdec train draft`: the target writes texts, a draft is cut out of it and learns from them."""

import hashlib
import json
import random
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from transformers import ProgressCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint
from typer import Option

from ...devices import dtype_name
from ...drafters.disco.drafter import fingerprint
from ...drafters.draft_model.cut import CutLlamaForCausalLM
from ...errors import SpeculationError
from ...loading.checks import check_seed
from ...loading.models import ModelSource, Pair, TargetSettings, load_model
from ...loading.outputs import writable_folder
from ...loading.prompts import sample_prompts
from ...showing.quiet import quiet
from ...target.inputs import position_limit
from ..folder import hold_to, interruptible, write_whole
from .cutting import check_cuttable, cut, most_frequent, take_over
from .distilling import Bar, Distillation, acceptance, collate, said
from .teacher import Lessons, digest, read_lessons
from .writing import Text, own_prompts, prompts_of, write_texts

PARTS = 20
"""into which evaluations and checkpoints divide a training"""


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
    start_from: Annotated[
        str | None, Option(help="Draft that was cut out of this target before: go on from what it has learned.")
    ] = None
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
        if self.limit is not None and self.limit < 1:
            raise SpeculationError(f"limit must be 1 or more, got {self.limit}")
        if not self.data and not self.own_prompts:
            raise SpeculationError("there is nothing to answer: give data, or own_prompts above 0")
        check_seed(self.seed)


def train_draft(settings: DraftSettings) -> dict[str, float]:
    """Write texts, cut a draft, train it and save it to `output`; what is done already is not done again.

    Returns:
        The figures, as in `training.json`: `greedy_match` and `acceptance` on texts that were held out (see
        `distilling.acceptance`), `covered`, the share of the target's tokens that the draft knows, and `parameters`.

    Raises:
        SpeculationError: an argument out of range, bad data, or a target that no draft can be cut out of.
    """
    settings.check()
    work = writable_folder(settings.output) / "training"
    work.mkdir(exist_ok=True)
    prompts = [prompt for path in settings.data for prompt in sample_prompts(path, settings.limit, settings.seed)]
    questions = [prompt.turns[0] for prompt in prompts]
    with quiet(), interruptible("the same command goes on where it stopped"):
        pair = settings.load()
        special = _check_target(settings, pair)
        hold_to(work / "made_for.json", {"target": fingerprint(pair.target), "max_new_tokens": settings.max_new_tokens})
        texts = _texts(settings, pair, questions, work)
        tokens, covered = most_frequent(texts, pair.target.config.vocab_size, settings.known_tokens, special)
        learned, held_out = _halves(texts, settings.held_out, settings.seed)
        lessons = read_lessons(pair.target, learned, tokens, work / "lessons.safetensors")
        examination = read_lessons(pair.target, held_out, tokens, work / "held_out.safetensors")
        draft = cut(pair.target, _layers(settings, pair), tokens).float()
        if settings.start_from is not None:
            take_over(draft, load_model(ModelSource(settings.start_from, "float32", "cpu")))
        _distil(settings, draft, lessons, examination, work / "checkpoints" / _name(settings, learned, tokens))
        found = acceptance(draft, examination, settings.batch_size)
        found |= {"covered": covered, "parameters": float(draft.num_parameters())}
        draft.to(torch.bfloat16).save_pretrained(settings.output)
        pair.tokenizer.save_pretrained(settings.output)
        report = found | {"settings": asdict(settings)}
        write_whole(Path(settings.output) / "training.json", json.dumps(report, indent=2) + "\n")
        return found


def closing(settings: DraftSettings, found: dict[str, float]) -> Iterator[str]:
    """What the command says at its end."""
    yield f"held out: {said(found)}"
    yield f"{found['parameters'] / 1e6:.1f} M parameters, and a word of its own for {found['covered']:.1%} of the text"
    yield f"saved to {settings.output}; try it:"
    own = [] if settings.gguf_file is None else ["--gguf-file", settings.gguf_file]
    models = ["--target", settings.target, *own, "--draft", settings.output]
    yield shlex.join(["hf-specdec", "generate", *models, "--prompt", "..."])


def _layers(settings: DraftSettings, pair: Pair) -> list[int]:
    return settings.layers or sorted({0, pair.target.config.num_hidden_layers - 1})


def _check_target(settings: DraftSettings, pair: Pair) -> list[int]:
    """Whether a draft can be cut out of it, asked before hours of writing; its special tokens."""
    check_cuttable(pair.target, _layers(settings, pair))
    special = [token for token in set(pair.tokenizer.all_special_ids) if token < pair.target.config.vocab_size]
    if len(special) > settings.known_tokens:
        raise SpeculationError(
            f"known_tokens must be {len(special)} or more, as many as the target has special tokens, "
            f"got {settings.known_tokens}"
        )
    return special


def _texts(settings: DraftSettings, pair: Pair, given: list[str], work: Path) -> list[Text]:
    """The target's answers to its own prompts and to those that are given."""
    questions = own_prompts(
        pair.target, pair.tokenizer, settings.own_prompts, settings.rows, settings.seed, work / "prompts.json"
    )
    questions += given
    random.Random(settings.seed).shuffle(questions)
    longest = int(min(settings.max_new_tokens * 2, position_limit(pair.target) - settings.max_new_tokens))
    prompts = prompts_of(pair.tokenizer, questions, settings.raw, settings.sampled, longest, settings.seed)
    if not prompts:
        raise SpeculationError(
            f"no prompt has {longest} tokens or less, which max_new_tokens={settings.max_new_tokens} and the target's "
            "context leave; give shorter prompts"
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


def _halves(texts: Sequence[Text], held_out: float, seed: int) -> tuple[list[Text], list[Text]]:
    """What the draft learns from, and what it is examined on: other prompts, one at least."""
    places = {text.prompt: random.Random(seed * 1_000_003 + text.prompt).random() for text in texts}
    if len(places) < 2:
        raise SpeculationError(f"{len(texts)} texts are too few to hold some of them out; give more prompts")
    least = sorted(places.values())
    border = min(max(held_out, least[1]), least[-1])  # one prompt is examined, and one is learned from, in any case
    parts: tuple[list[Text], list[Text]] = ([], [])
    for text in texts:
        parts[places[text.prompt] < border].append(text)
    return parts


def _name(settings: DraftSettings, learned: Sequence[Text], tokens: torch.Tensor) -> str:
    """Tells trainings apart: the checkpoints of one are no beginning of another."""
    chosen = ("layers", "start_from", "epochs", "batch_size", "learning_rate", "seed", "dtype")
    content = [digest(learned, tokens), *(getattr(settings, name) for name in chosen)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def _distil(
    settings: DraftSettings, draft: CutLlamaForCausalLM, lessons: Lessons, examination: Lessons, folder: Path
) -> None:
    """Train; from the last checkpoint in the folder, where there is one."""
    on_cpu = settings.device == "cpu"
    every = max(1, round(settings.epochs * len(lessons) / settings.batch_size / PARTS))
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.01,
        weight_decay=0.01,
        max_grad_norm=1.0,
        use_cpu=on_cpu,
        bf16=settings.dtype == "bfloat16" and dtype_name("auto", settings.device) == "bfloat16",
        train_sampling_strategy="group_by_length",  # little is padded
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=every,
        save_steps=every,
        save_total_limit=1,
        logging_steps=10,
        remove_unused_columns=False,
        label_names=[],
        report_to=[],
        seed=settings.seed,
        disable_tqdm=False,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # a small model gains nothing by several
    trainer = Distillation(
        model=draft, args=arguments, data_collator=collate, train_dataset=lessons, eval_dataset=examination
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Bar)
    trainer.train(resume_from_checkpoint=_last_checkpoint(folder))


def _last_checkpoint(folder: Path) -> str | None:
    """The last one that was written to its end; one that an interruption cut is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    while (last := get_last_checkpoint(str(folder))) is not None:
        if (Path(last) / TRAINER_STATE_NAME).exists():
            return last
        shutil.rmtree(last)
    return None
