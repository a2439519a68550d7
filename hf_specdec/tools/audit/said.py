"""What a server said, and where two such texts part: of the plain one the log probabilities tell how close that was."""

import re
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from ...errors import shown

NEAR_TIE = 0.5
"""nats that plain decoding's two candidates may be apart for a parting to be a near tie: four rounding steps of
bfloat16 at logits from 16 to 32"""
SHOWN = 24
"""characters of a text from the place where it parts"""
END = re.compile(r"<.+>|")
"""a token that ends a text, as servers write it"""


@dataclass(frozen=True)
class Said:
    """The text of one answer."""

    text: str
    finish: str | None = None
    """the reason why it ends: stop, length"""
    tokens: tuple[str, ...] = ()
    """as the server writes them; empty where it gives none"""
    likeliest: tuple[dict[str, float], ...] = field(default=(), compare=False)
    """log probabilities of the likeliest tokens in each place, the one that was said among them"""
    count: int | None = None
    """new tokens, as the server counts them"""
    drafted: int | None = field(default=None, compare=False)
    """tokens that were drafted for it, where the server tells (llama.cpp)"""

    @classmethod
    def read(cls, answer: Any) -> "Said":
        """Of an answer to `/v1/completions` or `/v1/chat/completions`.

        Raises:
            ValueError: it is no such answer.
        """
        try:
            choice = answer["choices"][0]
            message = choice.get("message")
            if message is None:
                text = choice["text"]
            else:
                thought = message.get("reasoning_content") or message.get("reasoning") or ""
                text = thought + (message.get("content") or "")
            tokens, likeliest = _tokens(choice.get("logprobs") or {})
            count = (answer.get("usage") or {}).get("completion_tokens")
            drafted = (answer.get("timings") or {}).get("draft_n")
            return cls(text, choice.get("finish_reason"), tokens, likeliest, count, drafted)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(shown(answer)) from error

    def same(self, other: "Said") -> bool:
        """Whether the tokens are the same, where both give them, else the text."""
        return self.tokens == other.tokens if self.tokens and other.tokens else self.text == other.text


def _tokens(logprobs: dict[str, Any]) -> tuple[tuple[str, ...], tuple[dict[str, float], ...]]:
    """Tokens, and the likeliest in each place: of chats, or as completions had them first."""
    if logprobs.get("content"):
        places = [
            (one["token"], one["logprob"], {each["token"]: each["logprob"] for each in one.get("top_logprobs") or []})
            for one in logprobs["content"]
        ]
    else:
        tokens = logprobs.get("tokens") or []
        tops = logprobs.get("top_logprobs") or [None] * len(tokens)
        own = logprobs.get("token_logprobs") or [None] * len(tokens)
        places = [(token, value, top or {}) for token, value, top in zip(tokens, own, tops, strict=True)]
    likeliest = ({token: value} | top if value is not None else top for token, value, top in places)
    return tuple(token for token, _, _ in places), tuple(likeliest)


@dataclass(frozen=True)
class Parting:
    """The first place where a text leaves plain decoding's."""

    place: int
    unit: str
    """token or character, counted from 0"""
    plain: str | None
    """what plain decoding says there; None where its text has ended"""
    other: str | None
    gap: float | None = None
    """nats between the log probabilities of both, without drafts; None where these are not told"""
    least: float | None = None
    """what the gap is at least, where the other token is none of the likeliest"""

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap is not None and self.gap <= NEAR_TIE

    def __str__(self) -> str:
        """A sentence without its subject."""
        place = f"parts at {self.unit} {self.place}"
        if self.plain is None or self.other is None:
            place = (
                f"{place}: {'it goes on' if self.plain is None else 'it ends'} there, and without drafts it does not"
            )
        else:
            place = f"{place}: {self.other!r} instead of {self.plain!r}"
        if self.gap is not None:
            verdict = "a near tie" if self.near_tie else "NOT a near tie"
            return f"{place}, {self.gap:.3f} nats apart without drafts: {verdict}"
        if self.least is not None:
            return f"{place}, more than {self.least:.3f} nats apart without drafts: NOT a near tie"
        return f"{place}; no log probabilities tell whether that is a near tie"


def parting(plain: Said, other: Said) -> Parting | None:
    """Where another text leaves plain decoding's; None where it does not."""
    if plain.same(other):
        return None
    place = _place(plain, other)
    if place is None:
        at = _common(plain.text, other.text)
        mine, theirs = (text[at : at + SHOWN] or None for text in (plain.text, other.text))
        return Parting(at, "character", mine, theirs)
    token = plain.tokens[place] if place < len(plain.tokens) else None
    known = plain.likeliest[place] if place < len(plain.likeliest) else {}
    said = _token(plain, other, place, known)
    if token is None or token not in known or len(known) < 2:
        return Parting(place, "token", token, said)
    if said in known:
        return Parting(place, "token", token, said, abs(known[token] - known[said]))
    return Parting(place, "token", token, said, least=known[token] - min(known.values()))


def _place(plain: Said, other: Said) -> int | None:
    """The token of the plain text; None where it has none, or they are not those of its text."""
    if not plain.tokens:
        return None
    if other.tokens and plain.tokens != other.tokens:
        return _common(plain.tokens, other.tokens)
    place, text = 0, ""
    for token in plain.tokens:
        if not other.text.startswith(text + token):
            break
        place, text = place + 1, text + token
    return place if plain.text.startswith(text) else None


def _token(plain: Said, other: Said, place: int, known: dict[str, float]) -> str | None:
    """What the other text says in this place: its token, else the one of the likeliest that it goes on with."""
    if other.tokens:
        return other.tokens[place] if place < len(other.tokens) else None
    rest = other.text[len("".join(plain.tokens[:place])) :]
    if not rest:
        ends = [token for token in known if END.fullmatch(token)] if other.finish == "stop" else []
        return max(ends, key=lambda token: known[token], default=None)
    mine = plain.tokens[place] if place < len(plain.tokens) else None
    fitting = [token for token in known if token and token != mine and rest.startswith(token)]
    return max(fitting, key=len, default=rest[:SHOWN])


def _common(one: Any, other: Any) -> int:
    """How many items two sequences begin alike with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
