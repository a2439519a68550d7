"""Which logits processors are grammars."""

from collections.abc import Callable
from typing import Any

from . import xgrammar
from .grammar import Grammar

KNOWN: dict[str, Callable[[Any], Grammar | None]] = {
    "xgrammar.contrib.hf.LogitsProcessor": xgrammar.grammar,
}
"""by the names of their classes; a subclass may do anything"""


def grammar_of(processor: Any) -> Grammar | None:
    """The grammar that a logits processor is; None of any other one, and of one that was used before."""
    kind = type(processor)
    reader = KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if reader is None else reader(processor)
