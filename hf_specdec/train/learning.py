"""One way to train on text that the target writes, by transformers' `Trainer`: checkpoints and examinations at even
distances, and one bar."""

import json
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from tqdm import tqdm
from transformers import ProgressCallback, Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from ..drafters.disco.drafter import fingerprint
from ..errors import SpeculationError
from ..files import digest, write_whole
from ..target.devices import dtype_name, input_device
from ..tools.loading.models import Pair
from ..tools.loading.outputs import writable_folder
from ..tools.showing import quiet
from .folder import hold_to, interruptible
from .lessons import Lessons, collate, read_lessons
from .own_text import OwnTextSettings, given_texts, halves, own_texts, try_it
from .writing import Text

PARTS = 20
"""Parts of a training, after each of which there is an examination and a checkpoint."""


class ByLength(Sampler[int]):
    """Batches of texts of about one length, so that little is padded. The order depends on seed and epoch alone, so a
    run that goes on sees what an uninterrupted one would have seen."""

    def __init__(self, lessons: Lessons, batch_size: int, seed: int) -> None:
        self.lessons, self.batch_size, self.seed = lessons, batch_size, seed
        self.lengths = [len(text.ids) for text in lessons.texts]
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate before each epoch."""
        self.lessons.epoch = self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        rng, size = random.Random(f"{self.seed} {self.epoch}"), self.batch_size
        order = rng.sample(range(len(self.lengths)), len(self.lengths))
        pieces = [order[at : at + 50 * size] for at in range(0, len(order), 50 * size)]
        order = [i for piece in pieces for i in sorted(piece, key=lambda i: self.lengths[i])]
        batches = [order[at : at + size] for at in range(0, len(order), size)]
        last = batches.pop() if len(batches[-1]) < size else []
        rng.shuffle(batches)
        yield from (i for batch in [*batches, last] for i in batch)


class Examined(Trainer):
    """A trainer whose evaluation says how often what is trained would be right."""

    acceptance: Callable[..., dict[str, Any]]
    """(model, lessons, rows at once) → the figures of an examination"""
    said: Callable[..., str]
    """the figures in words"""

    def get_train_dataloader(self) -> DataLoader:
        lessons: Any = self.train_dataset
        size = self.args.train_batch_size
        order = ByLength(lessons, size, self.args.seed)
        return self.accelerator.prepare(
            DataLoader(lessons, size, sampler=order, collate_fn=self.data_collator)  # type: ignore[arg-type]
        )

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        """
        Raises:
            SpeculationError: the loss is not a number. It has not changed the weights.
        """
        loss = super().training_step(*arguments, **options)
        if not loss.isfinite():
            raise SpeculationError(
                f"the loss is {float(loss)} at step {self.state.global_step + 1}, with a learning rate of "
                f"{self.args.learning_rate:g}; lower learning_rate"
            )
        return loss

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Log the figures, and print them in a line above the bar."""
        found = self.acceptance(self.model, eval_dataset or self.eval_dataset, self.args.per_device_eval_batch_size)
        numbers = {name: value for name, value in found.items() if isinstance(value, float)}
        metrics = {f"{metric_key_prefix}_{name}": round(value, 4) for name, value in numbers.items()}
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        tqdm.write(f"step {self.state.global_step} of {self.state.max_steps}, held out: {self.said(found)}")
        return metrics


class Training(ABC):
    """What one training is about: what it reads of the target, how it begins, and what it saves."""

    trainer: type[Examined]
    option: ClassVar[str] = "--drafter"
    """of `generate`, which tries what was trained"""

    def __init__(self, settings: Any, pair: Pair) -> None:
        """Before hours of writing.

        Raises:
            SpeculationError: the target cannot be trained for.
        """
        self.settings, self.pair = settings, pair

    @abstractmethod
    def begin(self, texts: Sequence[Text]) -> nn.Module:
        """What is trained, as it is before."""

    reads: Any = None
    """what tells states apart, as JSON values"""

    @abstractmethod
    def read(self, ids: Tensor) -> Tensor:
        """States of the target [B, T, size] of ids [B, T]."""

    @abstractmethod
    def save(self, model: Any, found: dict[str, Any]) -> dict[str, Any]:
        """Write what was trained to `output`; further figures: `parameters`, and `covered`, the share of the target's
        tokens that it knows, where these are few.

        Args:
            found: the figures of the examination.
        """

    def lessons(self, texts: Sequence[Text], file: Path, places: int | None = None) -> Lessons:
        """The texts with what is read of the target.

        Args:
            places: as of `Lessons`.
        """
        return read_lessons(texts, file, self.read, input_device(self.pair.target), self.reads, places)


def train(kind: type[Training], settings: OwnTextSettings) -> dict[str, Any]:
    """Write texts, read the target's states, train, and save to `output`; what is done already is not done again.

    Returns:
        The figures, as in `training.json`: those of the trainer's `acceptance` on held-out texts, and `save`'s.

    Raises:
        SpeculationError: an argument out of range, bad data, a target that does not fit, or a loss that is not a
            number any more.
    """
    settings.check()
    output = writable_folder(settings.output)
    work = output / "training"
    work.mkdir(exist_ok=True)
    questions = settings.questions()
    with quiet(), interruptible("run the same command again to continue"):
        pair = settings.load()
        training = kind(settings, pair)
        hold_to(work / "made_for.json", {"target": fingerprint(pair.target), "max_new_tokens": settings.max_new_tokens})
        texts = own_texts(settings, pair, questions, work) if settings.answers == "own" else given_texts(settings, pair)
        model = training.begin(texts)
        learned, held_out = halves(texts, settings.held_out, settings.seed)
        lessons = training.lessons(learned, work / "states.bin", getattr(settings, "places", None))
        examination = training.lessons(held_out, work / "held_out.bin")
        pair.target.requires_grad_(False)
        name = digest([[vars(text) for text in texts], settings.course()])[:12]
        learn(settings, training.trainer, model, lessons, examination, work / "checkpoints" / name)
        found = training.trainer.acceptance(model, examination, settings.batch_size)
        found |= training.save(model, found)
        write_whole(output / "training.json", json.dumps(found | {"settings": asdict(settings)}, indent=2) + "\n")
        return found


def closing(kind: type[Training], settings: OwnTextSettings, found: dict[str, Any]) -> Iterator[str]:
    """What the command says at its end."""
    yield f"held out: {kind.trainer.said(found)}"
    covers = f"; its vocabulary covers {found['covered']:.1%} of the target's tokens" if "covered" in found else ""
    yield f"{found['parameters'] / 1e6:.2f} M parameters{covers}"
    yield from try_it(settings, kind.option)


@contextmanager
def examining(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and without gradients; afterwards in the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class Bar(ProgressCallback):
    """A progress bar of the steps, with the latest loss."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Show the loss alone: evaluations print their own figures."""
        if self.training_bar is not None and "loss" in (logs or {}):
            self.training_bar.set_postfix_str(f"loss {float(logs['loss']):.3f}")


def learn(
    settings: OwnTextSettings,
    trainer_class: type[Examined],
    model: nn.Module,
    lessons: Lessons,
    examination: Lessons,
    folder: Path,
) -> None:
    """Train, from the last checkpoint in the folder where there is one.

    Raises:
        SpeculationError: the loss is not a number any more, or a checkpoint cannot be written.
    """
    every = max(1, round(settings.epochs * len(lessons) / settings.batch_size / PARTS))
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        warmup_steps=0.01,
        weight_decay=0.01,
        max_grad_norm=1.0,
        use_cpu=settings.device == "cpu",
        bf16=settings.dtype == "bfloat16" and dtype_name("auto", settings.device) == "bfloat16",
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
    trainer = trainer_class(
        model=model, args=arguments, data_collator=collate, train_dataset=lessons, eval_dataset=examination
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Bar)
    try:
        trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    except (OSError, SafetensorError) as error:
        raise SpeculationError(
            f"cannot write to {folder}: {error}; make room and run the same command again, which continues from "
            "the last checkpoint"
        ) from error


def last_checkpoint(folder: Path) -> str | None:
    """The last checkpoint that is complete. An incomplete one is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    while (last := get_last_checkpoint(str(folder))) is not None:
        if (Path(last) / TRAINER_STATE_NAME).exists():
            return last
        shutil.rmtree(last)
    return None
