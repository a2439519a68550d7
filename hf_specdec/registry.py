"""`drafter_type` → drafter class. A name from a config or a repo only ever indexes this table."""

from typing import TYPE_CHECKING, TypeVar

from .errors import SpeculationError

if TYPE_CHECKING:
    from .drafters.base import Drafter

DrafterT = TypeVar("DrafterT", bound="type[Drafter]")

_drafters: dict[str, "type[Drafter]"] = {}


def register_drafter(drafter_class: DrafterT) -> DrafterT:
    """Class decorator: make a drafter known by its config's `drafter_type`."""
    _drafters[drafter_class.config_class.drafter_type] = drafter_class
    return drafter_class


def drafter_types() -> list[str]:
    """The registered names, sorted."""
    return sorted(_drafters)


def drafter_class(drafter_type: str) -> "type[Drafter]":
    """The class registered under a name.

    Raises:
        SpeculationError: no such drafter.
    """
    if drafter_type not in _drafters:
        raise SpeculationError(f"unknown speculation_type {drafter_type!r}; known: {', '.join(drafter_types())}, none")
    return _drafters[drafter_type]
