"""A text on the console while it is written, with what was drafted, accepted and rejected in colour.

As in Figure 1 of Leviathan 2023: accepted tokens green, rejected ones red, the target's own blue.
"""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..explain.showing import KINDS
from ..instruments.recording import Round

STYLES = {"accepted": "green", "rejected": "red strike", "own": "bold blue"}
PATIENCE = 32
"""tokens that are held back until their round is known"""


class LiveText(BaseStreamer):
    """A streamer of `generate` that is also told the rounds of a `RecordingDrafter`.

    On a console without colours it prints the bare text: rejected tokens are left out.
    """

    def __init__(self, console: Console, tokenizer: PreTrainedTokenizerBase) -> None:
        self.console, self.tokenizer = console, tokenizer
        self.coloured = console.color_system is not None and not console.no_color
        self.written = Text()
        """all of it, in colours"""
        self.shown: list[int] = []
        self.pending: list[int] = []
        """tokens that were written but not shown yet, because their round is not known"""
        self.prompt_came = False

    def put(self, value: Any) -> None:
        """New tokens of row 0. The prompt comes first, and is not shown."""
        if not self.prompt_came:
            self.prompt_came = True
            return
        self.pending += value.flatten().tolist()
        if len(self.pending) > PATIENCE:  # the drafter was dropped, so no more rounds come
            self._show(self.pending, "own")
            self.pending = []

    def told(self, r: Round) -> None:
        """A round is over. Its tokens came last; what came before them is from the prompt's forward."""
        before = max(0, len(self.pending) - len(r.tokens))
        self._show(self.pending[:before], "own")
        known = len(r.tokens) - len(self.pending) + before
        self._show(r.tokens[known : r.accepted], "accepted")
        own = r.tokens[max(known, r.accepted) :]
        if r.rejected is not None and own:
            piece = text_of(self.tokenizer, self.shown, [r.rejected]).replace("\n", "⏎")
            self._print(piece, "rejected")
        self._show(own, "own")
        self.pending = []

    def end(self) -> None:
        self._show(self.pending, "own")
        self.pending, self.shown, self.prompt_came = [], [], False
        self.console.print()

    def _show(self, tokens: list[int], kind: str) -> None:
        self._print(text_of(self.tokenizer, self.shown, tokens), kind)
        self.shown += tokens

    def _print(self, text: str, kind: str) -> None:
        self.written.append(text, STYLES[kind])
        if text and (self.coloured or kind != "rejected"):
            self.console.print(Text(text, style=STYLES[kind] if self.coloured else ""), end="", soft_wrap=True)


def legend() -> Text:
    """What the colours mean."""
    return Text("   ").join(Text(KINDS[kind][-1], style=style) for kind, style in STYLES.items())


def text_of(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that tokens add after others: word pieces, spaces and parts of a character depend on them."""
    known = tokenizer.decode(list(before), skip_special_tokens=True).rstrip("\ufffd")
    return tokenizer.decode([*before, *tokens], skip_special_tokens=True).removesuffix("\ufffd")[len(known) :]
