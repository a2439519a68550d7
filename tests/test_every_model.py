"""Greedy text equals plain decoding's for every causal language model of transformers (see `every_model`).

`docs/every-model.md` is written by the last test: `WRITE_DOCS=1 pytest tests/test_every_model.py -m slow`.
"""

import os
from pathlib import Path

import every_model
import pytest
import transformers

PAGE = Path(__file__).parent.parent / "docs" / "every-model.md"
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


def page() -> str:
    all_of_them = [every_model.outcome(kind) for kind in every_model.TYPES]
    built = [found for found in all_of_them if not found.reason]
    rows = "\n".join(f"| {found.kind} | {found.modes['one row']} | {found.modes['four rows']} |" for found in built)
    left_out = "\n".join(f"| {found.kind} | {found.reason} |" for found in all_of_them if found.reason)
    return f"""# Every causal model of transformers

All {len(all_of_them)} types that `AutoModelForCausalLM` of transformers {VERSION} knows, each built tiny from its own
config class: {len(built)} of them run. Each was given a noisy draft and a tree, one row and four uneven ones, and
{every_model.NEW_TOKENS} new tokens: the greedy text in float32 is plain decoding's, token for token, in every cell.
[What the words mean](architectures.md). Recurrent models here draft in every round, whether it pays or not.

| model type | one row | four rows |
|---|---|---|
{rows}

## Left out

With the reason: a type whose text model has its own line above, one that cannot be built small from its config alone,
and one that plain `generate` itself does not run.

| model type | reason |
|---|---|
{left_out}

Compare all of them, and write this page:

```
pytest tests/test_every_model.py -m slow
WRITE_DOCS=1 pytest tests/test_every_model.py -m slow -k page
```
"""


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    if os.environ.get("WRITE_DOCS"):
        PAGE.write_text(page())
    if f"transformers {VERSION}" not in PAGE.read_text():
        pytest.skip("the page is about another transformers")
    assert PAGE.read_text() == page()
