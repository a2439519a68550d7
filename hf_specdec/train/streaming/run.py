"""`hf-specdec train streaming`: the target writes texts, and streams in its upper layers learn to foretell them."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from typer import Option

from ...drafters import Drafter, StreamingDrafter
from ...drafters.streaming import StreamingConfig, Upper
from ...errors import SpeculationError, shown
from ...options import help_of, range_of
from ...target.attention import why_no_masks
from ...target.devices import input_device
from ...target.masks import attention_windows
from ...tools.loading.checks import Range
from ...tools.loading.models import Pair
from ..learning import Training
from ..own_text import OwnTextSettings, special_tokens, training_option
from ..writing import Text, most_frequent
from .learner import Learner, StreamTrainer

_streams: Any = partial(Option, rich_help_panel="The streams")
_of = partial(help_of, StreamingConfig)


def _in(name: str) -> Range:
    return Range(*range_of(StreamingConfig, name))


@dataclass(kw_only=True)
class StreamingSettings(OwnTextSettings):
    """Arguments of the command."""

    mode: Annotated[
        Literal["untouched", "tuned"],
        Option(help="untouched leaves the target's text as it is; tuned also trains its upper layers on the texts."),
    ] = "untouched"
    streams: Annotated[int, _streams(help=_of("num_streams")), _in("num_streams")] = 4
    num_layers: Annotated[int, _streams(help=_of("num_layers")), _in("num_layers")] = 8
    adapter_rank: Annotated[int, _streams(help=_of("adapter_rank")), _in("adapter_rank")] = 16
    adapted: Annotated[
        list[str],
        _streams(
            "--adapt",
            help="Linear map to adapt, such as self_attn.q_proj; may be given several times. Default: all.",
        ),
    ] = field(default_factory=list)
    map_rank: Annotated[int, _streams(help=_of("map_rank")), _in("map_rank")] = 0
    prune_rank: Annotated[int, _streams(help=_of("prune_rank")), _in("prune_rank")] = 8
    rotation: Annotated[float, _streams(help=_of("rotation")), _in("rotation")] = 0.0
    known_tokens: Annotated[int, _streams(help=_of("known_tokens")), _in("known_tokens")] = 8192
    places: Annotated[
        int, training_option(help="Positions of each text trained on per epoch, drawn at random."), Range(1, 2**24)
    ] = 64
    candidates: Annotated[
        int, _streams(help="k: candidates per stream whose acceptance is measured."), _in("num_candidates")
    ] = 6
    epochs: Annotated[float, training_option(help="Times that each text is trained on."), Range(0.01, 1000)] = 3.0
    start_from: Annotated[
        str | None, _streams(help="Folder of streams of the same shape; their training is continued.")
    ] = None

    def check(self) -> None:
        """
        Raises:
            SpeculationError: an argument out of range, or some that do not go together.
        """
        super().check()
        if self.mode == "tuned" and not self.adapter_rank:
            raise SpeculationError("mode='tuned' needs adapter_rank of 1 or more, got 0: nothing would be tuned")
        if self.rotation and not self.adapter_rank and not self.map_rank:
            raise SpeculationError(
                f"rotation={self.rotation} takes the place of stream embeddings and learns nothing; adapter_rank or "
                "map_rank must be 1 or more, got 0 and 0"
            )


class _Reached(Exception):
    """The layers above need not be computed."""


class StreamingTraining(Training):
    """Streams in the target's upper layers."""

    trainer = StreamTrainer

    def __init__(self, settings: StreamingSettings, pair: Pair) -> None:
        super().__init__(settings, pair)
        self.upper = Upper(pair.target, settings.num_layers)
        self.reads = self.upper.first
        _try(settings, pair, self.upper)

    def begin(self, texts: Sequence[Text]) -> Learner:
        self.drafter = beginning(self.settings, self.pair, self.upper, texts)
        streams, windows = self.drafter.streams.float().requires_grad_(), attention_windows(self.pair.target)
        return Learner(streams, self.upper, windows, self.settings.candidates, self.settings.mode == "tuned")

    def read(self, ids: Tensor) -> Tensor:
        """M of the layer before the first with streams: the main stream stays the same for the whole training."""
        found: list[Tensor] = []

        def look(states: Tensor) -> None:
            found.append(states)
            raise _Reached

        with torch.no_grad(), self.upper.entering(look), suppress(_Reached):
            self.pair.target.base_model(input_ids=ids, use_cache=False)
        return found[0]

    def save(self, model: Learner, found: dict[str, Any]) -> dict[str, Any]:
        drafter, output, target = self.drafter, self.settings.output, self.pair.target
        drafter.config.acceptance, drafter.config.acceptance_sampled = found["acceptance"], found["acceptance_sampled"]
        drafter.streams.requires_grad_(False).to(torch.bfloat16)
        drafter.trained = True
        drafter.save_pretrained(output, target=target, tokenizer=self.pair.tokenizer)
        if self.settings.mode == "tuned":
            drafter.save_lora(Path(output) / "lora", target)
        return {"parameters": sum(p.numel() for p in drafter.streams.parameters())}


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
