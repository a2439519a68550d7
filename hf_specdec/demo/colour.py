"""A generated text with its history: what was drafted and accepted, what was rejected, what the target put in.

As in Figure 1 of Leviathan 2023: accepted tokens green, rejected ones red, the target's own blue. Where there is no
colour, rejected tokens stand in [-...-] and the target's own in {+...+}.
"""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ..instruments.recording import Round
from ..showing.marks import marked

STYLES = {"prompt": "dim", "accepted": "green", "rejected": "red strike", "own": "bold blue"}
MARKS = {"prompt": ("", ""), "accepted": ("", ""), "rejected": ("[-", "-]"), "own": ("{+", "+}")}


def legend(console: Console) -> Text:
    """What the colours, or the marks, mean."""
    words = {
        "accepted": "drafted and accepted",
        "rejected": "drafted and rejected",
        "own": "the target's own: a correction, or the bonus token",
    }
    return Text("   ").join(_styled(console, kind, text) for kind, text in words.items())


def painted(
    console: Console, tokenizer: PreTrainedTokenizerBase, prompt: str, new: Sequence[int], rounds: Sequence[Round]
) -> Text:
    """The prompt and its continuation.

    Args:
        new: tokens of the whole continuation.
        rounds: what was drafted, round by round; before them comes the prefill's token, after them undrafted ones.
    """
    text = Text()
    text.append(_styled(console, "prompt", prompt))
    for kind, piece in _pieces(tokenizer, new, rounds):
        text.append(_styled(console, kind, piece))
    return text


def _pieces(
    tokenizer: PreTrainedTokenizerBase, new: Sequence[int], rounds: Sequence[Round]
) -> Iterator[tuple[str, str]]:
    """(kind, text) of every token, in the order in which they came up."""
    at = 1
    yield "own", text_of(tokenizer, [], new[:at])
    for r in rounds:
        yield "accepted", text_of(tokenizer, new[:at], r.tokens[: r.accepted])
        at += r.accepted
        own = r.tokens[r.accepted :]
        if r.rejected is not None and own:
            yield "rejected", text_of(tokenizer, new[:at], [r.rejected]).replace("\n", "⏎")
        yield "own", text_of(tokenizer, new[:at], own)
        at += len(own)
    yield "own", text_of(tokenizer, new[:at], new[at:])


def text_of(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that tokens add after others: word pieces, spaces and parts of a character depend on them."""
    known = tokenizer.decode(list(before), skip_special_tokens=True).rstrip("\ufffd")
    return tokenizer.decode([*before, *tokens], skip_special_tokens=True).removesuffix("\ufffd")[len(known) :]


def _styled(console: Console, kind: str, text: str) -> Text:
    return marked(console, text, STYLES[kind], MARKS[kind])
