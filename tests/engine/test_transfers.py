"""One transfer a round: the host waits for the device once, whatever was drafted, and writes to it without waiting.

`docs/how-it-works.md` shows the table; `WRITE_DOCS=1 pytest tests/engine/test_transfers.py -k page` writes it.
"""

import os
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import models
import pytest
import torch
import transformers
from counted_rounds import BATCHES, DRAFTERS, VOCAB, allowed, rounds
from counting import Transfers

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works.md"
BEGIN, END = "<!-- counted by tests/engine/test_transfers.py -->\n", "<!-- end of what was counted -->\n"
BY_THE_CLOCK = (
    "pearl",
    "prompt_lookup",
    "prompt_lookup, 3 branches",
    "suffix",
    "ngram",
    "hybrid",
    "streaming",
    "streaming, copies",
    "streaming, pruned",
)
"""drafters whose rounds depend on measured times, and so do their counts"""


@pytest.fixture(scope="module")
def target() -> Any:
    return models.llama(VOCAB)


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_one_transfer_a_round(
    target: Any, kind: str, batch: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = rounds(target, kind, batch, do_sample, monkeypatch)
    assert len(counted) > 4
    for counts in counted:
        least, most = allowed(kind, batch, do_sample, counts["draft steps"])
        assert least <= counts["to_host"] <= most
        assert counts["waiting"] == 0


def test_the_counting_counts() -> None:
    x = torch.arange(4)
    with Transfers() as transfers:
        x.tolist(), x[1].item(), bool(x[0]), x[x > 1], x[[1, 2]], torch.tensor([1]), int(x[0])
    assert transfers.counts == {"to_host": 5, "waiting": 2}


# ------------------------------------------------------------------ the table in the docs


def cell(counted: list[Counter[str]]) -> str:
    """Reads and writes per round."""
    return f"{mean(c['to_host'] for c in counted):.1f} / {mean(c['to_device'] for c in counted):.1f}"


def versions() -> str:
    torch_, transformers_ = (".".join(m.__version__.split(".")[:2]) for m in (torch, transformers))
    return f"torch {torch_}, transformers {transformers_}"


def table(target: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines = [
        f"| drafter ({versions()}) | 1 row, greedy | 1 row, sampled | 4 rows, greedy | 4 rows, sampled |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind in DRAFTERS:
        cells = []
        for batch in BATCHES:
            for do_sample in (False, True):
                with monkeypatch.context() as patch:
                    cells.append(cell(rounds(target, kind, batch, do_sample, patch)))
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


@pytest.mark.eager  # the page says what is not captured
def test_the_page_is_up_to_date(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    shown, after = rest.split(END)
    lines = table(target, monkeypatch)
    if os.environ.get("WRITE_DOCS"):
        shown = "\n" + "\n".join(lines) + "\n\n"
        PAGE.write_text(before + BEGIN + shown + END + after)
    if versions() not in shown:
        pytest.skip("the page is about other versions")
    for line, found in zip(shown.strip().splitlines(), lines, strict=True):
        clock = line.startswith(tuple(f"| {kind} |" for kind in BY_THE_CLOCK))
        assert line == found or (clock and line.split("|")[1] == found.split("|")[1])
