"""What an audit is asked, and what it finds."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Option

from ..errors import SpeculationError
from ..loading.checks import check_new_tokens, check_seed, check_temperature
from ..loading.models import PairSettings

LEAST_SAMPLES = 50


@dataclass(kw_only=True)
class AuditSettings(PairSettings):
    """What to audit, and how hard to look."""

    prompts: Annotated[str, Option(help="JSON lines of a task or of chats, or text with a prompt per line.")]
    drafters: Annotated[
        list[str] | None,
        Option("--drafter", help="Folder, repo or type:key=value,... such as draft_model:num_draft_tokens=5."),
    ] = None
    baselines: Annotated[
        list[str] | None,
        Option("--baseline", help="transformers' own: hf-assisted, hf-confidence, hf-prompt-lookup."),
    ] = None
    limit: Annotated[int, Option(help="Prompts to take.")] = 6
    max_new_tokens: Annotated[int, Option(help="Tokens to generate, per prompt.")] = 48
    samples: Annotated[int, Option(help="Texts to draw of each of two prompts, plainly and with each method.")] = 200
    temperature: Annotated[float, Option(help="Of those draws.")] = 1.0
    raw: Annotated[bool, Option("--raw", help="Ask chats as texts, without the chat template.")] = False
    seed: Annotated[int, Option(help="Of the draws.")] = 0
    output: Annotated[Path | None, Option("--output", "--json", help="File (JSON) for what was found.")] = None

    def check(self) -> None:
        """Raise `SpeculationError` for what cannot be audited."""
        if find_spec("scipy") is None:
            raise SpeculationError("p-values need scipy; pip install 'hf-specdec[bench]', or scipy itself")
        check_new_tokens(self.max_new_tokens)
        check_temperature(self.temperature)
        check_seed(self.seed)
        if not (self.drafters or self.baselines):
            raise SpeculationError("there is nothing to audit; name --drafter or --baseline, one or several times")
        if self.limit < 1:
            raise SpeculationError(f"limit must be 1 or more, got {self.limit}")
        if self.max_new_tokens < 8:
            raise SpeculationError(f"max_new_tokens must be 8 or more, got {self.max_new_tokens}: texts need a middle")
        if self.temperature == 0:
            raise SpeculationError("temperature must be above 0, as samples are drawn, got 0")
        if self.samples < LEAST_SAMPLES:
            raise SpeculationError(f"samples must be {LEAST_SAMPLES} or more, got {self.samples}")


@dataclass
class Finding:
    """What one test says of one method."""

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
    """Of one method."""

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
            return f"{self.method}: NOT what plain decoding gives ({', '.join(wrong)})"
        ties = any("tie" in found.said for found in self.findings)
        return f"{self.method}: what plain decoding gives" + (", up to near ties of rounding" if ties else "")
