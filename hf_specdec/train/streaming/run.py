"""`hf-specdec train streaming`: the target writes texts, and streams in its upper layers learn to foretell them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn
from typer import Option

from ...drafters import Drafter, StreamingDrafter
from ...drafters.streaming import StreamingConfig, Upper
from ...errors import SpeculationError, shown
from ...options import help_of, range_of
from ...target.attention import why_no_masks
from ...target.devices import input_device
from ...target.masks import attention_windows
from ...tools.loading.models import Pair
from ...tools.showing import quiet
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
from ..writing import Text, most_frequent
from .learner import Learner, StreamTraining, acceptance, collate, said
from .states import read_states

_streams: Any = partial(Option, rich_help_panel="The streams")
_of = partial(help_of, StreamingConfig)


@dataclass(kw_only=True)
class StreamingSettings(OwnTextSettings):
    """Arguments of the command."""

    mode: Annotated[
        Literal["untouched", "tuned"],
        Option(help="untouched leaves the target's text as it is; tuned also trains its upper layers on the texts."),
    ] = "untouched"
    answers: Answers = "own"
    streams: Annotated[int, _streams(help=_of("num_streams"))] = 4
    num_layers: Annotated[int, _streams(help=_of("num_layers"))] = 8
    adapter_rank: Annotated[int, _streams(help=_of("adapter_rank"))] = 16
    adapted: Annotated[
        list[str],
        _streams(
            "--adapt",
            help="Linear map to adapt, such as self_attn.q_proj; may be given several times. Default: all.",
        ),
    ] = field(default_factory=list)
    map_rank: Annotated[int, _streams(help=_of("map_rank"))] = 0
    prune_rank: Annotated[int, _streams(help=_of("prune_rank"))] = 8
    rotation: Annotated[float, _streams(help=_of("rotation"))] = 0.0
    known_tokens: Annotated[int, _streams(help=_of("known_tokens"))] = 8192
    places: Annotated[int, training_option(help="Positions of each text trained on per epoch, drawn at random.")] = 64
    candidates: Annotated[int, _streams(help="k: candidates per stream whose acceptance is measured.")] = 6
    epochs: Annotated[float, training_option(help="Times that each text is trained on.")] = 3.0
    start_from: Annotated[
        str | None, _streams(help="Folder of streams of the same shape; their training is continued.")
    ] = None

    ranges: ClassVar[dict[str, tuple[float, float]]] = {
        **OwnTextSettings.ranges,
        **{
            name: range_of(StreamingConfig, name)
            for name in ("num_layers", "adapter_rank", "map_rank", "prune_rank", "rotation", "known_tokens")
        },
        "streams": range_of(StreamingConfig, "num_streams"),
        "candidates": range_of(StreamingConfig, "num_candidates"),
        "places": (1, 2**24),
    }


def train_streaming(settings: StreamingSettings) -> dict[str, Any]:
    """Write texts, read the states that enter the upper layers, train, and save the drafter to `output`.

    What is done already is not done again.

    Returns:
        The figures of `learner.acceptance` on texts that were held out, and `parameters`.

    Raises:
        SpeculationError: an argument out of range, bad data, a target that streams cannot join, or a loss that is not
            a number any more.
    """
    settings.check()
    if settings.mode == "tuned" and not settings.adapter_rank:
        raise SpeculationError("mode='tuned' needs adapter_rank of 1 or more, got 0: there would be nothing to tune")
    if settings.rotation and not settings.adapter_rank and not settings.map_rank:
        raise SpeculationError(
            f"rotation={settings.rotation} takes the place of stream embeddings and learns nothing; adapter_rank or "
            "map_rank must be 1 or more, got 0 and 0"
        )
    if settings.answers == "given" and not settings.data:
        raise SpeculationError("answers='given' needs data; name files with prompts and answers")
    folder, own = TrainingFolder.at(settings.output), settings.answers == "own"
    questions = settings.questions() if own else []
    with quiet(), interruptible("run the same command again to continue"):
        pair = settings.load()
        upper = Upper(pair.target, settings.num_layers)
        _try(settings, pair, upper)
        hold_to_target(folder, settings, pair)
        texts = own_texts(settings, pair, questions, folder.work) if own else given_texts(settings, pair)
        learned, held_out = halves(texts, settings.held_out, settings.seed)
        lessons = read_states(pair.target, upper, learned, folder.work / "states.bin", settings.places)
        examination = read_states(pair.target, upper, held_out, folder.work / "held_out.bin")
        drafter = beginning(settings, pair, upper, texts)
        pair.target.requires_grad_(False)
        learner = Learner(
            drafter.streams.float().requires_grad_(),
            upper,
            attention_windows(pair.target),
            settings.candidates,
            settings.mode == "tuned",
        )
        checkpoints = folder.checkpoints(*_told_apart_by(settings, learned))
        learn(settings, StreamTraining, learner, lessons, examination, collate, checkpoints)
        found = acceptance(learner, examination, settings.batch_size)
        drafter.config.acceptance, drafter.config.acceptance_sampled = found["acceptance"], found["acceptance_sampled"]
        drafter.streams.requires_grad_(False).to(torch.bfloat16)
        drafter.trained = True
        drafter.save_pretrained(settings.output, target=pair.target, tokenizer=pair.tokenizer)
        if settings.mode == "tuned":
            drafter.save_lora(folder.output / "lora", pair.target)
        found["parameters"] = sum(p.numel() for p in drafter.streams.parameters())
        folder.report(found, settings)
        return found


def beginning(settings: StreamingSettings, pair: Pair, upper: Upper, texts: Sequence[Text]) -> StreamingDrafter:
    """A drafter with streams as they are before their training."""
    target = pair.target
    vocab = upper.head.out_features
    known = 0 if settings.known_tokens >= vocab else settings.known_tokens
    special = special_tokens(pair, vocab, known) if known else []
    drafter = StreamingDrafter(
        mode=settings.mode,
        num_streams=settings.streams,
        num_layers=settings.num_layers,
        hidden_size=target.config.get_text_config(decoder=True).hidden_size,
        map_rank=settings.map_rank,
        adapter_rank=settings.adapter_rank,
        adapted=_adapted(settings, upper),
        rotation=settings.rotation,
        prune_rank=settings.prune_rank,
        known_tokens=known,
    )
    if known:
        drafter.streams.known.copy_(most_frequent(texts, vocab, known, special)[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        for name, module in drafter.streams.named_modules():
            if isinstance(module, nn.Linear) and name.endswith("down"):
                nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        if drafter.streams.embeddings is not None:
            nn.init.normal_(drafter.streams.embeddings, std=0.02)
    if settings.start_from is not None:
        _go_on_from(settings.start_from, drafter)
    return drafter


def _go_on_from(folder: str, drafter: StreamingDrafter) -> None:
    """Take over trained weights, the tokens that they know included.

    Raises:
        SpeculationError: other streams than these, or none.
    """
    found = Drafter.from_pretrained(folder)
    wanted = drafter.weights()
    if (
        not isinstance(found, StreamingDrafter)
        or {n: w.shape for n, w in found.weights().items()} != {n: w.shape for n, w in wanted.items()}
        or found.config.rotation != drafter.config.rotation
    ):
        raise SpeculationError(
            f"start_from={folder!r} holds a {type(found).__name__} of another shape; continue from streams that "
            "were trained with the same streams, num_layers, adapter_rank, adapt, map_rank, prune_rank, rotation and "
            "known_tokens"
        )
    drafter.load_weights(found.weights())


def _try(settings: StreamingSettings, pair: Pair, upper: Upper) -> None:
    """Two places with their streams, before hours of writing.

    Raises:
        SpeculationError: the target's layers do not take them.
    """
    if why := why_no_masks(pair.target):
        raise SpeculationError(
            f"streams see by masks of their own, and {type(pair.target).__name__} {why}; load it with "
            "attn_implementation sdpa"
        )
    try:
        streams = beginning(settings, pair, upper, [Text([0, 0], 1, 0.0, 0)]).streams.to(pair.target.dtype)
        size = pair.target.config.get_text_config(decoder=True).hidden_size
        states = torch.zeros(1, 2, size, dtype=pair.target.dtype, device=input_device(pair.target))
        batch = {"states": states, "at": torch.tensor([[0, 1]], device=states.device)}
        with torch.no_grad():
            Learner(streams.to(states.device), upper, attention_windows(pair.target), 1)(batch)
    except SpeculationError:
        raise
    except Exception as error:
        raise SpeculationError(
            f"streams cannot join the layers of {type(pair.target).__name__}: {shown(error)}; use another drafter"
        ) from error


def _adapted(settings: StreamingSettings, upper: Upper) -> dict[str, list[int]]:
    """The linear layers beside which adapters stand, with their sizes."""
    if not settings.adapter_rank:
        return {}
    found = {
        name: [linear.in_features, linear.out_features]
        for name, linear in upper.layers[0].named_modules()
        if isinstance(linear, nn.Linear)
    }
    if unknown := [name for name in settings.adapted if name not in found]:
        raise SpeculationError(
            f"adapt names {', '.join(unknown)}, which the target's layers do not have; they have {', '.join(found)}"
        )
    return {name: found[name] for name in settings.adapted or found}


def closing(settings: StreamingSettings, found: dict[str, Any]) -> Iterator[str]:
    """What the command says at its end."""
    yield f"held out: {said(found)}"
    yield f"{found['parameters'] / 1e6:.2f} M parameters, saved to {settings.output}; try it:"
    yield try_it(settings, "--drafter", settings.output)


def _told_apart_by(settings: StreamingSettings, learned: Sequence[Text]) -> list[Any]:
    """What one training's checkpoints have in common: its texts, and the settings that change its course."""
    chosen = [name for name in StreamingSettings.ranges if name not in ("own_prompts", "rows", "raw", "sampled")]
    chosen += ["adapted", "mode", "seed", "dtype", "start_from"]
    return [[text.ids for text in learned], *(getattr(settings, name) for name in chosen)]
