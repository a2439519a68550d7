"""`Traits`: what a session says of itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..protocol import DraftContext, Feature
from ..session import DraftSession
from ..target.features import shared_kinds
from .checks import MOST_SUCCESSORS, expect, whole
from .fitting import MOST_FED

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Traits(NamedTuple):
    """What a session says of itself, as `DraftSession` explains it: read and checked once, when it is opened."""

    patience: float = 0.0
    weighs: bool = False
    features: tuple[Feature, ...] = ()
    likeliest: int = 0
    slots_per_token: int = 1
    drafts_early: bool = False


def traits_of(session: DraftSession, context: DraftContext) -> Traits:
    """
    Raises:
        Unfit, or whatever comes of reading something else.
    """
    patience = float(session.patience)
    expect(patience >= 0, "patience", "a number of seconds", session.patience)
    assert context.target is not None
    return Traits(
        patience,
        bool(session.weighs),
        _features(session.features, context.target),
        min(whole("likeliest", session.likeliest, 0, MOST_SUCCESSORS), context.vocab_size),
        whole("slots_per_token", session.slots_per_token, 1, MOST_FED),
        bool(session.drafts_early),
    )


def _features(names: Sequence[Feature], model: "PreTrainedModel") -> tuple[Feature, ...]:
    """What a session asks for of the target's forwards.

    Raises:
        Unfit: the model has no such hidden states, or does not tell such keys and values.
    """
    states = model.config.get_text_config(decoder=True).num_hidden_layers + 1
    shared = shared_kinds(model)
    fine = all(name in shared or (type(name) is int and -states <= name < states) for name in names)
    kinds = f", or keys of {' and '.join(shared)}" if shared else ""
    expect(fine, "features", f"hidden states from {-states} to {states - 1}{kinds}", names)
    return tuple(names)
