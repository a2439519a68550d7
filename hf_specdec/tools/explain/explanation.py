"""What is known of a generation once it is taken apart."""

from dataclasses import dataclass, field
from typing import Annotated

from typer import Option

from ...drafters.pearl import Timeline
from ...stats import SpeculationStats
from ..instruments.audit import Difference
from ..instruments.meter import Meter
from ..instruments.recording import Round
from ..loading.checks import check_new_tokens, check_prompt, check_seed, check_temperature
from ..loading.drafters import DrafterSettings


@dataclass(kw_only=True)
class ExplainSettings(DrafterSettings):
    """What to explain."""

    prompt: Annotated[str, Option(help="Text to continue.")]
    output: Annotated[
        list[str],
        Option(
            "--output",
            "--html",
            "--timeline",
            help="File to write: a page (.html) or a picture of when each model was busy (.png, .svg, .pdf); or a "
            "folder for both. May be given several times.",
        ),
    ] = field(default_factory=list)
    max_new_tokens: Annotated[int, Option(help="New tokens, at most.")] = 128
    temperature: Annotated[float, Option(help="Sampling temperature; 0 is greedy.")] = 0.0
    seed: Annotated[int, Option(help="Seed of sampling.")] = 0

    def check(self) -> None:
        """
        Raises:
            SpeculationError: an argument out of range.
        """
        check_prompt(self.prompt)
        check_new_tokens(self.max_new_tokens)
        check_temperature(self.temperature)
        check_seed(self.seed)


@dataclass
class Candidate:
    """A token and how likely a model found it."""

    text: str
    prob: float


@dataclass
class Rejection:
    """A drafted token that the target replaced."""

    round: int
    position: int
    """of the new token, from 0"""
    drafted: str
    replaced_by: str
    target_top: list[Candidate]
    draft_top: list[Candidate]
    """empty for drafters without a model"""
    wasted_tokens: int
    wasted_seconds: float


@dataclass
class TokenInfo:
    """A token as it is shown."""

    text: str
    kind: str
    """first (the prefill's), accepted, rejected, own (the target's in place of a rejected one, or its bonus), dropped
    (drafted after a rejection)"""
    p: float | None
    """the target's probability of it"""
    q: float | None
    """the draft's"""


@dataclass
class TreeNode:
    """A node of a drafted tree as it is shown."""

    text: str
    parent: int
    kind: str
    """accepted, rejected, pruned, dropped"""
    estimate: float | None


@dataclass
class Explanation:
    """All that the pages show."""

    settings: ExplainSettings
    lines: list[list[TokenInfo]]
    """the prefill's token, a line per round, and what the target wrote alone where the drafter was given up"""
    trees: list[list[TreeNode]]
    """of each line, where its draft was a tree"""
    rounds: list[Round]
    rejections: list[Rejection]
    """the costliest first"""
    stats: SpeculationStats | None
    meter: Meter
    plain_meter: Meter
    timeline: Timeline
    new_tokens: int
    plain_tokens: int
    same_text: bool | None
    """None when sampling"""
    difference: Difference | None
    difference_texts: tuple[str, str] | None
