"""Grammars of real libraries over a small vocabulary, as logits processors. Where a library is missing its tests are
skipped."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

VOCAB = 97
PAD, BOS, EOS = 0, 1, 2
WORDS = ["name", "args", "true", "abc", "ab", '{"', '":', '", "', ' "', '"}', "}}", "</", "think", "thi", "12", ": "]
LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]:,"<>/ ._-|'
TOKENS = ["<pad>", "<s>", "</s>", *LETTERS, *WORDS]
TOKENS += [f"<{i}>" for i in range(len(TOKENS), VOCAB)]

CALL = r'\{"name": "(abc|abd|xyz)", "args": \{"x": [0-9]{1,3}, "y": "[a-z]{0,5}"\}\}'
REGEXES = {
    "a call": CALL,
    "a call behind free text": r"[a-z ]{3,9}</think>" + CALL,
    "one grammar after the other": r'(<a>\[[0-9]{2}\]</a>|<b>"[a-z]{1,3}"</b>){2,3}',
}


def text_of(ids: list[int]) -> str:
    return "".join(TOKENS[token] for token in ids if token not in (PAD, EOS))


@cache
def xgrammar_compiler(tokens: tuple[str, ...]) -> Any:
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo(list(tokens), vocab_size=len(tokens), stop_token_ids=[EOS])
    return xgrammar.GrammarCompiler(info)


def of_xgrammar(regex: str, tokens: list[str] = TOKENS) -> Any:
    compiler = xgrammar_compiler(tuple(tokens))
    from xgrammar.contrib.hf import LogitsProcessor

    return LogitsProcessor(compiler.compile_regex(regex))


LIBRARIES: dict[str, Callable[..., Any]] = {"xgrammar": of_xgrammar}
"""a new processor of each, of a regular expression over these tokens"""
