"""Clocks that tests put in the place of the package's own. None goes by what a forward takes on this machine."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transformers import PreTrainedModel

from hf_specdec import clock
from hf_specdec.engine import generation, paying, requests
from hf_specdec.generate import pricing
from hf_specdec.tools.instruments.forwards import input_shape, wrapped_forward

LAYER, TOKEN = 1e-3, 0.02
"""seconds per layer of a forward of one token, and the share of it that each further token takes"""
JUMP, LEAP = 1e-3, 0.5
"""seconds that a jumping clock moves on in the mean at each look, and once in a hundred looks"""


class Clock:
    """Stands still but for the forwards of models, each of which takes a set time per token that it is fed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(clock, "_read", lambda: self.now)

    def moved_by(self, model: Any, seconds: Callable[[int], float]) -> Any:
        def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.now += seconds(input_shape(args, kwargs)[1])
            return forward(*args, **kwargs)

        return wrapped_forward(model, around)


@contextmanager
def set_times() -> Iterator[None]:
    """A clock that forwards of all models move, by their layers and the tokens of a row."""
    seconds, inside, lock = 0.0, threading.local(), threading.Lock()

    def call(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        nonlocal seconds
        if getattr(inside, "model", False):  # a model that is a part of one
            return super(PreTrainedModel, model).__call__(*args, **kwargs)
        inside.model = True
        try:
            return super(PreTrainedModel, model).__call__(*args, **kwargs)
        finally:
            inside.model = False
            with lock:
                seconds += _layers(model) * LAYER * (1 + TOKEN * (_width(args, kwargs) - 1))

    with clock.use(lambda: seconds), pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedModel, "__call__", call, raising=False)
        yield


@contextmanager
def jumping(seed: int) -> Iterator[None]:
    """A clock that says nothing of what anything took."""
    draw, seconds, lock = random.Random(seed), 0.0, threading.Lock()

    def read() -> float:
        nonlocal seconds
        with lock:
            seconds += draw.expovariate(1 / (LEAP if draw.random() < 0.01 else JUMP))
            return seconds

    with clock.use(read):
        yield


@contextmanager
def adapting() -> Iterator[None]:
    """Within the block calls go by the clock, as with `adapt`: nothing is measured beforehand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pricing, "hinders", lambda *_: True)
        yield


def forget() -> None:
    """What other tests have shown of a target that this one uses, too, is nothing to go by."""
    for learned in (generation._costs, requests._costs, paying._records):
        learned._of.clear()
    pricing._known.clear()


def _layers(model: PreTrainedModel) -> int:
    return getattr(model.config.get_text_config(), "num_hidden_layers", None) or 1


def _width(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    try:
        return input_shape(args, kwargs)[1]
    except (IndexError, AttributeError):  # sounds, pictures
        return 1
