"""`hf-specdec train eagle`: the target writes texts, and an EAGLE-3 head over its states learns to foretell them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from transformers import LlamaConfig, PreTrainedModel
from typer import Option

from ...drafters import EagleDrafter
from ...drafters.eagle import EagleConfig
from ...drafters.eagle.model import LlamaForCausalLMEagle3
from ...errors import SpeculationError
from ...options import range_of
from ...tools.showing import quiet
from ..draft.teacher import contents
from ..folder import TrainingFolder, interruptible
from ..learning import learn
from ..own_text import (
    Answers,
    OwnTextSettings,
    given_texts,
    halves,
    hold_to_target,
    own_texts,
    special_tokens,
    training_option,
    try_it,
)
from ..writing import most_frequent
from .beginning import beginning
from .learner import EagleTraining, Learner, acceptance, said
from .lessons import collate, read_lessons

_head: Any = partial(Option, rich_help_panel="The head")


@dataclass(kw_only=True)
class EagleSettings(OwnTextSettings):
    """Arguments of the command."""

    answers: Answers = "own"
    known_tokens: Annotated[
        int, _head(help="Size of the head's vocabulary: the tokens that the target writes most often.")
    ] = 8192
    mlp_size: Annotated[int | None, _head(help="Width of the head's MLP; default: that of the target's.")] = None
    steps: Annotated[
        int, training_option(help="Steps of the head over its own states, as when it drafts; γ of the drafter.")
    ] = EagleConfig.num_draft_tokens
    epochs: Annotated[float, training_option(help="Times that each text is trained on.")] = 4.0
    batch_size: Annotated[int, training_option(help="Texts per training step.")] = 8
    learning_rate: Annotated[float, training_option(help="Peak learning rate.")] = 3e-3

    ranges: ClassVar[dict[str, tuple[float, float]]] = OwnTextSettings.ranges | {
        "known_tokens": (16, 2**24),
        "steps": range_of(EagleConfig, "num_draft_tokens"),
    }

    def check(self) -> None:
        """
        Raises:
            SpeculationError: an argument out of range.
        """
        super().check()
        if self.mlp_size is not None and not 1 <= self.mlp_size <= 2**24:
            raise SpeculationError(f"mlp_size must be from 1 to {2**24}, got {self.mlp_size}")
        if self.answers == "given" and not self.data:
            raise SpeculationError("answers='given' needs data; name files with prompts and answers")


def train_eagle(settings: EagleSettings) -> dict[str, Any]:
    """Write texts, read the target's states, train a head, and save the drafter to `output`; what is done already is
    not done again. The head is in its folder `draft_model`, in the format that SGLang and vLLM load.

    Returns:
        The figures of `learner.acceptance` on texts that were held out, `covered`, the share of the target's tokens
        that the head knows, and `parameters`.

    Raises:
        SpeculationError: an argument out of range, bad data, a target without states enough, or a loss that is not a
            number any more.
    """
    settings.check()
    folder, own = TrainingFolder.at(settings.output), settings.answers == "own"
    questions = settings.questions() if own else []
    with quiet(), interruptible("run the same command again to continue"):
        pair = settings.load()
        target, vocab = pair.target, pair.target.config.get_text_config(decoder=True).vocab_size
        config = head_config(target, settings)
        special = special_tokens(pair, vocab, settings.known_tokens)
        hold_to_target(folder, settings, pair)
        texts = own_texts(settings, pair, questions, folder.work) if own else given_texts(settings, pair)
        tokens, covered = most_frequent(texts, vocab, settings.known_tokens, special)
        config.draft_vocab_size = len(tokens)
        head = beginning(config, target, tokens, settings.seed)
        learned, held_out = halves(texts, settings.held_out, settings.seed)
        read = head.states_read(target.config.get_text_config(decoder=True).num_hidden_layers)
        lessons = read_lessons(target, read, learned, folder.work / "states.bin")
        examination = read_lessons(target, read, held_out, folder.work / "held_out.bin")
        target.requires_grad_(False)
        learner = Learner(head, target, settings.steps)
        chosen = ("mlp_size", "steps", "epochs", "batch_size", "learning_rate", "seed", "dtype")
        checkpoints = folder.checkpoints(contents(learned, tokens), *(getattr(settings, name) for name in chosen))
        learn(settings, EagleTraining, learner, lessons, examination, collate, checkpoints)
        found = acceptance(learner, examination, settings.batch_size)
        found |= {"covered": covered, "parameters": float(sum(p.numel() for p in head.parameters()))}
        drafter = EagleDrafter(head.requires_grad_(False).to(torch.bfloat16).eval(), num_draft_tokens=settings.steps)
        drafter.save_pretrained(settings.output, target=target, tokenizer=pair.tokenizer)
        folder.report(found, settings)
        return found


def head_config(target: PreTrainedModel, settings: EagleSettings) -> LlamaConfig:
    """Of a head that is as wide as the target, and reads the states that are usual.

    Raises:
        SpeculationError: the target has too few layers, or is of another make.
    """
    theirs = target.config.get_text_config(decoder=True)
    if theirs.num_hidden_layers < 5:
        raise SpeculationError(
            f"{type(target).__name__} has {theirs.num_hidden_layers} layers, and an EAGLE-3 head reads the states of "
            "low, middle and high ones: 5 or more; use train streaming or train draft"
        )
    theta = (getattr(theirs, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "bos_token_id")
    same = (*sizes, "intermediate_size", "max_position_embeddings", "rms_norm_eps", "eos_token_id", "pad_token_id")
    options = {name: value for name in same if (value := getattr(theirs, name, None)) is not None}
    if settings.mlp_size is not None:
        options["intermediate_size"] = settings.mlp_size
    config = LlamaConfig(
        **options,
        num_hidden_layers=1,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        architectures=[LlamaForCausalLMEagle3.__name__],
    )
    config.rope_theta = theta  # where older transformers, and so engines, look for it
    return config


def closing(settings: EagleSettings, found: dict[str, Any]) -> Iterator[str]:
    """What the command says at its end."""
    yield f"held out: {said(found)}"
    yield (
        f"{found['parameters'] / 1e6:.2f} M parameters; its vocabulary covers {found['covered']:.1%} of the target's "
        "tokens"
    )
    yield f"saved to {settings.output}; try it:"
    yield try_it(settings, "--drafter", settings.output)
