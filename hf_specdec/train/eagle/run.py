"""`hf-specdec train eagle`: the target writes texts, and an EAGLE-3 head over its states learns to foretell them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from typer import Option

from ...drafters import EagleDrafter
from ...drafters.heads.eagle import EagleConfig
from ...drafters.heads.eagle_model import LlamaForCausalLMEagle3
from ...errors import SpeculationError
from ...options import range_of
from ...tools.loading.checks import Range
from ...tools.loading.models import Pair
from ..learning import Training
from ..own_text import OwnTextSettings, special_tokens, training_option
from ..writing import Text, most_frequent
from .beginning import beginning
from .learner import EagleTrainer, Learner

_head: Any = partial(Option, rich_help_panel="The head")


@dataclass(kw_only=True)
class EagleSettings(OwnTextSettings):
    """Arguments of the command."""

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
        training_option(help="Steps of the head over its own states, as when it drafts; γ of the drafter."),
        Range(*range_of(EagleConfig, "num_draft_tokens")),
    ] = EagleConfig.num_draft_tokens
    epochs: Annotated[float, training_option(help="Times that each text is trained on."), Range(0.01, 1000)] = 4.0
    batch_size: Annotated[int, training_option(help="Texts per training step."), Range(1, 4096)] = 8
    learning_rate: Annotated[float, training_option(help="Peak learning rate."), Range(1e-8, 1)] = 3e-3


class EagleTraining(Training):
    """A head of the target's width. It goes into the folder `draft_model` of a drafter, in the format that SGLang and
    vLLM load."""

    trainer = EagleTrainer

    def __init__(self, settings: EagleSettings, pair: Pair) -> None:
        super().__init__(settings, pair)
        self.config, theirs = head_config(pair.target, settings.mlp_size), _text_config(pair.target)
        self.special = special_tokens(pair, theirs.vocab_size, settings.known_tokens)

    def begin(self, texts: Sequence[Text]) -> Learner:
        theirs = _text_config(self.pair.target)
        tokens, self.covered = most_frequent(texts, theirs.vocab_size, self.settings.known_tokens, self.special)
        self.config.draft_vocab_size = len(tokens)
        head = beginning(self.config, self.pair.target, tokens, self.settings.seed)
        self.reads = [*head.states_read(theirs.num_hidden_layers), -1]
        return Learner(head, self.pair.target, self.settings.steps)

    def read(self, ids: Tensor) -> Tensor:
        """Those that the head reads, and those that the target's head reads behind them; 0 are the embeddings."""
        found = self.pair.target.base_model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([found[i] for i in self.reads], dim=-1)

    def save(self, model: Learner, found: dict[str, Any]) -> dict[str, Any]:
        head = model.head.requires_grad_(False).to(torch.bfloat16).eval()
        drafter = EagleDrafter(head, num_draft_tokens=self.settings.steps)
        drafter.save_pretrained(self.settings.output, target=self.pair.target, tokenizer=self.pair.tokenizer)
        return {"covered": self.covered, "parameters": float(sum(p.numel() for p in head.parameters()))}


def _text_config(target: PreTrainedModel) -> Any:
    return target.config.get_text_config(decoder=True)


def head_config(target: PreTrainedModel, mlp_size: int | None) -> LlamaConfig:
    """Of a head that is as wide as the target, and reads the states that are usual.

    Raises:
        SpeculationError: the target has too few layers, or is of another make.
    """
    theirs = _text_config(target)
    if theirs.num_hidden_layers < 5:
        raise SpeculationError(
            f"{type(target).__name__} has {theirs.num_hidden_layers} layers, and an EAGLE-3 head reads the states of "
            "low, middle and high ones: 5 or more; use train streaming or train draft"
        )
    theta = (getattr(theirs, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "bos_token_id")
    same = (*sizes, "intermediate_size", "max_position_embeddings", "rms_norm_eps", "eos_token_id", "pad_token_id")
    options = {name: value for name in same if (value := getattr(theirs, name, None)) is not None}
    if mlp_size is not None:
        options["intermediate_size"] = mlp_size
    config = LlamaConfig(
        **options,
        num_hidden_layers=1,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        architectures=[LlamaForCausalLMEagle3.__name__],
    )
    config.rope_theta = theta  # where older transformers, and so engines, look for it
    return config
