"""`drafter_type` → drafter class. A name from a config or a repo only ever indexes this table."""

from typing import Any, ClassVar, TypeVar

from torch import Tensor

from ..config import DrafterConfig
from ..errors import SpeculationError, meant


class Storable:
    """What the Hub knows of a drafter: its options, and its weights if it has any."""

    config_class: ClassVar[type[DrafterConfig]] = DrafterConfig
    """what its options are, and its `drafter_type`"""
    needs_draft_model: ClassVar[bool] = False
    """whether the constructor's first argument is a draft model, kept as `draft_model`"""
    takes_draft_model: ClassVar[bool] = False
    """whether it may be one, or None; what needs one takes one"""
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
