"""The settings of an audit, and its findings."""

from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from ...errors import SpeculationError
from ..bench.methods import PLAIN, MethodSettings
from ..loading.checks import SEEDS, Range
from ..loading.rows import PROMPT_SOURCES

_extent: Any = partial(Option, rich_help_panel="How much is tested")


@dataclass(kw_only=True)
class AuditSettings(MethodSettings):
    """What to audit, and how hard to look."""

    prompts: Annotated[str, Option(help=f"Prompts: {PROMPT_SOURCES}.")]
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
        if not (self.drafters or self.baselines):
            raise SpeculationError("there is nothing to audit; name at least one --drafter or --baseline")
        if PLAIN in (self.baselines or []):
            raise SpeculationError(
                f"{PLAIN} decoding is what every method is compared with; name another --baseline or a --drafter"
            )


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
