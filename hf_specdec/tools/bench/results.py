"""The result file. It is written whole after every prompt, so a stopped run keeps what it measured."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ...errors import SpeculationError

SCHEMA = 1


@dataclass
class Times:
    """Seconds of one generation."""

    seconds: float
    """of the whole `generate` call"""
    prefill_seconds: float
    """in forwards over an empty cache, of target and draft"""
    draft_seconds: float
    """in the draft's other forwards"""
    verify_seconds: float
    """in the target's other forwards"""
    bare_seconds: float
    """what those other forwards take alone (`instruments.bare`)"""
    target_step_seconds: float | None
    """a bare forward of the target, one token per row; None where there was none"""
    draft_step_seconds: float | None


@dataclass
class Acceptance:
    """What one generation drafted and accepted."""

    draft_calls: int
    row_steps: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    acceptance_sum: float
    """Σ β where q is known, else accepted tokens; over `acceptance_count` it is α"""
    acceptance_count: int
    """positions at which the draft was put to the test"""

    @property
    def mean_length(self) -> float:
        """Tokens per verification, the target's own included; 1 for plain decoding."""
        return 1 + sum(self.accepted_per_position) / max(self.row_steps, 1)


@dataclass
class Measurement:
    """One generation: a prompt's turn (or those of a batch), a method, a repetition."""

    dataset: str
    prompt: int
    """index of the prompt, or of the batch, in its file"""
    batch_size: int
    temperature: float
    method: str
    repeat: int
    tokens: int
    """new tokens of all rows, without padding"""
    times: Times
    target_calls: int
    acceptance: Acceptance
    same_text: bool | None
    """greedy only: whether the tokens are plain decoding's"""
    difference: dict[str, Any] | None
    """the first place where they are not (`instruments.audit`)"""
    peak_memory_bytes: int
    turn: int = 0
    """of a conversation, from 0"""

    @property
    def unit(self) -> tuple[str, int, int, float]:
        """What is measured in one go."""
        return self.dataset, self.prompt, self.batch_size, self.temperature

    @property
    def seconds(self) -> float:
        return self.times.seconds

    def row(self) -> dict[str, Any]:
        """As it stands in a result file: times and acceptance on one level with all else."""
        row = asdict(self)
        times, acceptance = row.pop("times"), row.pop("acceptance")
        return row | times | acceptance

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> "Measurement":
        """The measurement of a result file's row."""
        own = dict(row)
        times = Times(**{f.name: own.pop(f.name) for f in fields(Times)})
        acceptance = Acceptance(**{f.name: own.pop(f.name) for f in fields(Acceptance)})
        return cls(times=times, acceptance=acceptance, **own)


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
        content = {"schema": SCHEMA} | vars(self) | {"measurements": [m.row() for m in self.measurements]}
        unfinished = path.with_name(path.name + ".part")
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
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
            measurements = [Measurement.of_row(row) for row in content["measurements"]]
            return cls(content["provenance"], measurements, content["runs"])
        except (KeyError, TypeError) as error:
            raise SpeculationError(f"{path} is damaged or edited: {error}; measure again") from error
