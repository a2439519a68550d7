"""`hf-specdec train head`: the target writes texts, and a head over its states learns to foretell them."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from typer import Option

from ...drafters import DFlashDrafter, EagleDrafter
from ...drafters.heads.dflash_format import FORMAT
from ...drafters.heads.eagle import EagleConfig
from ...drafters.heads.eagle_model import LlamaForCausalLMEagle3
from ...hub.saving import DRAFT_FOLDER
from ...options import range_of
from ...tools.loading.checks import Range
from ...tools.loading.models import Pair
from ..learning import Training
from ..lessons import Lessons
from ..own_text import OwnTextSettings, special_tokens, training_option
from ..writing import Text, most_frequent
from . import blocks, eagle
from .beginning import layers_config, states_read, text_config
from .learner import HeadTrainer, Learner

PLACES = 32
"""blocks behind each text that are trained on per epoch, at most"""

_head: Any = partial(Option, rich_help_panel="The head")


@dataclass(kw_only=True)
class HeadSettings(OwnTextSettings):
    """Arguments of the command."""

    type: Annotated[Literal["eagle3", "dflash", "dspark"], _head(help="Kind of head.")] = "eagle3"
    known_tokens: Annotated[
        int,
        _head(help="Size of the head's vocabulary: the tokens that the target writes most often."),
        Range(16, 2**24),
    ] = 8192
    mlp_size: Annotated[
        int | None, _head(help="Width of the head's MLP; default: that of the target's."), Range(1, 2**24)
    ] = None
    steps: Annotated[
        int,
        training_option(help="γ: steps that the head drafts, and is trained for."),
        Range(*range_of(EagleConfig, "num_draft_tokens")),
    ] = EagleConfig.num_draft_tokens
    epochs: Annotated[float, training_option(help="Times that each text is trained on."), Range(0.01, 1000)] = 4.0
    batch_size: Annotated[int, training_option(help="Texts per training step."), Range(1, 4096)] = 8
    learning_rate: Annotated[float, training_option(help="Peak learning rate."), Range(1e-8, 1)] = 3e-3


class HeadTraining(Training):
    """A head of the target's width. It goes into the folder `draft_model` of a drafter, in a format that engines
    load."""

    trainer = HeadTrainer
    layers: ClassVar[tuple[type[PreTrainedConfig], int]]
    """their family, and how many"""
    settings: HeadSettings

    def __init__(self, settings: HeadSettings, pair: Pair) -> None:
        super().__init__(settings, pair)
        self.config = layers_config(pair.target, settings.mlp_size, *self.layers)
        self.reads = [*states_read(pair.target), -1]
        self.special = special_tokens(pair, text_config(pair.target).vocab_size, settings.known_tokens)

    def begin(self, texts: Sequence[Text]) -> Learner:
        vocab = text_config(self.pair.target).vocab_size
        tokens, self.covered = most_frequent(texts, vocab, self.settings.known_tokens, self.special)
        return self.learner(texts, tokens)

    @abstractmethod
    def learner(self, texts: Sequence[Text], tokens: Tensor) -> Learner:
        """A head that knows these tokens [K]."""

    def read(self, ids: Tensor) -> Tensor:
        """Those that the head reads, and those that the target's head reads behind them; 0 are the embeddings."""
        found = self.pair.target.base_model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([found[i] for i in self.reads], dim=-1)

    def save(self, model: Learner, found: dict[str, Any]) -> dict[str, Any]:
        head = model.head.requires_grad_(False).to(torch.bfloat16).eval()
        self.drafter(head).save_pretrained(self.settings.output, target=self.pair.target, tokenizer=self.pair.tokenizer)
        return {"covered": self.covered, "parameters": float(sum(p.numel() for p in head.parameters()))}

    @abstractmethod
    def drafter(self, head: Any) -> Any:
        """Drafts with the head."""


class EagleTraining(HeadTraining):
    """In the format that SGLang and vLLM load."""

    layers = LlamaConfig, 1

    def learner(self, texts: Sequence[Text], tokens: Tensor) -> Learner:
        self.config.architectures, self.config.draft_vocab_size = [LlamaForCausalLMEagle3.__name__], len(tokens)
        head = eagle.beginning(self.config, self.pair.target, tokens, self.settings.seed)
        return eagle.EagleLearner(head, self.pair.target, self.settings.steps)

    def drafter(self, head: Any) -> EagleDrafter:
        return EagleDrafter(head, num_draft_tokens=self.settings.steps)


class DFlashTraining(HeadTraining):
    """In the format of `speculators`, which vLLM loads, too."""

    layers = Qwen3Config, 2
    of: ClassVar[tuple[type[blocks.DFlashLearner], dict[str, Any]]] = blocks.DFlashLearner, blocks.DFLASH

    def lessons(self, texts: Sequence[Text], file: Path, places: int | None = None) -> Lessons:
        return super().lessons(texts, file, PLACES)

    def learner(self, texts: Sequence[Text], tokens: Tensor) -> Learner:
        target, (kind, beside) = self.pair.target, self.of
        mask = blocks.rarest(texts, self.special or range(self.config.vocab_size))
        self.content = blocks.published(beside, self.config, target, tokens, mask, self.settings.steps)
        return kind(blocks.beginning(self.content, target, tokens, self.settings.seed), target, tokens)

    def drafter(self, head: Any) -> DFlashDrafter:
        return DFlashDrafter(head)

    def save(self, model: Learner, found: dict[str, Any]) -> dict[str, Any]:
        figures = super().save(model, found)
        FORMAT.write(Path(self.settings.output) / DRAFT_FOLDER, self.content, blocks.weights(model.head))
        return figures


class DSparkTraining(DFlashTraining):
    """A DFlash head with a Markov and a confidence head."""

    of = blocks.DSparkLearner, blocks.DSPARK


TRAININGS: dict[str, type[HeadTraining]] = {
    "eagle3": EagleTraining,
    "dflash": DFlashTraining,
    "dspark": DSparkTraining,
}
"""by the type of head"""
