"""`DrafterConfig`: the options of a drafter, checked on construction, stored as `config.json`."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from .errors import SpeculationError, shortened
from .options import check_range, option, ranged

__all__ = ["LONGEST_DRAFT", "DrafterConfig", "SameVocabulary", "option", "parse_options", "ranged"]

ConfigT = TypeVar("ConfigT", bound="DrafterConfig")

LONGEST_DRAFT = 512
"""tokens per row and round: what longer drafts cost, no acceptance pays"""


@strict
@dataclass(kw_only=True)
class DrafterConfig:
    """Base of every drafter's options; a subclass adds fields, `ranged` where they are numbers and `option` where not,
    and a `validate_*` method per rule over several of them.

    The two fields below are written by `save_pretrained` and read by `from_pretrained`; nobody sets them by hand.
    """

    drafter_type: ClassVar[str] = ""

    target: dict | None = None
    """What the drafter was made for: `{"name": ..., "vocab_size": ..., "hidden_size": ..., "tokenizer_hash": ...}`."""
    draft_model: dict | None = None
    """Where the draft model lives: `{"subfolder": ...}` of the same repo, `{"path": "../..."}` for one beside it, or
    `{"repo_id": ..., "revision": ...}`, perhaps with a "subfolder"."""

    def validate_each_range(self) -> None:
        for each in dataclasses.fields(self):
            check_range(each, getattr(self, each.name))

    @classmethod
    def fields(cls) -> "list[dataclasses.Field[Any]]":
        """The options: all fields but those two."""
        return [f for f in dataclasses.fields(cls) if f.name not in ("target", "draft_model")]

    @classmethod
    def options(cls) -> list[str]:
        """The options' names."""
        return [f.name for f in cls.fields()]

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
