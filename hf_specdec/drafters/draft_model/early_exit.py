"""`early_exit`: the target's own first layers as a draft model, which need no memory of their own."""

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import nn

from ...errors import SpeculationError, expect_model
from ...target.remembered import Remembered
from ...target.twin import is_wrapped, twin

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_made: "Remembered[PreTrainedModel]" = Remembered(numbers=False)


def early_exit(target: "PreTrainedModel", layers: int) -> "PreTrainedModel":
    """A draft model of the target's first layers, with its embeddings, its last norm and its output head.

    It shares their weights, so it takes no memory but for its cache. Targets that were trained to be left early, such
    as LayerSkip's, draft well so; others seldom do.

    Args:
        target: a decoder-only model.
        layers: how many of its layers, at least 1 and less than it has.

    Returns:
        The same model for the same target, as long as that keeps its modules, and number.

    Raises:
        SpeculationError: another number, or a target whose layers cannot be told apart.
    """
    expect_model("target", target)
    decoder: Any = None if target.config.is_encoder_decoder else target.get_decoder()
    there = getattr(decoder, "layers", None)
    if not isinstance(there, nn.ModuleList) or is_wrapped(target):
        raise SpeculationError(
            f"target {type(target).__name__} cannot be left early: it has no decoder with a list of `layers`, or "
            "something is around its modules (torch.compile, accelerate's hooks); use a draft model"
        )
    if isinstance(layers, bool) or not isinstance(layers, int) or not 0 < layers < len(there):
        raise SpeculationError(
            f"layers must be from 1 to {len(there) - 1}, fewer than {type(target).__name__} has, got {layers!r} "
            "(assistant_early_exit of generate)"
        )
    return _made.of(target, lambda: _left(target, layers), layers)


def _left(target: Any, layers: int) -> Any:
    whole = deepcopy(target.config)
    text = whole.get_text_config(decoder=True)
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = list(kinds)[:layers]
    text.num_hidden_layers = layers
    configs = {id(target.config): whole, id(target.config.get_text_config(decoder=True)): text}
    there = target.get_decoder().layers
    # Whatever becomes of a layer, in training or by an adapter, becomes of the draft's.
    above = {id(module) for module in target.modules() if any(inner is there for inner in module.modules())}
    draft = twin(target, configs, above)
    decoder = draft.get_decoder()
    decoder.layers = nn.ModuleList(list(there)[:layers])
    return draft
