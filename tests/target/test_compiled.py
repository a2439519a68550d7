"""Models that their user compiled: torch compiles for few shapes, whatever is drafted."""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import models
import pytest
import torch
from captured_calls import DRAFTERS, decode
from torch import Tensor

import hf_specdec
from hf_specdec import PromptLookupDrafter
from hf_specdec.errors import SpeculationWarning
from hf_specdec.target.buffers import WIDTHS
from hf_specdec.target.compiled import compiles, uncompiled

NEW = 200
WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "forward": lambda model, backend: setattr(model, "forward", torch.compile(model.forward, backend=backend)),
    "module": lambda model, backend: model.compile(backend=backend),
}


class Compiled:
    """A model that is compiled, and how often that was done."""

    def __init__(self, way: str = "forward", model: Any = None) -> None:
        torch._dynamo.reset()
        self.graphs, self.model = 0, model or models.llama()
        WAYS[way](self.model, self._counted)

    def _counted(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


@functools.cache
def plain(*lengths: int) -> tuple[Tensor, int]:
    """The text, and how often plain decoding compiles for it."""
    compiled = Compiled()
    return decode(compiled.model, None, list(lengths), max_new_tokens=NEW), compiled.graphs


@pytest.fixture(autouse=True)
def no_limit_is_met() -> Iterator[None]:
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", [[9], [9, 5, 7]], ids=["one row", "uneven rows"])
@pytest.mark.parametrize("name", ["lookup", "hybrid"])
def test_what_is_compiled_is_padded_to_few_widths(name: str, lengths: list[int], way: str) -> None:
    text, most = plain(*lengths)
    compiled, drafter = Compiled(way), DRAFTERS[name](models.llama(seed=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeculationWarning)
        assert torch.equal(decode(compiled.model, drafter, lengths, max_new_tokens=NEW), text)
    widths = drafter.last_stats.verify_widths
    stairs = {next(width for width in WIDTHS if width >= met) for met in widths}
    assert len(widths) > 1 < compiled.graphs <= most + len(stairs)


@pytest.mark.parametrize(
    ("lengths", "more"),
    [([9], {"speculation": {"forwards": "eager"}}), ([9, 5, 7], {"output_hidden_states": True})],
    ids=["eager", "hidden states"],
)
def test_what_cannot_be_padded_is_not_compiled(lengths: list[int], more: dict[str, Any]) -> None:
    """Beside the prompt and steps of one token, as those of plain decoding."""
    text, compiled = plain(*lengths)[0], Compiled()
    said = {"return_dict_in_generate": True, "max_new_tokens": NEW} | more
    with pytest.warns(SpeculationWarning, match="is compiled, and drafts are verified by its uncompiled forward"):
        answer = decode(compiled.model, PromptLookupDrafter(), lengths, **said)
    assert torch.equal(answer.sequences, text) and compiled.graphs <= 5


def test_a_draft_model_may_be_compiled() -> None:
    (text, _), compiled = plain(9), Compiled(model=models.llama(seed=1))
    drafter = DRAFTERS["fixed"](compiled.model)
    assert torch.equal(decode(models.llama(), drafter, [9], max_new_tokens=NEW), text)
    assert compiled.graphs <= len(WIDTHS)


def test_rows_that_come_and_go_are_padded_too() -> None:
    compiled = Compiled()
    texts = [decode(models.llama(), None, [n], max_new_tokens=50) for n in (9, 4, 7)]
    with hf_specdec.BatchDecoder(compiled.model, PromptLookupDrafter(), max_rows=2) as decoder:
        answers = [
            decoder.submit(models.prompts([n])["input_ids"], max_new_tokens=50, do_sample=False) for n in (9, 4, 7)
        ]
        for n, answer, text in zip((9, 4, 7), answers, texts, strict=True):
            assert answer.result() == text[0, n:].tolist()
    assert compiled.graphs < torch._dynamo.config.recompile_limit


@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_found_below_what_was_compiled(way: str) -> None:
    compiled, inputs = Compiled(way), models.prompts([9])
    bare = uncompiled(compiled.model)
    assert compiles(compiled.model) and not compiles(bare) and bare.model is compiled.model.model
    assert torch.equal(bare(**inputs).logits, models.llama()(**inputs).logits) and not compiled.graphs
    assert uncompiled(bare) is bare
