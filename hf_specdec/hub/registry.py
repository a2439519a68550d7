"""`drafter_type` → drafter class. A name from a config or a repo only ever indexes this table."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor

from ..config import DrafterConfig
from ..errors import SpeculationError, meant, shown
from .draft import load_draft
from .files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SPECULATORS_TYPE = "speculators_model_type"
"""the field of a `config.json` by which the package `speculators` names a kind of heads"""


class Storable:
    """What the Hub knows of a drafter: its options, and its weights if it has any."""

    config_class: ClassVar[type[DrafterConfig]] = DrafterConfig
    """what its options are, and its `drafter_type`"""
    needs_draft_model: ClassVar[bool] = False
    """whether the constructor's first argument is a draft model, kept as `draft_model`"""
    takes_draft_model: ClassVar[bool] = False
    """whether it may be one, or None; what needs one takes one"""
    published_as: ClassVar[Sequence[str]] = ()
    """what `speculators` calls such draft models"""
    config: DrafterConfig
    """the options that it was made with"""
    trained_on: str | None = None
    """a sentence on its training, for the model card"""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.takes_draft_model = cls.takes_draft_model or cls.needs_draft_model

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """
        Args:
            arguments: a draft model, for those that take one.
            options: see `config_class`.
        """

    @staticmethod
    def takes(model: object) -> bool:
        """Whether a model drafts only over a target's states, and this drafter is for it."""
        return False

    @classmethod
    def reads(cls, content: dict[str, Any]) -> bool:
        """Whether a `config.json` of others, which is not `speculators`', describes a draft model for this drafter."""
        return False

    @classmethod
    def load_model(cls, folder: Path, **loading: Any) -> "PreTrainedModel":
        """Such a model, from its folder; options as of `load_draft`."""
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        """Weights of its own to save (a draft model is not among them)."""
        return {}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Take over saved weights, names and shapes already checked against `weights()`."""


DrafterT = TypeVar("DrafterT", bound=type[Storable])

_drafters: dict[str, type[Storable]] = {}


def register_drafter(drafter_class: DrafterT) -> DrafterT:
    """Class decorator: make a drafter known by its config's `drafter_type`."""
    _drafters[drafter_class.config_class.drafter_type] = drafter_class
    return drafter_class


def drafter_types() -> list[str]:
    """The registered names, sorted."""
    return sorted(_drafters)


def reader_of(content: dict[str, Any]) -> type[Storable] | None:
    """The class for the draft model that a `config.json` of others describes; None where there is none.

    Raises:
        SpeculationError: it names a kind of `speculators` that is not known.
    """
    if (named := content.get(SPECULATORS_TYPE)) is None:
        return next((known for known in _drafters.values() if known.reads(content)), None)
    kinds = {kind: known for known in _drafters.values() for kind in known.published_as}
    if not isinstance(named, str) or named not in kinds:
        raise SpeculationError(
            f"{SPECULATORS_TYPE} is {shown(named)}, which is not supported; known: {', '.join(sorted(kinds))}. "
            "Use another head"
        )
    return kinds[named]


def reader_for(model: Any) -> type[Storable] | None:
    """The class for a model that drafts only over a target's states; None for all others."""
    return next((known for known in _drafters.values() if known.takes(model)), None)


def load_model(folder: Path, **loading: Any) -> "PreTrainedModel":
    """The draft model in a folder, of whatever kind; options as of `load_draft`."""
    reader = reader_of(read_json(folder, "config.json"))
    return load_draft(folder, **loading) if reader is None else reader.load_model(folder, **loading)


def drafter_class(drafter_type: str) -> type[Storable]:
    """The class registered under a name.

    Raises:
        SpeculationError: no such drafter.
    """
    if drafter_type not in _drafters:
        known = [*drafter_types(), "none"]
        raise SpeculationError(
            f"unknown speculation_type {drafter_type!r}{meant(drafter_type, known)}; known: {', '.join(known)}"
        )
    return _drafters[drafter_type]
