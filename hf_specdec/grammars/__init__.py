"""Grammars of other libraries that hold a call's text to a form. Who uses one has imported it; nothing here does."""

from .grammar import Grammar, Matcher, Path, Text
from .known import grammar_of

__all__ = ["Grammar", "Matcher", "Path", "Text", "grammar_of"]
