"""The result file. It is written whole after every prompt, so a stopped run keeps what it measured."""

import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ...errors import SpeculationError
from ...stats import SpeculationStats

SCHEMA = 2


@dataclass(kw_only=True)
class Measurement:
    """A prompt (all turns of a conversation) or a batch of them, decoded by a method in one repetition."""

    dataset: str
    prompt: int
    """index of the prompt, or of the batch, in its file"""
    batch_size: int
    temperature: float
    method: str
    repeat: int
    stats: SpeculationStats
    """counts, and times by the meter"""
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
            stats=self.stats + later.stats,
            same_text=None if self.same_text is None else bool(self.same_text and later.same_text),
            difference=self.difference or later.difference,
            peak_memory_bytes=max(self.peak_memory_bytes, later.peak_memory_bytes),
        )

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return vars(self) | {"stats": vars(self.stats)}

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> "Measurement":
        """What JSON holds; its names are texts, where ours are positions and widths."""
        told = dict(row["stats"])
        for name in ("drafted_per_position", "accepted_per_position", "verify_widths", "seconds_by_width"):
            told[name] = {int(key): value for key, value in told[name].items()}
        counters: dict[str, Any] = {
            f.name: Counter(told[f.name]) for f in fields(SpeculationStats) if f.default_factory is Counter
        }
        return cls(**row | {"stats": SpeculationStats(**told | counters)})


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
        except (KeyError, TypeError, ValueError) as error:
            raise SpeculationError(f"{path} is damaged or edited: {error}; measure again") from error
