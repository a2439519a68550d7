"""Fields of a published `config.json`, written and checked. What is refused is told by its name; `Format.load` adds the
file's."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ...errors import SpeculationError, shown
from ...hub.registry import SPECULATORS_TYPE

FoundT = TypeVar("FoundT")
SPECULATORS_VERSION = "0.9.0"


def of_speculators(kind: str, num_tokens: int, target: str | None) -> dict[str, Any]:
    """What a config of `speculators` says of any head.

    Args:
        num_tokens: drafted per round.
        target: the model that verifies, a Hub repo or a folder; None leaves it open.
    """
    return {
        SPECULATORS_TYPE: kind,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }


def family(content: dict[str, Any], known: Mapping[str, FoundT]) -> FoundT:
    """Of what is known by `model_type`, what a config means.

    Raises:
        SpeculationError: it means something else.
    """
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        raise SpeculationError(
            f"the layers are of type {shown(kind)}, and only {' and '.join(known)} are supported; use another head"
        )
    return known[kind]


def nested(content: dict[str, Any], name: str) -> dict[str, Any]:
    """An object within a config; an empty one where there is none.

    Raises:
        SpeculationError: something else is there.
    """
    found = content.get(name, {})
    if not isinstance(found, dict):
        raise SpeculationError(f"{name} is {shown(found)}; it must be an object")
    return found


def layers(found: Any, name: str, count: int | None = None) -> list[int]:
    """Layers of the target.

    Args:
        count: how many there must be; None for any number.

    Raises:
        SpeculationError: that is no list of them.
    """
    numbers = isinstance(found, list) and all(type(one) is int and one >= 0 for one in found)
    if not numbers or not found or len(found) != (count or len(found)):
        many = "" if count is None else f"{count} of "
        raise SpeculationError(f"{name} is {shown(found)}; it must be a list of {many}the target's layers")
    return list(found)


def whole(found: Any, name: str, least: int, most: int) -> int:
    """A whole number.

    Raises:
        SpeculationError: it is none, or not from `least` to `most`.
    """
    if type(found) is not int or not least <= found <= most:
        raise SpeculationError(f"{name} is {shown(found)}; it must be a whole number from {least} to {most}")
    return found


def one_of(found: Any, name: str, known: Sequence[FoundT]) -> FoundT:
    """One of those that are known.

    Raises:
        SpeculationError: it is another one.
    """
    if found not in known:
        raise SpeculationError(f"{name} is {shown(found)}; known: {', '.join(map(str, known))}. Use another head")
    return known[known.index(found)]


def refuse(content: dict[str, Any], names: Sequence[str]) -> None:
    """Fields that say that the head is another one.

    Raises:
        SpeculationError: one of them is there, and neither null nor false.
    """
    for name in names:
        if content.get(name) not in (None, False):
            raise SpeculationError(f"{name} is {shown(content[name])}, which is not supported; use another head")
