"""`DrafterConfig`: the options of a drafter, checked on construction, stored as `config.json`."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from .errors import SpeculationError, shortened, shown

ConfigT = TypeVar("ConfigT", bound="DrafterConfig")

LONGEST_DRAFT = 512
"""tokens per row and round: what longer drafts cost, no acceptance pays"""


def ranged(default: Any, least: float, most: float, entries: int = 0) -> Any:
    """An option that is a number from `least` to `most`, or a list of at most `entries` of them.

    Where the option's type allows a word such as "auto", that is fine as well.
    """
    metadata = {"range": (least, most), "entries": entries}
    if entries:
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@strict
@dataclass(kw_only=True)
class DrafterConfig:
    """Base of every drafter's options; a subclass adds fields, `ranged` where they are numbers, and a `validate_*`
    method per rule over several of them.

    The two fields below are written by `save_pretrained` and read by `from_pretrained`; nobody sets them by hand.
    """

    drafter_type: ClassVar[str] = ""

    target: dict | None = None
    """What the drafter was made for: `{"name": ..., "vocab_size": ..., "hidden_size": ..., "tokenizer_hash": ...}`."""
    draft_model: dict | None = None
    """Where the draft model lives: `{"subfolder": ...}` of the same repo, `{"path": "../..."}` for one beside it, or
    `{"repo_id": ..., "revision": ...}`, perhaps with a "subfolder"."""

    def validate_each_range(self) -> None:
        for option in dataclasses.fields(self):
            if "range" in option.metadata:
                _check_range(option, getattr(self, option.name))

    @classmethod
    def options(cls) -> list[str]:
        """The names a user may set."""
        return [f.name for f in dataclasses.fields(cls) if f.name not in ("target", "draft_model")]

    @classmethod
    def from_options(cls: type[ConfigT], options: dict[str, Any]) -> ConfigT:
        """Build from a plain dict.

        Raises:
            SpeculationError: an unknown name, a wrong type, or a value out of range.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(options) - known):
            raise SpeculationError(
                f"unknown option {', '.join(map(repr, unknown))} for speculation_type={cls.drafter_type!r}; "
                f"its options are: {', '.join(cls.options()) or '(none)'}"
            )
        numbers = {f.name for f in dataclasses.fields(cls) if f.type is float}
        whole = {name: value for name, value in options.items() if name in numbers and type(value) is int}
        try:
            return cls(**options | {name: float(value) for name, value in whole.items() if abs(value) < 2**53})
        except StrictDataclassError as error:
            reason = " ".join(str(error.__cause__ or error).split())
        except RecursionError:  # from showing the value
            reason = "a value is nested too deep"
        raise SpeculationError(f"bad option for speculation_type={cls.drafter_type!r}: {shortened(reason)}")

    def to_dict(self) -> dict[str, Any]:
        """Every field that is set, as plain JSON values."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def chosen(self) -> dict[str, Any]:
        """The options alone, as plain JSON values: without what the drafter was made for and where its draft lies."""
        return {name: value for name, value in self.to_dict().items() if name in self.options()}

    def get_text_config(self, **_: Any) -> "SameVocabulary":
        """Asked by transformers' pipelines of whatever is passed as `assistant_model`."""
        return SameVocabulary()


def _check_range(option: "dataclasses.Field[Any]", value: Any) -> None:
    """The type was checked before: `value` is a number, a list of numbers, or a word that the type allows."""
    (least, most), entries = option.metadata["range"], option.metadata["entries"]
    if entries and len(value) > entries:
        raise ValueError(f"{option.name} must have at most {entries} entries, got {len(value)}")
    for number in value if entries else [value]:
        if not isinstance(number, str) and not least <= number <= most:  # NaN is in no range
            word = f', or "{option.default}"' if isinstance(option.default, str) else ""
            raise ValueError(f"{option.name} must be from {least} to {most}{word}, got {shown(number)}")


class SameVocabulary:
    """The text config of a drafter, for pipelines, which compare it with the target's to see whether a second tokenizer
    is needed. It never is: every field equals the target's. Whether the two fit is checked when `generate` is called.
    """

    def __getattr__(self, name: str) -> "SameVocabulary":
        return self

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def parse_options(spec: str) -> tuple[str, dict[str, Any]]:
    """`name:key=value,...` → name and options; values are JSON where they can be, else text."""
    name, _, rest = spec.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise SpeculationError(f"cannot read {part!r} in {spec!r}; write options as name:key=value,key=value")
        try:
            options[key.strip()] = json.loads(value)
        except ValueError:
            options[key.strip()] = value
    return name, options
