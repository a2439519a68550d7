"""Greedy text equals plain decoding's for every causal language model of transformers (see `every_model`).

A part of `docs/models.md` is written by the last test: `WRITE_DOCS=1 pytest tests/target/test_every_model.py -m slow`.
"""

import os
from pathlib import Path

import every_model
import pytest
import transformers

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- written by tests/target/test_every_model.py -->\n"
END = "<!-- end of test_every_model.py -->\n"
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


def section(version: str, rows: list[tuple[str, str, str]], left_out: list[tuple[str, str]], new_tokens: int) -> str:
    """What the page says between the two marks."""
    return f"""
`AutoModelForCausalLM` of transformers {version} knows {len(rows) + len(left_out)} model types; {len(rows)} of them run
here, each built small from its own config class. Each decodes {new_tokens} new tokens with a noisy draft and with a
draft tree, for one row and for four uneven rows. Its greedy text in float32 equals plain decoding's, token for token.
A model with a recurrent state drafts in every round in this test; in use it drafts only while that pays.

| one row | four rows | types | model types |
|---|---|---:|---|
{ways(rows)}

Left out; brackets hold the type of the text model, the size, or the error of building the small model or of plain
`generate`:

| reason | model types |
|---|---|
{reasons(left_out)}

"""


def measured() -> str:
    """The section, of what is found now."""
    all_of_them = [every_model.outcome(kind) for kind in every_model.TYPES]
    rows = [(found.kind, found.modes["one row"], found.modes["four rows"]) for found in all_of_them if not found.reason]
    left_out = [(found.kind, found.reason) for found in all_of_them if found.reason]
    return section(VERSION, rows, left_out, every_model.NEW_TOKENS)


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    shown, after = rest.split(END)
    if os.environ.get("WRITE_DOCS"):
        shown = measured()
        PAGE.write_text(before + BEGIN + shown + END + after)
    if f"transformers {VERSION}" not in shown:
        pytest.skip("the page is about another transformers")
    assert shown == measured()
