"""`DrafterConfig`: the options of a drafter, checked on construction, stored as `config.json`."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from .errors import SpeculationError

ConfigT = TypeVar("ConfigT", bound="DrafterConfig")


@strict
@dataclass(kw_only=True)
class DrafterConfig:
    """Base of every drafter's options; a subclass adds fields and a `validate_*` method per rule.

    The two fields below are written by `save_pretrained` and read by `from_pretrained`; nobody sets them by hand.
    """

    drafter_type: ClassVar[str] = ""

    target: dict | None = None
    """What the drafter was made for: `{"name": ..., "vocab_size": ..., "hidden_size": ..., "tokenizer_hash": ...}`."""
    draft_model: dict | None = None
    """Where the draft model lives: `{"repo_id": ..., "revision": ...}` or `{"subfolder": ...}`."""

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
        try:
            return cls(**options)
        except StrictDataclassError as error:
            reason = " ".join(str(error.__cause__ or error).split())
            raise SpeculationError(f"bad option for speculation_type={cls.drafter_type!r}: {reason}") from error

    def to_dict(self) -> dict[str, Any]:
        """Every field that is set, as plain JSON values."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

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
