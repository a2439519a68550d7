"""`StreamingConfig`: the options of the streaming drafter."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ...budget import MOST_NODES
from ...config import DrafterConfig, option, ranged

MOST_STREAMS, MOST_CANDIDATES = 16, 16
WIDEST = 2**20
"""units of a layer that an adapter may stand beside"""


@strict
@dataclass(kw_only=True)
class StreamingConfig(DrafterConfig):
    """Options of `StreamingDrafter`, and what training writes of the streams."""

    drafter_type: ClassVar[str] = "streaming"

    num_nodes: int | Literal["auto"] = ranged(
        "auto", 0, MOST_NODES, 'drafted tokens per round, the likeliest ones. "auto" drafts those that pay'
    )
    num_candidates: int = ranged(4, 1, MOST_CANDIDATES, "k, tokens tried per stream")
    prune_below: float = ranged(
        0.0,
        0,
        1,
        "chance below which nodes leave in mid-forward. Their parent gives it, by the streams' pruning map; 0 for none",
    )
    copies: bool = option(
        True,
        "whether what followed the same words before joins the tree. On a CPU so does what the target found likely "
        "there; on an accelerator rounds that have something to copy read from it twice",
    )

    mode: Literal["untouched", "tuned"] = option(
        "untouched",
        '"untouched" where adapters act on streams only, "tuned" where the target learned with them (see `tune`)',
        trained=True,
    )
    num_streams: int = ranged(4, 1, MOST_STREAMS, "streams, γ: tokens drafted behind the next one", trained=True)
    num_layers: int = ranged(1, 1, 1024, "upper layers that the streams run through, N_s", trained=True)
    hidden_size: int = ranged(16, 1, WIDEST, "H, of the target", trained=True)
    map_rank: int = ranged(0, 0, 1024, "rank η of the map that begins the streams; 0 is the identity", trained=True)
    adapter_rank: int = ranged(0, 0, 1024, "rank of the adapters beside linear layers; 0 for none", trained=True)
    adapted: dict = option(  # noqa: RUF009  (a field)
        {}, "names of these linear layers within each layer, with their sizes [in, out]", trained=True
    )
    rotation: float = ranged(0.0, 0, 1, "value rotation ε in radians; 0 for stream embeddings instead", trained=True)
    prune_rank: int = ranged(0, 0, 1024, "rank θ of the pruning map; 0 for none", trained=True)
    known_tokens: int = ranged(
        0,
        0,
        2**24,
        "how many tokens the streams foretell, those that the target writes most often; 0 for all",
        trained=True,
    )
    acceptance: list = option(  # noqa: RUF009
        [],
        "γ lists of k shares, how often a candidate of a stream was right in greedy text where all before it were",
        trained=True,
    )
    acceptance_sampled: list = option([], "likewise in text at temperature 1", trained=True)  # noqa: RUF009

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
