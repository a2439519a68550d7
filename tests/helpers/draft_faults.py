"""What may be wrong with a draft, by name, and the one warning that a call then gives."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import models
import torch
from compare import Sides
from toy_drafters import Draft

from hf_specdec import SpeculationWarning


def changed(draft: Draft, **fields: Any) -> Draft:
    return Draft(**{**vars(draft), **fields})


def fail(draft: Draft) -> Draft:
    raise RuntimeError("planted")


def stall(draft: Draft) -> Draft:
    time.sleep(0.05)
    return draft


FAULTS: dict[str, Callable[[Draft], Any]] = {
    "raises": fail,
    "stalls": stall,
    "no draft": lambda d: None,
    "ids too large": lambda d: changed(d, tokens=d.tokens + models.VOCAB),
    "ids far too large": lambda d: changed(d, tokens=d.tokens + 2**40),
    "negative ids": lambda d: changed(d, tokens=d.tokens - models.VOCAB),
    "one bad id": lambda d: changed(d, tokens=d.tokens.index_fill(1, torch.tensor([0]), -1)),
    "ids as floats": lambda d: changed(d, tokens=d.tokens.float() + 0.5),
    "ids as int32": lambda d: changed(d, tokens=d.tokens.int()),
    "too few rows": lambda d: changed(d, tokens=d.tokens[:-1]),
    "too many rows": lambda d: changed(d, tokens=torch.cat([d.tokens, d.tokens])),
    "one dimension": lambda d: changed(d, tokens=d.tokens.flatten()),
    "lengths too long": lambda d: changed(d, lengths=[n + 9 for n in d.lengths]),
    "lengths of too few rows": lambda d: changed(d, lengths=d.lengths[:-1]),
    "negative lengths": lambda d: changed(d, lengths=[-1] * len(d.lengths)),
    "lengths of a tensor": lambda d: changed(d, lengths=torch.tensor(d.lengths)),
    "NaN q": lambda d: changed(d, token_probs=torch.full(d.tokens.shape, float("nan"))),
    "infinite q": lambda d: changed(d, token_probs=torch.full(d.tokens.shape, float("inf"))),
    "negative q": lambda d: changed(d, token_probs=torch.full(d.tokens.shape, -0.5)),
    "q of 0": lambda d: changed(d, token_probs=torch.zeros(d.tokens.shape)),
    "q above 1": lambda d: changed(d, token_probs=torch.full(d.tokens.shape, 7.0)),
    "q of another shape": lambda d: changed(d, token_probs=torch.ones(len(d.lengths), 99)),
    "q as a list": lambda d: changed(d, token_probs=[[0.5]]),
    "parents after children": lambda d: changed(d, parents=torch.full(d.tokens.shape, 50)),
    "parents of another shape": lambda d: changed(d, parents=torch.zeros(1, 1)),
    "parents as floats": lambda d: changed(d, parents=torch.full(d.tokens.shape, -1.0)),
    "too many sources": lambda d: changed(d, sources=["x"] * (len(d.lengths) + 1)),
    "longer than asked for": lambda d: Draft.from_lists([[3] * 500] * len(d.lengths)),
    "columns beyond the lengths": lambda d: changed(d, tokens=torch.nn.functional.pad(d.tokens, (0, 30), value=-5)),
}


def run_with_one_warning(sides: Sides, drafter: Any, at_most: bool = False, **more: Any) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text = sides.run(assistant_model=drafter, **more)
    ours = [str(w.message) for w in caught if issubclass(w.category, SpeculationWarning)]
    assert len(ours) == 1 or (at_most and not ours), ours
    return text
