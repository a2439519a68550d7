"""Greedy text equals plain decoding's for every causal language model of transformers (see `every_model`).

`docs/every-model.md` is written by the last test: `WRITE_DOCS=1 pytest tests/target/test_every_model.py -m slow`.
"""

import os
from pathlib import Path

import every_model
import pytest
import transformers

PAGE = Path(__file__).parents[2] / "docs" / "every-model.md"
VERSION = ".".join(transformers.__version__.split(".")[:2])
FEW = ["bamba", "deepseek_v4", "gpt_neo", "llama", "moshi", "nemotron_h", "recurrent_gemma"]


def identical(kind: str) -> None:
    found = every_model.outcome(kind)
    if found.reason:
        pytest.skip(found.reason)
    assert not found.faults


@pytest.mark.parametrize("kind", FEW)
def test_greedy_text_is_plains_for_a_few(kind: str) -> None:
    identical(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", every_model.TYPES)
def test_greedy_text_is_plains(kind: str) -> None:
    identical(kind)


def ways(rows: list[tuple[str, str, str]]) -> str:
    """A line of the table for each way of running, the commonest first, with all model types that run so.

    Args:
        rows: model type, its mode with one row and with four.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for kind, one, four in rows:
        found.setdefault((one, four), []).append(kind)
    ranked = sorted(found.items(), key=lambda way: -len(way[1]))
    return "\n".join(f"| {one} | {four} | {len(kinds)} | {', '.join(kinds)} |" for (one, four), kinds in ranked)


def reasons(rows: list[tuple[str, str]]) -> str:
    """A line for each reason to leave model types out, the commonest first; what a reason adds stands in brackets.

    Args:
        rows: model type and reason.
    """
    found: dict[str, list[str]] = {}
    for kind, reason in rows:
        head, _, detail = reason.partition(": ")
        detail = detail.removeprefix("see ").rstrip(":")
        found.setdefault(head, []).append(f"{kind} ({detail})" if detail else kind)
    ranked = sorted(found.items(), key=lambda reason: -len(reason[1]))
    return "\n".join(f"| {head} | {', '.join(kinds)} |" for head, kinds in ranked)


def page(version: str, rows: list[tuple[str, str, str]], left_out: list[tuple[str, str]], new_tokens: int) -> str:
    return f"""# Every causal model of transformers

This page lists how each causal model of transformers {version} runs with a drafter. `AutoModelForCausalLM` knows
{len(rows) + len(left_out)} model types; {len(rows)} of them run here, each built small from its own config class.

Each of the {len(rows)} decodes {new_tokens} new tokens with a noisy draft and with a draft tree, for one row and for
four uneven rows. Its greedy text in float32 equals plain decoding's, token for token. [Architectures](architectures.md)
explains the modes and shows how to check a model of your own.

| one row | four rows | types | model types |
|---|---|---:|---|
{ways(rows)}

In this test a model with a recurrent state drafts in every round. In use it drafts only while that pays.

## Left out

Brackets hold the type of the text model, the size, or the error. Errors come from building the small model or from
plain `generate`.

| reason | model types |
|---|---|
{reasons(left_out)}

## Run it

In the clone's `.venv`:

```sh
pytest tests/target/test_every_model.py -m slow
WRITE_DOCS=1 pytest tests/target/test_every_model.py -m slow -k page
```

The first command compares all types, the second writes this page.
"""


def measured() -> str:
    """The page, of what is found now."""
    all_of_them = [every_model.outcome(kind) for kind in every_model.TYPES]
    rows = [(found.kind, found.modes["one row"], found.modes["four rows"]) for found in all_of_them if not found.reason]
    left_out = [(found.kind, found.reason) for found in all_of_them if found.reason]
    return page(VERSION, rows, left_out, every_model.NEW_TOKENS)


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    if os.environ.get("WRITE_DOCS"):
        PAGE.write_text(measured())
    if f"transformers {VERSION}" not in PAGE.read_text():
        pytest.skip("the page is about another transformers")
    assert PAGE.read_text() == measured()
