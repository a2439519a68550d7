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


def of_outlines_xgrammar(regex: str, tokens: list[str] = TOKENS) -> Any:
    backend = pytest.importorskip("outlines.backends.xgrammar")
    return backend.XGrammarLogitsProcessor(xgrammar_compiler(tuple(tokens)).compile_regex(regex), "torch")


class Words:
    """What llguidance asks a tokenizer for."""

    def __init__(self, tokens: tuple[str, ...]) -> None:
        self.tokens = [token.encode() for token in tokens]
        self.eos_token_id, self.bos_token_id, self.special_token_ids = EOS, BOS, [PAD, BOS, EOS]

    def __call__(self, text: str | bytes) -> list[int]:
        """The longest tokens."""
        left, found = text.encode() if isinstance(text, str) else text, list[int]()
        while left:
            found.append(
                max((i for i in range(3, len(self.tokens)) if left.startswith(self.tokens[i])), key=self._size)
            )
            left = left[self._size(found[-1]) :]
        return found

    def _size(self, token: int) -> int:
        return len(self.tokens[token])


@cache
def llguidance_tokenizer(tokens: tuple[str, ...]) -> Any:
    llguidance = pytest.importorskip("llguidance")
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Words(tokens)))


def of_llguidance(regex: str, tokens: list[str] = TOKENS) -> Any:
    backend = pytest.importorskip("outlines.backends.llguidance")
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_regex(regex)
    return backend.LLGuidanceLogitsProcessor(grammar, llguidance_tokenizer(tuple(tokens)), "torch")


def of_outlines_core(regex: str, tokens: list[str] = TOKENS) -> Any:
    backend = pytest.importorskip("outlines.backends.outlines_core")
    from outlines_core import Index, Vocabulary

    vocabulary = Vocabulary(EOS, {token: [i] for i, token in enumerate(tokens) if i > EOS})
    return backend.OutlinesCoreLogitsProcessor(Index(regex, vocabulary), "torch")


LIBRARIES: dict[str, Callable[..., Any]] = {
    "xgrammar": of_xgrammar,
    "xgrammar in outlines": of_outlines_xgrammar,
    "llguidance": of_llguidance,
    "outlines-core": of_outlines_core,
}
"""a new processor of each, of a regular expression over these tokens"""
