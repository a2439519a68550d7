"""A server with drafts beside one without: the same texts, samples of one distribution, an end at the same place."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..loading.prompts import Prompt
from .client import AT_ONCE, Server, ServerError, at_once
from .findings import Finding, of_texts
from .said import Said, parting
from .samples import PLACES, SAMPLED_PROMPTS, Sample, of_samples

MOST_STOPS = 2
"""prompts on which every way to stop is tried"""
LENGTHS = (1, 2, 5)
STOP = 6
"""characters of a stop string"""
PIECES = re.compile(r"\s*\w+|\s*\W")
"""what is counted of texts without tokens"""


@dataclass
class Served:
    """The answers of both servers."""

    drafting: Server
    plainly: Server
    prompts: Sequence[Prompt]
    max_new_tokens: int

    def __post_init__(self) -> None:
        """
        Raises:
            ServerError: a server does not answer.
        """
        for server in (self.drafting, self.plainly):
            server.meet(self.prompts[0])
        self.before = self.drafting.drafted()
        self.told: list[int] = []
        """tokens drafted for greedy texts, where the server tells"""
        self.options: dict[str, Any] = {"temperature": 0, "max_tokens": self.max_new_tokens}
        alone = [[self.plainly.ask(prompt, **self.options) for _ in range(2)] for prompt in self.prompts]
        together = self._together(self.plainly)
        self.plain = [[*said, other] for said, other in zip(alone, together, strict=True)]
        """texts without drafts of each prompt: alone, again, and beside others"""
        if any(said.drafted for texts in self.plain for said in texts):
            raise ServerError(self.plainly, "drafts although it is --without drafts; start a second server for that")

    def findings(self, samples: int, temperature: float, seed: int) -> Iterator[Finding]:
        """Test by test."""
        again, beside = (
            of_texts(name, [self._told(number, said[place], said[:1]) for number, said in enumerate(self.plain)])
            for name, place in (("without drafts, again", 1), (f"without drafts, {AT_ONCE} at once", 2))
        )
        for found in (again, beside):
            yield _of_plain(found)
        yield self._guarded("greedy text", partial(self._texts, again, self._alone))
        yield self._guarded(f"greedy text, {AT_ONCE} at once", partial(self._texts, beside, self._together))
        yield self._guarded("stops at a stop string", partial(self._stops, self._strings))
        yield self._guarded("keeps to max_tokens", partial(self._stops, self._lengths))
        yield self._guarded("sampled distribution", partial(self._sampled, samples, temperature, seed))
        yield self._drafted("tokens drafted")

    def _guarded(self, name: str, test: Callable[[str], Finding]) -> Finding:
        """What the server with drafts fails at is wrong; that without them ends the audit."""
        try:
            return test(name)
        except ServerError as error:
            if error.server is self.plainly:
                raise
            return Finding(name, False, "failed", [str(error)])

    def _drafted(self, name: str) -> Finding:
        """Whether there was anything to audit."""
        known = self.drafting.drafted()
        count = sum(self.told) if self.told else None
        if known is not None and self.before is not None:
            count = known - self.before
        if count == 0:
            return Finding(name, True, "NONE", ["the server drafts nothing for these prompts, so nothing was tested"])
        return Finding(name, True, "it does not tell" if count is None else f"{count:,}")

    # ------------------------------------------------------------------ the same texts

    def _alone(self, server: Server) -> list[Said]:
        return [server.ask(prompt, **self.options) for prompt in self.prompts]

    def _together(self, server: Server) -> list[Said]:
        return at_once([partial(server.ask, prompt, **self.options) for prompt in self.prompts])

    def _texts(self, plainly: Finding, ask: Callable[[Server], list[Said]], name: str) -> Finding:
        """Texts with drafts, of which as many may part for no reason as those without them do."""
        texts = ask(self.drafting)
        self.told += [said.drafted for said in texts if said.drafted is not None]
        told = [self._told(number, said, self.plain[number]) for number, said in enumerate(texts)]
        found = of_texts(name, told, allowed=plainly.wrong)
        if found.fine and found.wrong:
            found.details.append(f"without drafts {plainly.wrong} of these texts part from themselves no less")
        return found

    def _told(self, number: int, said: Said, plain: Sequence[Said]) -> tuple[bool, str] | None:
        """Of a text whether rounding explains where it leaves the nearest of the plain ones, and a sentence; None where
        it is one of them."""
        partings = [parting(one, said) for one in plain]
        nearest = max(filter(None, partings), key=lambda found: found.place, default=None)
        if nearest is None or None in partings:
            return None
        return nearest.near_tie, f"prompt {number + 1} {nearest}"

    # ------------------------------------------------------------------ the same end

    def _stops(self, test: Callable[[int, str], Iterator[dict[str, Any]]], name: str) -> Finding:
        """A way to stop, on the first prompts that say enough."""
        texts = [said[0].text for said in self.plain]
        numbers = [number for number, text in enumerate(texts) if len(text) >= 4 * STOP][:MOST_STOPS]
        if not numbers:
            return Finding(name, True, "no text is long enough")
        wrong = [(number, self._ends(number, fields)) for number in numbers for fields in test(number, texts[number])]
        said = [f"prompt {number + 1}: {why}" for number, why in wrong if why]
        bad = len({number for number, why in wrong if why})
        return Finding(name, not bad, f"{len(numbers) - bad} of {len(numbers)}", said)

    def _strings(self, number: int, text: str) -> Iterator[dict[str, Any]]:
        """A piece from the middle of the text, which comes there for the first time."""
        fresh = [i for i in range(1, len(text) - STOP) if text.find(piece := text[i : i + STOP]) == i and piece.strip()]
        at = min(fresh, key=lambda i: abs(i - len(text) // 2), default=None)
        if at is not None:
            yield {"stop": [text[at : at + STOP]]}

    def _lengths(self, number: int, text: str) -> Iterator[dict[str, Any]]:
        for most in LENGTHS:
            yield {"max_tokens": most}

    def _ends(self, number: int, fields: dict[str, Any]) -> str:
        """What is wrong with the end of an answer; nothing where rounding explains it."""
        asked = self.options | fields
        plain, said = (server.ask(self.prompts[number], **asked) for server in (self.plainly, self.drafting))
        if _end(plain, asked) == _end(said, asked):
            return ""
        found = parting(plain, said)
        if (found is not None and found.near_tie) or self.plainly.ask(self.prompts[number], **asked) != plain:
            return ""
        return f"with {fields} it says {_shown(said)}; without drafts {_shown(plain)}"

    # ------------------------------------------------------------------ the same distribution

    def _sampled(self, samples: int, temperature: float, seed: int, name: str) -> Finding:
        """No seed is used twice: two samples, not one twice."""
        drawn = []
        for prompt in self.prompts[:SAMPLED_PROMPTS]:
            pair = []
            for server in (self.plainly, self.drafting):
                asked = {"temperature": temperature, "top_p": 1.0, "max_tokens": PLACES + 1}
                pair.append(at_once([partial(server.ask, prompt, **asked, seed=seed + i) for i in range(samples)]))
                seed += samples
            drawn.append(pair)
        texts = [said for pair in drawn for sample in pair for said in sample]
        if len({said.text for said in texts}) <= len(drawn):
            why = f"the servers say one text at temperature {temperature:g}, whatever the seed: nothing was drawn"
            return Finding(name, True, "nothing was drawn", [why])
        tokens = all(said.tokens for said in texts)
        numbers: dict[str, int] = {}

        def places(said: Said) -> tuple[int, ...]:
            pieces = said.tokens if tokens else tuple(PIECES.findall(said.text))
            pieces = (*pieces, *[""] * PLACES)[1 : PLACES + 1]  # the first comes from the prompt's forward, undrafted
            return tuple(numbers.setdefault(piece, len(numbers)) for piece in pieces)

        cells: list[tuple[Sample, Sample]] = [
            (list(map(places, plain)), list(map(places, said))) for plain, said in drawn
        ]
        return of_samples(cells, "tokens" if tokens else "words")


def _of_plain(found: Finding) -> Finding:
    """Of the server without drafts no text is wrong: it may not be the same twice."""
    if found.fine:
        return found
    return Finding(found.test, True, f"{found.said}: not deterministic", found.details)


def _end(said: Said, asked: dict[str, Any]) -> tuple[Any, ...]:
    """What must be the same of two answers; the tokens that are counted, too, where only their number ends a text."""
    return said.text, said.finish, None if "stop" in asked else said.count


def _shown(said: Said) -> str:
    tokens = "" if said.count is None else f", {said.count} tokens"
    return f"{said.text!r} ({said.finish}{tokens})"
