"""`hf-specdec train draft`: the target writes texts, a draft is cut out of it and learns from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from typer import Option

from ...tools.loading.checks import Range
from ...tools.loading.models import Pair, TargetSettings, load_model
from ..learning import Training
from ..own_text import OwnTextSettings, special_tokens, training_option
from ..writing import Text, most_frequent
from .cutting import check_cuttable, cut, take_over
from .distilling import TRAINERS, Distillation, Learner

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
        int,
        _cut(help="Size of the draft's vocabulary: the tokens that the target writes most often."),
        Range(16, 2**24),
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


class DraftTraining(Training):
    """A draft of a few layers and tokens of the target, saved as a model's folder."""

    option, trainer = "--draft", Distillation

    def __init__(self, settings: DraftSettings, pair: Pair) -> None:
        super().__init__(settings, pair)
        self.trainer = TRAINERS[settings.loss]
        self.layers = settings.layers or sorted({0, pair.target.config.num_hidden_layers - 1})
        check_cuttable(pair.target, self.layers)
        self.special = special_tokens(pair, pair.target.config.vocab_size, settings.known_tokens)

    def begin(self, texts: Sequence[Text]) -> Learner:
        target, settings = self.pair.target, self.settings
        tokens, self.covered = most_frequent(texts, target.config.vocab_size, settings.known_tokens, self.special)
        draft = cut(target, self.layers, tokens).float()
        if settings.start_from is not None:
            take_over(draft, load_model(TargetSettings(target=settings.start_from, dtype="float32", device="cpu")))
        return Learner(draft, target)

    def read(self, ids: Tensor) -> Tensor:
        """Those that the target's head reads."""
        return self.pair.target.base_model(input_ids=ids, use_cache=False).last_hidden_state

    def save(self, model: Learner, found: dict[str, Any]) -> dict[str, Any]:
        model.draft.to(torch.bfloat16).save_pretrained(self.settings.output)
        self.pair.tokenizer.save_pretrained(self.settings.output)
        return {"covered": self.covered, "parameters": float(model.draft.num_parameters())}
