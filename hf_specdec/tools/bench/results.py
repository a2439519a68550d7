"""The result file. It is written whole after every prompt, so a stopped run keeps what it measured."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ...errors import SpeculationError

SCHEMA = 2


@dataclass(kw_only=True)
class Counts:
    """What generations came to: sums, which `+` adds up. Times are seconds."""

    tokens: int = 0
    """new tokens of all rows, without padding"""
    seconds: float = 0.0
    """of whole `generate` calls"""
    prefill_seconds: float = 0.0
    """in forwards over an empty cache, of target and draft"""
    draft_seconds: float = 0.0
    """in the draft's other forwards"""
    verify_seconds: float = 0.0
    """in the target's other forwards"""
    target_calls: int = 0
    draft_calls: int = 0
    row_steps: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    acceptance_sum: float = 0.0
    """Σ β where q is known, else accepted tokens; over `acceptance_count` it is α"""
    acceptance_count: int = 0
    """positions at which the draft was put to the test"""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{f.name: _added(getattr(self, f.name), getattr(other, f.name)) for f in fields(Counts)})

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verification, the target's own included; 1 for plain decoding."""
        return 1 + sum(self.accepted_per_position) / max(self.row_steps, 1)


def _added(a: Any, b: Any) -> Any:
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)] if isinstance(a, list) else a + b


@dataclass(kw_only=True)
class Measurement(Counts):
    """A prompt (all turns of a conversation) or a batch of them, decoded by a method in one repetition."""

    dataset: str
    prompt: int
    """index of the prompt, or of the batch, in its file"""
    batch_size: int
    temperature: float
    method: str
    repeat: int
    same_text: bool | None
    """greedy only: whether the tokens are plain decoding's"""
    difference: dict[str, Any] | None
    """the first place where they are not (`instruments.audit`)"""
    peak_memory_bytes: int

    @property
    def unit(self) -> tuple[str, int, int, float]:
        """What is measured in one go."""
        return self.dataset, self.prompt, self.batch_size, self.temperature

    def then(self, later: "Measurement") -> "Measurement":
        """Together with a later turn of the conversation."""
        return replace(
            self,
            **vars(self + later),
            same_text=None if self.same_text is None else bool(self.same_text and later.same_text),
            difference=self.difference or later.difference,
            peak_memory_bytes=max(self.peak_memory_bytes, later.peak_memory_bytes),
        )


@dataclass
class Results:
    """What a result file holds: `runs` are the figures, computed from `measurements` and nothing else."""

    provenance: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def save(self, path: str | Path) -> None:
        """Write the file anew, or leave the old one as it was.

        Raises:
            SpeculationError: it cannot be written (a full disk, a folder that is not there).
        """
        path = Path(path)
        unfinished = path.with_name(path.name + ".part")
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                json.dump({"schema": SCHEMA} | asdict(self), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            kept = f"; {path} still holds what was saved before" if path.exists() else ""
            raise SpeculationError(f"cannot write results to {path}: {error.strerror or error}{kept}") from error

    @classmethod
    def load(cls, path: str | Path) -> "Results":
        """Read a result file.

        Raises:
            SpeculationError: it cannot be read, or was not written by this version's `bench`.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise SpeculationError(f"cannot read results from {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise SpeculationError(f"{path} is not a result file of `hf-specdec bench`: {error}") from error
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise SpeculationError(f"{path} is not a result file with schema {SCHEMA}; measure again with this version")
        try:
            return cls(content["provenance"], [Measurement(**row) for row in content["measurements"]], content["runs"])
        except (KeyError, TypeError) as error:
            raise SpeculationError(f"{path} is damaged or edited: {error}; measure again") from error
