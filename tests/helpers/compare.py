"""Plain decoding and ours, side by side."""

from inspect import isfunction
from typing import Any

import models
import torch
import toy_drafters as drafters
from torch import Tensor

import hf_specdec

PROMPTS = [9, 5, 1, 7]
NEW = 24


class Sides:
    """The same greedy call twice: without a drafter, and with one that is mostly right."""

    def __init__(self, model: Any, lengths: list[int] | None = None, gamma: int = 5, **settings: Any) -> None:
        """
        Args:
            settings: of both `generate` calls; a function is called for a fresh value each time.
        """
        self.model = model
        self.prompts = {name: ids.to(model.device) for name, ids in models.prompts(lengths or PROMPTS).items()}
        self.settings = {"max_new_tokens": NEW, "do_sample": False} | settings
        self.plain = self.run()
        future = drafters.Future(sequences_of(self.plain))
        self.drafter: Any = drafters.noisy(future, gamma, model.config.get_text_config().vocab_size)

    def run(self, **more: Any) -> Any:
        settings = {
            name: value() if isfunction(value) and name != "prefix_allowed_tokens_fn" else value
            for name, value in self.settings.items()
        }
        return self.model.generate(**self.prompts | settings | more)

    def ours(self, drafter: Any = None) -> Any:
        return self.run(assistant_model=drafter or self.drafter)

    @property
    def stats(self) -> hf_specdec.SpeculationStats:
        assert self.drafter.last_stats is not None, "it decoded plainly"
        return self.drafter.last_stats


def sequences_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.sequences


def uneven_eos(model: Any, lengths: list[int] | None = None, at: tuple[int, ...] = (4, 9)) -> list[int]:
    """End tokens that stop some rows early: what plain decoding says at these steps in the first rows."""
    new = Sides(model, lengths).plain[:, -NEW:]
    return [int(new[row, step]) for row, step in enumerate(at)]


def same_states(a: Any, b: Any) -> None:
    """Nested tuples of tensors of the same shapes and (up to rounding) the same values."""
    assert type(a) is type(b)
    if isinstance(a, (tuple, list)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same_states(x, y)
    elif isinstance(a, Tensor):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=2e-3, rtol=1e-3)
    else:
        assert a == b
