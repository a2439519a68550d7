"""`StreamingConfig`: the options of the streaming drafter."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ...budget import MOST_NODES
from ...config import DrafterConfig, ranged

MOST_STREAMS, MOST_CANDIDATES = 16, 16
WIDEST = 2**20
"""units of a layer that an adapter may stand beside"""


@strict
@dataclass(kw_only=True)
class StreamingOptions(DrafterConfig):
    """What a user may set of `StreamingDrafter`, which says what it means."""

    num_nodes: int | Literal["auto"] = ranged("auto", 0, MOST_NODES)
    num_candidates: int = ranged(4, 1, MOST_CANDIDATES)
    prune_below: float = ranged(0.0, 0, 1)
    copies: bool = True


@strict
@dataclass(kw_only=True)
class StreamingConfig(StreamingOptions):
    """All that is stored: these options, and what training writes of the streams."""

    drafter_type: ClassVar[str] = "streaming"

    mode: Literal["untouched", "tuned"] = "untouched"
    num_streams: int = ranged(4, 1, MOST_STREAMS)
    num_layers: int = ranged(1, 1, 1024)
    hidden_size: int = ranged(16, 1, WIDEST)
    map_rank: int = ranged(0, 0, 1024)
    adapter_rank: int = ranged(0, 0, 1024)
    adapted: dict = field(default_factory=dict)
    rotation: float = ranged(0.0, 0, 1)
    prune_rank: int = ranged(0, 0, 1024)
    known_tokens: int = ranged(0, 0, 2**24)
    acceptance: list = field(default_factory=list)
    acceptance_sampled: list = field(default_factory=list)

    def shares(self, do_sample: bool) -> list[list[float]]:
        """[γ][k] how often a candidate of a stream was right where all before it were, as training has measured it. A
        missing table is taken from the other kind of text; what both lack is guessed."""
        tables = [self.acceptance_sampled, self.acceptance]
        table: list[Any] = next(filter(None, tables if do_sample else reversed(tables)), [])
        shares = [[0.5 * 0.35**rank for rank in range(self.num_candidates)] for _ in range(self.num_streams)]
        for guessed, row in zip(shares, table, strict=False):
            guessed[: len(row)] = map(float, row[: len(guessed)])
        return shares

    def validate_adapted(self) -> None:
        for name, sizes in self.adapted.items():
            fine = isinstance(name, str) and isinstance(sizes, list) and len(sizes) == 2
            if not fine or not all(type(n) is int and 1 <= n <= WIDEST for n in sizes):
                raise ValueError(
                    f"adapted must name linear layers with their two sizes, such as "
                    f'{{"self_attn.q_proj": [576, 576]}}, got {name!r}: {sizes!r}'[:200]
                )

    def validate_acceptance(self) -> None:
        for name in ("acceptance", "acceptance_sampled"):
            table: list[Any] = getattr(self, name)
            rows = [row if isinstance(row, list) else [None] for row in table]
            numbers: list[Any] = [number for row in rows for number in row]
            if not all(type(number) in (int, float) and 0 <= number <= 1 for number in numbers):
                raise ValueError(f"{name} must hold a list of shares from 0 to 1 for each stream")
            if table and (len(table) != self.num_streams or len(numbers) > MOST_STREAMS * MOST_CANDIDATES):
                raise ValueError(f"{name} must have {self.num_streams} lists, one per stream, got {len(table)}")

    def validate_candidates(self) -> None:
        if 0 < self.known_tokens < self.num_candidates:
            raise ValueError(
                f"num_candidates must be at most known_tokens={self.known_tokens}, got {self.num_candidates}"
            )
