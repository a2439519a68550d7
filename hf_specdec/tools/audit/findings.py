"""The settings of an audit, and its findings."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from ...errors import SpeculationError, shown
from ..bench.methods import PLAIN, MethodSettings
from ..loading.checks import SEEDS, Range
from ..loading.rows import PROMPT_SOURCES

_extent: Any = partial(Option, rich_help_panel="How much is tested")
_served: Any = partial(Option, rich_help_panel="Servers, in place of a target (the key is OPENAI_API_KEY's)")


@dataclass(kw_only=True)
class AuditSettings(MethodSettings):
    """What to audit, and how hard to look."""

    target: Annotated[
        str, Option(help="Model to speed up: a folder, a Hub repo, a GGUF file, or smollm2; none with --server.")
    ] = ""
    prompts: Annotated[str, Option(help=f"Prompts: {PROMPT_SOURCES}.")]
    server: Annotated[
        str | None, _served(help="URL of a server with drafts, compatible with OpenAI's API: vLLM, llama.cpp, ...")
    ] = None
    without: Annotated[
        str | None,
        _served(
            help="URL of a server with the same model and no drafts; or a JSON object, which switches the drafts of "
            "--server off as part of a request."
        ),
    ] = None
    model: Annotated[str | None, _served(help="Model of the servers; by default the first that each names.")] = None
    timeout: Annotated[float, _served(help="Seconds that an answer may take."), Range(0.01)] = 60.0
    limit: Annotated[int, _extent(help="Take only this many prompts."), Range(1)] = 6
    max_new_tokens: Annotated[
        int, _extent(help="New tokens per prompt, at most; 8 or more, as texts are stopped in the middle."), Range(8)
    ] = 48
    samples: Annotated[
        int,
        _extent(help="Texts sampled of each of two prompts, with plain decoding and with each method; 50 or more."),
        Range(50),
    ] = 200
    temperature: Annotated[float, _extent(help="Temperature of these samples, above 0."), Range(0.01)] = 1.0
    raw: Annotated[bool, _extent("--raw", help="Continue chats as plain text, without the chat template.")] = False
    seed: Annotated[int, _extent(help="Seed of these samples."), SEEDS] = 0
    output: Annotated[Path | None, Option("--output", "--json", help="File (JSON) to write the findings to.")] = None

    def check(self) -> None:
        """Raise `SpeculationError` for what cannot be audited."""
        if find_spec("scipy") is None:
            raise SpeculationError("the audit needs scipy for its p-values; pip install 'hf-specdec[bench]'")
        super().check()
        if self.server is not None or self.without is not None:
            self.without_drafts()
            return
        if not self.target:
            raise SpeculationError("there is nothing to audit; name a --target, or a --server and what is --without")
        if not (self.drafters or self.baselines):
            raise SpeculationError("there is nothing to audit; name at least one --drafter or --baseline")
        if PLAIN in (self.baselines or []):
            raise SpeculationError(
                f"{PLAIN} decoding is what every method is compared with; name another --baseline or a --drafter"
            )

    def without_drafts(self) -> tuple[str, dict[str, Any]]:
        """The URL of the server without drafts, and fields that a request to it has.

        Raises:
            SpeculationError: what is said of servers does not fit together.
        """
        if self.server is None or self.without is None:
            raise SpeculationError(
                "--server (with drafts) and --without (URL of one without, or a JSON object that switches the drafts "
                "off in a request) go together; name both"
            )
        if self.target or self.drafters or self.baselines:
            raise SpeculationError("--server is audited alone; leave out --target, --drafter and --baseline")
        fields: dict[str, Any] = {}
        url = self.without
        if not url.startswith("http"):
            url = self.server
            try:
                fields = json.loads(self.without)
            except ValueError:
                fields = {}
            if not isinstance(fields, dict) or not fields:
                raise SpeculationError(
                    f"--without must be a URL such as http://localhost:8001, or a JSON object of request fields, got "
                    f"{shown(self.without)}"
                )
        for name, given in (("--server", self.server), ("--without", url)):
            if not given.startswith(("http://", "https://")):
                raise SpeculationError(f"{name} must be a URL such as http://localhost:8000, got {shown(given)}")
        if not fields and url.rstrip("/") == self.server.rstrip("/"):
            raise SpeculationError(
                f"--server and --without are both {url}; name two servers, or give JSON to --without"
            )
        return url, fields


@dataclass
class Finding:
    """The result of one test of one method."""

    test: str
    fine: bool
    """whether it found nothing wrong"""
    said: str
    """in a few words, for a table"""
    details: list[str] = field(default_factory=list)
    """in sentences: where, what, how far apart"""
    refused: bool = False
    """whether the method does not take such a call, and says so"""
    wrong: int = 0
    """texts that part for no reason, where it is about texts"""


@dataclass
class Report:
    """All findings about one method."""

    method: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def fine(self) -> bool:
        return all(found.fine for found in self.findings)

    @property
    def verdict(self) -> str:
        """In a sentence."""
        wrong = [found.test for found in self.findings if not found.fine]
        if wrong:
            return f"{self.method}: NOT the same as plain decoding ({', '.join(wrong)})"
        ties = any("tie" in found.said for found in self.findings)
        return f"{self.method}: the same as plain decoding" + (", up to near ties of rounding" if ties else "")


def of_texts(test: str, told: Sequence[tuple[bool, str] | None], allowed: int = 0) -> Finding:
    """What is found where texts should be the same.

    Args:
        told: of each text None where it is the same, else whether rounding explains it, and a sentence.
        allowed: texts that may part for no such reason.
    """
    parted = [found for found in told if found is not None]
    wrong, same = [said for fine, said in parted if not fine], len(told) - len(parted)
    ties = len(parted) - len(wrong)
    words = f"{same} of {len(told)} the same" + (f", {ties} near tie{'s' * (ties > 1)}" if ties else "")
    return Finding(test, len(wrong) <= allowed, words, [said for _, said in parted], wrong=len(wrong))
