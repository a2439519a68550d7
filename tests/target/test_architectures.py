"""Greedy text equals plain decoding's, token for token in float32, for every architecture, drafter and batch.

The default run takes a few cells of the grid for every architecture; `-m slow` takes all of them.
A part of `docs/models.md` is written by a test: `WRITE_DOCS=1 pytest tests/target/test_architectures.py -k page`.
"""

import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import toy_drafters as drafters
import transformers
from close_drafts import nearly

import hf_specdec
from hf_specdec.target.probe import Support, support

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- written by tests/target/test_architectures.py -->\n"
END = "<!-- end of test_architectures.py -->\n"
NEW_TOKENS = 24
BATCHES = {"one row": [7], "four uneven rows": [9, 5, 1, 7]}
DRAFTERS: dict[str, Callable[[Any, drafters.Future, int], hf_specdec.Drafter]] = {
    "oracle": lambda model, future, gamma: drafters.oracle(future, gamma),
    "adversary": lambda model, future, gamma: drafters.adversary(future, gamma, models.VOCAB),
    "noisy copy": lambda model, future, gamma: drafters.noisy(future, gamma, models.VOCAB),
    "tree": lambda model, future, gamma: drafters.bushy(future, gamma, models.VOCAB),
    "background": lambda model, future, gamma: drafters.Background(
        drafters.noisy(future, gamma, models.VOCAB).function
    ),
    "own runner": lambda model, future, gamma: drafters.FromForward(gamma),
    "draft model": lambda model, future, gamma: hf_specdec.DraftModelDrafter(nearly(model), num_draft_tokens=gamma),
}
FEW = [  # drafter, batch, gamma
    ("oracle", "one row", 9),
    ("adversary", "four uneven rows", 1),
    ("noisy copy", "four uneven rows", 5),
    ("tree", "one row", 5),
    ("tree", "four uneven rows", 5),
    ("draft model", "four uneven rows", 5),
]
ALL = [(drafter, batch, gamma) for drafter in DRAFTERS for batch in BATCHES for gamma in (1, 5, 9)]
CELLS = [(name, attention) for name in models.ARCHITECTURES for attention in ("eager", "sdpa")]


@cache
def target(name: str, attention: str) -> Any:
    try:
        return models.build(name, attention)
    except ValueError:
        return None


@cache
def plain(name: str, attention: str, batch: str) -> torch.Tensor:
    prompts = models.prompts(BATCHES[batch])
    return target(name, attention).generate(**prompts, max_new_tokens=NEW_TOKENS, do_sample=False)


def speculate(name: str, attention: str, kind: str, batch: str, gamma: int) -> tuple[torch.Tensor, Any]:
    """The text, and the statistics (None where this model decodes plainly)."""
    model = target(name, attention)
    drafter = DRAFTERS[kind](model, drafters.Future(plain(name, attention, batch)), gamma)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hf_specdec.errors.SpeculationWarning)
        text = model.generate(
            **models.prompts(BATCHES[batch]), max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=drafter
        )
    return text, drafter.last_stats


def check(name: str, attention: str, cells: list[tuple[str, str, int]]) -> None:
    model = target(name, attention)
    if model is None:
        pytest.skip(f"{name} has no {attention} attention")
    for kind, batch, gamma in cells:
        if kind == "draft model" and support(model) < Support.LOCKSTEP:
            continue  # a draft that cannot roll back is refused
        text, _ = speculate(name, attention, kind, batch, gamma)
        assert torch.equal(text, plain(name, attention, batch)), f"{kind}, {batch}, γ={gamma}"


@pytest.mark.grid
@pytest.mark.parametrize(("name", "attention"), CELLS)
def test_greedy_text_is_plains(name: str, attention: str) -> None:
    check(name, attention, FEW)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention"), CELLS)
def test_greedy_text_is_plains_on_the_whole_grid(name: str, attention: str) -> None:
    check(name, attention, ALL)


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_the_text_is_varied(name: str) -> None:
    """A text that loops would hide errors."""
    new = plain(name, "eager", "four uneven rows")[:, -NEW_TOKENS:].tolist()
    assert sum(len(set(row)) for row in new) / len(new) >= 6


# ------------------------------------------------------------------ the page in the docs


def mode(name: str, attention: str, batch: str) -> str:
    """How a model runs: ragged, staggered, lockstep or plain."""
    _, stats = speculate(name, attention, "oracle", batch, 5)
    if stats is None:
        return "plain"
    return "state" if support(target(name, attention)) is Support.STATE else str(stats.mode)


def table() -> str:
    """A line for each way of running, the commonest first, with all architectures that run so."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in models.ARCHITECTURES:
        answers = {
            (mode(name, a, "one row"), mode(name, a, "four uneven rows")): a
            for a in ("sdpa", "eager")
            if target(name, a) is not None
        }
        for way, attention in answers.items():
            found.setdefault(way, []).append(name if len(answers) == 1 else f"{name} ({attention})")
    return as_lines(found)


def as_lines(found: dict[tuple[str, str], list[str]]) -> str:
    lines = []
    for (one, four), names in sorted(found.items(), key=lambda way: -len(way[1])):
        trees = "-" if one == "plain" else "yes" if four == "ragged" else "first branch"
        lines.append(f"| {one} | {four} | {trees} | {', '.join(names)} |")
    return "\n".join(lines)


def section() -> str:
    """What the page says between the two marks."""
    version = ".".join(transformers.__version__.split(".")[:2])
    return f"""
| one row | four uneven rows | trees | architectures |
|---|---|---|---|
{table()}

These {len(models.ARCHITECTURES)} decoder-only architectures are tested with transformers {version}. Greedy text in
float32 equals plain decoding's, token for token, with {len(DRAFTERS)} kinds of draft: always right, always wrong,
noisy, a tree, drafted in the background, from the target's own forward, from a draft model; windows of 1, 5 and 9; one
row and four uneven rows; eager and SDPA attention.

"""


def test_the_page_is_up_to_date() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    shown, after = rest.split(END)
    if os.environ.get("WRITE_DOCS"):
        shown = section()
        PAGE.write_text(before + BEGIN + shown + END + after)
    if ".".join(transformers.__version__.split(".")[:2]) not in shown:
        pytest.skip("the page is about another transformers")
    assert shown == section()


def test_all_required_architectures_run_faster_than_plainly() -> None:
    for name in models.REQUIRED:  # an oracle of 5 tokens a round
        _, stats = speculate(name, "eager", "oracle", "four uneven rows", 5)
        assert stats is not None, name
        assert stats.target_calls <= 1 + -(-NEW_TOKENS // 6), name
