"""A batch that transformers' own assisted generation refuses: its error, and one hint at what serves batches."""

import warnings
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch

from hf_specdec import SpeculationWarning
from hf_specdec.generate import hook

HINT = r'assistant_model=draft, speculation_type="draft_model"'


@pytest.fixture(autouse=True)
def a_new_process() -> Iterator[None]:
    hook._hint_at_batches.cache_clear()
    yield
    hook._hint_at_batches.cache_clear()


def generate(lengths: list[int], **settings: Any) -> torch.Tensor:
    settings = {"assistant_model": models.llama(num_hidden_layers=1), "do_sample": False} | settings
    return models.llama().generate(**models.prompts(lengths) | {"max_new_tokens": 6} | settings)


@pytest.mark.parametrize(
    ("lengths", "settings"),
    [([3, 5], {}), ([5], {"num_return_sequences": 2, "do_sample": True})],
    ids=["rows", "texts"],
)
def test_transformers_error_comes_with_one_hint(lengths: list[int], settings: dict[str, Any]) -> None:
    with pytest.warns(SpeculationWarning, match=HINT), pytest.raises(ValueError, match="assisted generate"):
        generate(lengths, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeculationWarning)
        with pytest.raises(ValueError, match="assisted generate"):
            generate(lengths, **settings)


def test_what_the_hint_says_works() -> None:
    plain = generate([3, 5], assistant_model=None)
    assert torch.equal(generate([3, 5], speculation_type="draft_model"), plain)


@pytest.mark.parametrize(
    ("lengths", "settings", "error"),
    [
        ([5], {}, None),
        ([3, 5], {"assistant_model": None}, None),
        ([5], {"max_new_tokens": -1}, "max_new_tokens"),
        ([3, 5], {"assistant_model": None, "max_new_tokens": -1}, "max_new_tokens"),
        ([3, 5], {"speculation_type": "prompt_lookup"}, "without a model"),
    ],
)
def test_no_hint_where_it_would_not_help(lengths: list[int], settings: dict[str, Any], error: str | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeculationWarning)
        if error is None:
            generate(lengths, **settings)
        else:
            with pytest.raises(ValueError, match=error):
                generate(lengths, **settings)
