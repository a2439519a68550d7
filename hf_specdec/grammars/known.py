"""Which logits processors are grammars."""

from collections.abc import Callable
from typing import Any

from . import llguidance, outlines_core, xgrammar
from .grammar import Grammar

KNOWN: dict[str, tuple[Callable[[Any], Grammar | None], str, set[str]]] = {
    "xgrammar.contrib.hf.LogitsProcessor": (xgrammar.grammar, "__init__", {"matchers", "token_bitmask", "prefilled"}),
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": (xgrammar.in_outlines, "_setup", {"_matchers", "_bitmask"}),
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": (
        llguidance.grammar,
        "_setup",
        {"ll_matchers", "bitmask"},
    ),
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": (
        outlines_core.grammar,
        "_setup",
        {"_guides", "_bitmasks"},
    ),
}
"""by the names of their classes, since a subclass may do anything: who reads one, and which method sets what is read"""


def grammar_of(processor: Any) -> Grammar | None:
    """The grammar that a logits processor is; None of any other one, of one that was used before, and of versions that
    keep their matchers elsewhere."""
    kind = type(processor)
    if (known := KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")) is None:
        return None
    reader, method, names = known
    return reader(processor) if names <= set(getattr(kind, method).__code__.co_names) else None
