"""`hf-specdec train draft`: the target writes texts, a draft is cut out of it and learns from them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from typer import Option

from ...errors import SpeculationError
from ...tools.loading.models import ModelSource, Pair, load_model
from ...tools.showing import quiet
from ..folder import TrainingFolder, interruptible
from ..learning import learn
from ..own_text import (
    OwnTextSettings,
    halves,
    hold_to_target,
    own_texts,
    special_tokens,
    training_option,
    try_it,
)
from ..writing import most_frequent
from .cutting import check_cuttable, cut, take_over
from .distilling import TRAINERS, acceptance, collate, said
from .teacher import contents, read_lessons

_cut: Any = partial(Option, rich_help_panel="The draft model")


@dataclass(kw_only=True)
class DraftSettings(OwnTextSettings):
    """Arguments of the command."""

    layers: Annotated[
        list[int],
        _cut(
            "--layer", help="Layer of the target to copy; may be given several times. Default: the first and the last."
        ),
    ] = field(default_factory=list)
    known_tokens: Annotated[
        int, _cut(help="Size of the draft's vocabulary: the tokens that the target writes most often.")
    ] = 8192
    start_from: Annotated[
        str | None, _cut(help="Folder of a draft that was cut out of this target before; its training is continued.")
    ] = None
    loss: Annotated[
        Literal["cross_entropy", "tv"],
        training_option(
            help="What is made small: cross_entropy, or tv, the total variation distance, which is the rate of "
            "rejection at temperature 1."
        ),
    ] = "cross_entropy"

    ranges: ClassVar[dict[str, tuple[float, float]]] = OwnTextSettings.ranges | {"known_tokens": (16, 32_768)}

    def check(self) -> None:
        """
        Raises:
            SpeculationError: an argument out of range.
        """
        super().check()
        if self.loss not in TRAINERS:
            raise SpeculationError(f"loss must be {' or '.join(map(repr, TRAINERS))}, got {self.loss!r}")


def train_draft(settings: DraftSettings) -> dict[str, float]:
    """Write texts, cut a draft, train it and save it to `output`; what is done already is not done again.

    Returns:
        The figures, as in `training.json`: `greedy_match` and `acceptance` on texts that were held out (see
        `distilling.acceptance`), `covered`, the share of the target's tokens that the draft knows, and `parameters`.

    Raises:
        SpeculationError: an argument out of range, bad data, or a target that no draft can be cut out of.
    """
    settings.check()
    folder = TrainingFolder.at(settings.output)
    questions = settings.questions()
    with quiet(), interruptible("run the same command again to continue"):
        pair = settings.load()
        special = _check_target(settings, pair)
        hold_to_target(folder, settings, pair)
        texts = own_texts(settings, pair, questions, folder.work)
        tokens, covered = most_frequent(texts, pair.target.config.vocab_size, settings.known_tokens, special)
        learned, held_out = halves(texts, settings.held_out, settings.seed)
        lessons = read_lessons(pair.target, learned, tokens, folder.work / "lessons.safetensors")
        examination = read_lessons(pair.target, held_out, tokens, folder.work / "held_out.safetensors")
        draft = cut(pair.target, _layers(settings, pair), tokens).float()
        if settings.start_from is not None:
            take_over(draft, load_model(ModelSource(settings.start_from, "float32", "cpu")))
        chosen = ("layers", "start_from", "epochs", "batch_size", "learning_rate", "seed", "dtype", "loss")
        checkpoints = folder.checkpoints(contents(learned, tokens), *(getattr(settings, name) for name in chosen))
        learn(settings, TRAINERS[settings.loss], draft, lessons, examination, collate, checkpoints)
        found = acceptance(draft, examination, settings.batch_size)
        found |= {"covered": covered, "parameters": float(draft.num_parameters())}
        draft.to(torch.bfloat16).save_pretrained(settings.output)
        pair.tokenizer.save_pretrained(settings.output)
        folder.report(found, settings)
        return found


def closing(settings: DraftSettings, found: dict[str, float]) -> Iterator[str]:
    """What the command says at its end."""
    yield f"held out: {said(found)}"
    yield (
        f"{found['parameters'] / 1e6:.1f} M parameters; its vocabulary covers {found['covered']:.1%} of the "
        "target's tokens"
    )
    yield f"saved to {settings.output}; try it:"
    yield try_it(settings, "--draft", settings.output)


def _layers(settings: DraftSettings, pair: Pair) -> list[int]:
    return settings.layers or sorted({0, pair.target.config.num_hidden_layers - 1})


def _check_target(settings: DraftSettings, pair: Pair) -> list[int]:
    """Whether a draft can be cut out of it, asked before hours of writing; its special tokens."""
    check_cuttable(pair.target, _layers(settings, pair))
    return special_tokens(pair, pair.target.config.vocab_size, settings.known_tokens)
