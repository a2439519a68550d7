"""What a model can do, found out by trying: a few tiny forwards, compared with plain ones, once per model.

A model that ignores a 4-D mask (ALiBi), or whose cache rolls back wrongly, gives other logits; it never gets the
chance to change a text.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ..errors import shown
from ..protocol import Runner
from .attention import why_no_masks
from .cache import is_adoptable
from .compiled import uncompiled
from .devices import input_device
from .encoder_decoder import as_said, crosses, fresh_cache
from .fingerprint import replaced
from .inputs import CACHE, takes_ragged_inputs
from .lockstep import LockstepRunner, prefill
from .packing import PackedLinear
from .ragged import RaggedRunner
from .remembered import Remembered
from .state import StateRunner, keeps_state
from .twin import is_wrapped, twin

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Support(IntEnum):
    """How much of the engine a model can run under; each includes those below."""

    PLAIN = 0
    STATE = 1
    LOCKSTEP = 2
    RAGGED = 3


class Ability(NamedTuple):
    """What was found out about a model."""

    support: Support
    vocab_size: int
    """of its logits"""
    why: str = ""
    """not more, in words that go on from the model's name; empty where there is no more"""


_known: Remembered[Ability] = Remembered()

IDS = ((7, 3, 11, 5, 2, 13, 17), (4, 9, 6, 1, 8, 10, 12))
PADDING = 2
"""columns of it on the left of the second row"""
WINDOW = 4
"""tokens of a sliding window while it is probed"""
LOUD = 100
"""times the usual size of a token's values"""
STATE = "keeps a state that cannot be rolled back"
NOISES = 4
"""times a model's own rounding that two ways of computing the same may be apart"""
SHAKEN = 2
"""texts that are off by a rounding from which that is learned in half precision"""
MOST_NOISE = 1e-3
"""of the logits' scale that can be rounding in float32. What is more is another computation: a model that sees other
keys, or clamps otherwise, in a forward of several tokens than in one of a single token"""


def support(model: "PreTrainedModel") -> Support:
    """The best way to run this model, remembered as long as it stays as it is."""
    return ability(model).support


def ability(model: "PreTrainedModel") -> Ability:
    """What this model can do, likewise."""

    def tried() -> Ability:
        with torch.no_grad():
            return _probe(_narrow(uncompiled(model)))

    return _known.of(model, tried)


def _narrow(model: "PreTrainedModel") -> "PreTrainedModel":
    """With a sliding window so short that the probe's text goes past it: what a model does there differs. It is a twin
    of the same weights, for the model itself may be decoding in another thread. Attention kernels with a window of
    their own keep it, so there it stays; so it does where something has put itself around the model's layers."""
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or window <= WINDOW or config._attn_implementation not in ("eager", "sdpa"):
        return model
    if is_wrapped(model):
        return model
    whole = copy.deepcopy(model.config)
    text = whole.get_text_config(decoder=True)
    text.sliding_window = WINDOW
    return twin(model, {id(model.config): whole, id(config): text})


def _probe(model: "PreTrainedModel") -> Ability:
    ids, mask = _inputs(model)
    vocab = model.config.get_text_config(decoder=True).vocab_size
    found, why, cache = Support.PLAIN, "", None
    try:
        cache = None if crosses(model) else _kwargs(model, mask)[CACHE]
        expected, noise = _plain(model, ids, mask)
        vocab = expected.shape[-1]
        if cache is not None:
            prefill(model, ids, _kwargs(model, mask) | {CACHE: cache}, None)
        way = StateRunner if cache is not None and keeps_state(cache) else LockstepRunner
        if not bool(expected.isfinite().all()):
            return Ability(found, vocab, "gives logits that are NaN or infinite")
        if cache is not None and way is LockstepRunner and not cache.is_croppable:
            return Ability(found, vocab, f"has a {type(cache).__name__} that cannot be rolled back")
        if why := differs(_lockstep(way, model, ids, mask), expected, noise) or _couples_tokens(model):
            return Ability(found, vocab, why)
        found = Support.STATE if way is StateRunner else Support.LOCKSTEP
        if way is StateRunner or cache is None:
            return Ability(found, vocab, STATE if cache is not None else "has an encoder")
        if why := _keeps_rows_together(model):
            return Ability(found, vocab, why)
        why = differs(_ragged(model, ids, mask), expected, noise)
        found = found if why else Support.RAGGED
    except Exception as error:  # whatever a model raises here, it is run another way
        why = STATE if cache is not None and keeps_state(cache) else "failed in a trial run"
        why += f": it raised {shown(error)}"
    return Ability(found, vocab, why)


def _couples_tokens(model: "PreTrainedModel") -> str:
    """Which kind of layer rounds a token by what stands beside it, as int8 layers do where that is large, which the
    probe's text need not be. One layer of each kind that is not torch's own is tried by itself."""
    for kind, layer in {type(module): module for module in model.modules()}.items():
        if issubclass(kind, nn.Embedding) or kind.__module__.startswith(("torch.nn.modules", PackedLinear.__module__)):
            continue
        weight: Any = getattr(layer, "weight", None)
        size = getattr(layer, "in_features", weight.shape[-1] if getattr(weight, "ndim", 0) == 2 else None)
        if not isinstance(size, int):
            continue
        quiet = torch.randn(1, 4, size, generator=torch.Generator().manual_seed(0), device="cpu")
        loud = quiet * torch.tensor([1, 1, LOUD, 1], device="cpu")[:, None]
        try:
            alone, beside = (layer(x.to(input_device(layer), model.dtype))[:, 0].float() for x in (quiet[:, :1], loud))
        except Exception:  # it takes something else
            continue
        if bool((alone - beside).abs().max() > (1e-4 if model.dtype == torch.float32 else 0.02) * alone.abs().max()):
            return f"has layers ({kind.__name__}) that round a token by what stands beside it"
    return ""


def _keeps_rows_together(model: "PreTrainedModel") -> str:
    """Why rows of different lengths are not even tried; empty where they are."""
    # GPT-Neo's window is a table over columns, which no mask of ours can widen and the probe's text does not go past.
    counts = "local" in (getattr(model.config, "attention_layers", None) or ())
    return why_no_masks(model) or ("has local attention that counts the columns of the batch" if counts else "")


def runner_agrees(model: "PreTrainedModel", wrap: Callable[[RaggedRunner], Runner]) -> bool:
    """Whether a runner of a drafter's own leaves the target's logits as they are.

    Args:
        wrap: makes it, around the engine's runner over a prompt of 2 rows and 4 columns.
    """
    ids, mask = _inputs(model)
    with torch.no_grad():
        expected, noise = _plain(model, ids, mask)
        runner = wrap(RaggedRunner(model, _kwargs(model, mask[:, :4]), ids[:, :4]))
        runner.prefill()
        runner.forward(ids[:, :2])  # rolled back: nothing of it may stay
        runner.truncate([4, 4])
        answer = runner.forward(ids[:, 4:6])
        # What was pruned cannot be compared.
        places = 2 if answer.nodes is None else 1
        return not differs(answer.logits[:, :places], expected[:, :places], noise[:, :places])


def why_not_over(model: "PreTrainedModel", way: Callable[..., RaggedRunner]) -> str:
    """How another ragged runner's logits differ from plain ones; empty where they do not."""
    model = _narrow(model)
    ids, mask = _inputs(model)
    with torch.no_grad():
        expected, noise = _plain(model, ids, mask)
        return differs(_ragged(model, ids, mask, way), expected, noise)


def _inputs(model: "PreTrainedModel") -> tuple[Tensor, Tensor]:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.tensor(IDS, device=input_device(model)) % vocabulary
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return ids, mask


def _kwargs(model: "PreTrainedModel", mask: Tensor) -> dict:
    if crosses(model):  # as if an encoder had said something
        size = model.config.get_text_config(decoder=True).hidden_size
        states = torch.linspace(-1, 1, 10 * size, device=input_device(model), dtype=model.dtype).view(2, 5, size)
        return {"encoder_outputs": as_said(states), CACHE: fresh_cache(model), "use_cache": True}
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    kwargs = {"attention_mask": mask, CACHE: DynamicCache(config=model.config), "use_cache": True}
    return kwargs | ({"position_ids": positions} if takes_ragged_inputs(model, {}) else {})


def _plain(model: "PreTrainedModel", ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Logits after columns 4, 5 and 6 [B, 3, V], token by token as plain decoding does it; and what the model's own
    rounding makes of them [B, 3]: how far those of one forward over the whole text are from them, and in half precision
    those over embeddings that are off by a rounding. Some places amplify one to a multiple of what others do."""

    def apart(of: "PreTrainedModel") -> Tensor:
        whole = prefill(of, ids, _kwargs(of, mask), None, all_logits=True).logits[:, -3:]
        return (expected.float() - whole.float()).abs().amax(-1)

    runner = LockstepRunner(model, _kwargs(model, mask[:, :4]), ids[:, :4])
    runner.prefill()
    steps = []
    for i in range(4, 7):
        steps.append(runner.forward(ids[:, i : i + 1]).logits)
        runner.truncate([i + 1] * 2)
    expected = torch.cat(steps, dim=1)
    noise = apart(model)
    if expected.dtype != torch.float32:
        for seed in range(SHAKEN):
            noise = torch.maximum(noise, apart(_shaken(model, seed)))
    return expected, noise


def _shaken(model: "PreTrainedModel", seed: int) -> "PreTrainedModel":
    """A twin whose embeddings are off by half a unit in the last place, up or down."""
    shaken = twin(model, {})
    if replaced(model) is None:  # what only looks on would run the model itself
        vars(shaken).pop("forward", None)
    signs = torch.Generator().manual_seed(seed)

    def shake(module: Any, args: Any, output: Tensor) -> Tensor:
        up = torch.rand(output.shape, generator=signs).to(output.device) < 0.5
        half = torch.finfo(output.dtype).eps / 2
        return (output.float() * torch.where(up, 1 + half, 1 - half)).to(output.dtype)

    embeddings = shaken.get_input_embeddings()
    vars(embeddings)["_forward_hooks"] = OrderedDict(embeddings._forward_hooks)  # not the model's own
    embeddings.register_forward_hook(shake)
    return shaken


def _lockstep(way: type[LockstepRunner], model: "PreTrainedModel", ids: Tensor, mask: Tensor) -> Tensor:
    """The same by a prefill of 4 columns, wrong forwards rolled back in whole and in part, and the right ones."""
    runner = way(model, _kwargs(model, mask[:, :4]), ids[:, :4])
    runner.prefill()
    runner.forward(ids[:, :2])
    runner.truncate([4, 4])
    first = runner.forward(torch.cat([ids[:, 4:5], ids[:, :2]], dim=1)).logits[:, :1]
    runner.truncate([5, 5])
    return torch.cat([first, runner.forward(ids[:, 5:]).logits], dim=1)


def _ragged(
    model: "PreTrainedModel", ids: Tensor, mask: Tensor, way: Callable[..., RaggedRunner] = RaggedRunner
) -> Tensor:
    """The same with rows that advance unevenly, over slots filled with large garbage, and with one row alone."""
    kwargs = _kwargs(model, mask[:, :3])
    runner = way(model, kwargs, ids[:, :3])
    prefill(model, ids[:, :3], kwargs, None)
    if not is_adoptable(kwargs[CACHE]):
        raise TypeError("not a plain attention cache")
    runner.adopt()
    for layer in runner.cache.layers:
        layer.keys[:, :, 3:], layer.values[:, :, 3:] = 50.0, 50.0
    runner.forward(ids[:, 3:5], counts=[1, 2])
    first = runner.forward(torch.stack([ids[0, 4:7], ids[1, [5, 6, 6]]]), counts=[3, 2]).logits
    runner.truncate([4, 4])
    second = runner.forward(ids[:, 4:7]).logits
    runner.select([0])  # which has no padding: a single token of it needs no mask, and is not to see what lies behind
    runner.padded = False
    runner.truncate([6])
    alone = runner.forward(ids[:1, 6:7]).logits
    return torch.stack([torch.cat([first[0, :2], alone[0]]), second[1]])


def differs(got: Tensor, expected: Tensor, noise: Tensor) -> str:
    """How far logits are apart, in words; empty where that is rounding.

    Args:
        got, expected: [B, n, V]
        noise: [B, n] what rounding makes of these logits, as far as is known. A small error of a state that was not
            rolled back is still larger than that, and grows with the text.
    """
    exact = expected.dtype == torch.float32
    got, expected = got.float(), expected.float()
    scale = float((expected - expected.mean(-1, keepdim=True)).abs().max())
    tolerance = (1e-4 if exact else 0.1) * scale
    rounding = (NOISES * noise.max()).clamp_max(MOST_NOISE * scale) if exact else NOISES * noise
    apart, most = (got - expected).abs().amax(-1), rounding.clamp_min(tolerance).expand(noise.shape)
    if bool((apart <= most).all()):
        return ""
    worst = int((apart - most).argmax())
    is_apart, explained = (float(each.flatten()[worst]) for each in (apart, most))
    return (
        "gives different logits when several tokens are verified at once and some of them rolled back "
        f"({is_apart:.2g} apart, and rounding explains {explained:.2g})"
    )
