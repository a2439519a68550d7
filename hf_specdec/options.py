"""An option is described once, as a field of a config: default, range, meaning. Constructors, tables and cards are made
from that."""

import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any, Literal, get_args, get_origin

from .errors import shown


def option(default: Any, help: str = "", *, trained: bool = False, **metadata: Any) -> Any:
    """An option of a config: a word, a truth value, a list or a dict.

    Args:
        default: its value where none is given.
        help: what it means, without its default and range. The first sentence stands in model cards.
        trained: whether training writes it, and nobody else.
        metadata: more of the field.
    """
    metadata |= {"help": help, "trained": trained}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def ranged(default: Any, least: float, most: float, help: str = "", *, entries: int = 0, trained: bool = False) -> Any:
    """An option that is a number from `least` to `most`, or a list of at most `entries` of them.

    Where the option's type allows a word such as "auto", that is fine as well. `help` and `trained` are as of `option`.
    """
    return option(default, help, trained=trained, range=(least, most), entries=entries)


def check_range(option: "Field[Any]", value: Any) -> None:
    """The type was checked before: `value` is a number, a list of numbers, or a word that the type allows.

    Raises:
        ValueError: it is out of range.
    """
    if "range" not in option.metadata:
        return
    (least, most), entries = option.metadata["range"], option.metadata["entries"]
    if entries and len(value) > entries:
        raise ValueError(f"{option.name} must have at most {entries} entries, got {len(value)}")
    for number in value if entries else [value]:
        if not isinstance(number, str) and not least <= number <= most:  # NaN is in no range
            word = f', or "{option.default}"' if isinstance(option.default, str) else ""
            raise ValueError(f"{option.name} must be from {least} to {most}{word}, got {shown(number)}")


def default_of(option: "Field[Any]") -> Any:
    """Its value where none is given."""
    return option.default if option.default_factory is MISSING else option.default_factory()


def values_of(option: "Field[Any]") -> str:
    """The words and numbers that it may be, for readers; empty where its type says it all."""
    types = (option.type, *get_args(option.type))
    words = [as_written(word) for kind in types if get_origin(kind) is Literal for word in get_args(kind)]
    numbers = ["{} to {}".format(*option.metadata["range"])] if "range" in option.metadata else []
    return ", ".join([*words, *numbers])


def as_written(value: Any) -> str:
    """A value as a caller writes it."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def in_short(option: "Field[Any]") -> str:
    """The first sentence of what it means."""
    return str(option.metadata.get("help", "")).partition(". ")[0]


def help_of(config: Any, name: str) -> str:
    """What an option of a config means, as the `--help` of a command that sets it says."""
    option = _named(config, name)
    text, values = option.metadata["help"], values_of(option) if "range" in option.metadata else ""
    return f"{text[0].upper()}{text[1:]}" + (f" ({values})." if values else ".")


def range_of(config: Any, name: str) -> tuple[float, float]:
    """From where to where an option of a config goes."""
    least, most = _named(config, name).metadata["range"]
    return least, most


def _named(config: Any, name: str) -> "Field[Any]":
    return next(option for option in fields(config) if option.name == name)


def signature(constructor: Callable[..., None], options: "Sequence[Field[Any]]") -> inspect.Signature:
    """A constructor's, with these options in place of the `**options` that it passes on."""
    _, *own = inspect.signature(constructor).parameters.values()
    named = [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
    more = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default_of(each), annotation=each.type)
        for each in options
        if len(named) < len(own) and each.name not in [parameter.name for parameter in named]
    ]
    return inspect.Signature([*named, *more])


def section(options: "Sequence[Field[Any]]") -> str:
    """What options mean, as a part of a docstring; those that training writes come last, apart."""
    parts = []
    for title, trained in (("Options", False), ("Options that training writes", True)):
        if entries := [_entry(each) for each in options if is_trained(each) == trained]:
            parts.append("\n".join([f"{title}:", *entries]))
    return "\n\n".join(parts)


def is_trained(option: "Field[Any]") -> bool:
    """Whether training writes it, and nobody else."""
    return bool(option.metadata.get("trained"))


def _entry(option: "Field[Any]") -> str:
    facts = "; ".join(filter(None, [values_of(option), f"default {as_written(default_of(option))}"]))
    text = f"{option.name}: {option.metadata.get('help', '')} ({facts})"
    return textwrap.fill(text, 100, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
