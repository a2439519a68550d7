"""Which models' forwards can be captured: `why_not_captured` asks the model, and tries it."""

import logging
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from transformers import DynamicCache

from ..errors import shown
from . import near
from .captured import CapturedRunner
from .captured_cache import CapturedCache
from .compiled import compiles, uncompiled
from .devices import input_device
from .fingerprint import hooks, replaced
from .inputs import CACHE, as_when_decoding, ropes
from .probe import Support, support, why_not_over
from .remembered import Remembered
from .shelf import shelf_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

BY_ITSELF: tuple[str, ...] = ("cuda",)
"""kinds of devices on which forwards are captured unless something else is asked for"""

_refused: Remembered[str] = Remembered()
_by_distance: Remembered[bool] = Remembered()


def wants_captured(forwards: str, model: "PreTrainedModel") -> bool:
    """Whether forwards are to be captured if they can be. Those that are compiled are, on any device: for each shape
    torch compiles anew."""
    if forwards != "auto":
        return forwards in ("captured", "bitwise")
    # In float16 a rejected token can overflow, and what it leaves in static buffers is NaN even where it is masked.
    by_itself = compiles(model) or input_device(model).type in BY_ITSELF
    return by_itself and model.dtype != torch.float16


def is_captured(model: "PreTrainedModel", forwards: str) -> bool:
    """Whether a model's forwards are wanted to be captured, and can be."""
    return wants_captured(forwards, model) and support(model) is Support.RAGGED and not why_not_captured(model)


def why_not_captured(model: "PreTrainedModel") -> str:
    """What keeps this model's forwards from being captured, in words that go on from its name; empty if nothing."""
    if torch.is_autocast_enabled(input_device(model).type):
        return "runs under autocast"
    return _refused.of(model, lambda: hindered(model) or _fails(uncompiled(model)))


def hindered(model: "PreTrainedModel") -> str:
    """The same, as far as it can be said without a trial."""
    kinds = {rope.get("rope_type") for rope in ropes(model)} & {"dynamic", "longrope"}
    if kinds:
        return f"has rotary embeddings ({', '.join(sorted(map(str, kinds)))}) that depend on the length of the text"
    devices = {held.device for held in model.parameters()}
    if len(devices) > 1 or "meta" in {device.type for device in devices}:
        return "lies on several devices, or is offloaded"
    if any(hooks(module) or hasattr(module, "_hf_hook") for module in model.modules()):
        return "has hooks, which a replay would not call"
    if replaced(uncompiled(model)) is not None:
        return "has a forward that was replaced"
    if any(held.numel() and not held.data_ptr() for held in model.parameters()):
        return "has weights of a kind that does not say where they lie"
    return ""


def _fails(model: "PreTrainedModel") -> str:
    """The same, tried: over static buffers, and without values."""
    logger, unsaid = logging.getLogger("torch._subclasses.fake_tensor"), lambda record: False
    logger.addFilter(unsaid)
    try:
        differs = why_not_over(model, _Unrecorded)
        shelf_of(model).let_go()  # of the trial's
        if differs:
            return f"{differs}, over static buffers"
        _try_fake(model)
    except Exception as error:  # of a model, or of a kernel that knows no such tensors
        return f"has a forward that does not run without values: it raised {shown(error)}"
    finally:
        logger.removeFilter(unsaid)
    return ""


def sums_by_distance(model: "PreTrainedModel") -> bool:
    """Whether a model's attention is to sum in one order wherever in a tree a token stands; that it can is tried."""

    def tried() -> bool:
        try:
            return not why_not_over(model, _ByDistance)
        except Exception:  # it attends by a function of its own, for which masks have another shape
            return False
        finally:
            shelf_of(model).let_go()  # of the trial's

    return input_device(model).type in near.GATHERS and _by_distance.of(model, tried)


class _Unrecorded(CapturedRunner):
    """For a trial, whose buffers nobody sees again."""

    def _run(self, key: Hashable, step: Callable[[], T], rows: int, width: int, times: int = 1) -> T:
        return step()


class _ByDistance(_Unrecorded):
    sums_by_distance = True


def _try_fake(model: "PreTrainedModel") -> None:
    """A forward over tensors without values: whatever would read one raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports far more than all of this package

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), as_when_decoding(model), fake:
        device, cache = input_device(model), DynamicCache(config=model.config)
        ids = torch.zeros(1, 4, dtype=torch.long, device=device)
        kwargs = {CACHE: cache, "use_cache": True}
        model(input_ids=ids, position_ids=torch.arange(4, device=device)[None], **kwargs)
        runner = CapturedRunner(model, kwargs, ids)
        runner.fused = model  # what was compiled is for values
        runner.columns = cache.get_seq_length()
        runner.cache = CapturedCache(cache, [nn.Module()], 1, 4)  # nobody else gets buffers without values
        depth = torch.arange(4, device=device)[None]
        runner.read(ids, None, depth)
        runner.read(ids, torch.ones(1, 4, 4, dtype=torch.bool, device=device).tril(), depth)
