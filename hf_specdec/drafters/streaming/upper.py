"""The upper layers of a target: how they run by themselves, and what sees what once streams have joined."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import SpeculationError
from ...target.inputs import CACHE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NORMS = ("norm", "final_layernorm", "final_layer_norm")
"""Names that decoders give to the norm after their last layer."""
VALUES = ("self_attn.v_proj",)


class Upper:
    """The last `count` layers of a decoder, with what comes after them."""

    def __init__(self, model: "PreTrainedModel", count: int) -> None:
        """
        Raises:
            SpeculationError: the model is not of the form that streams can join.
        """
        decoder: Any = model.get_decoder()
        layers: Any = getattr(decoder, "layers", None)
        norms = [name for name in NORMS if getattr(decoder, name, None) is not None]
        head = model.get_output_embeddings()
        fine = isinstance(layers, nn.ModuleList) and len(norms) == 1 and isinstance(head, nn.Linear)
        fine = fine and all(hasattr(layer, "self_attn") for layer in layers)  # others name their caches otherwise
        rotary = getattr(decoder, "rotary_emb", None)
        if not fine or (rotary is None and not hasattr(decoder, "embed_positions")):
            raise SpeculationError(
                "streams need a decoder with `layers`, one norm behind them, and rotary or learned positions "
                f"(Llama, Qwen2 and 3, Phi, OPT and similar models); {type(model).__name__} is built "
                "differently. Use another drafter"
            )
        if not count < len(layers):
            raise SpeculationError(
                f"num_layers must be below the target's {len(layers)} layers, got {count}: streams begin above "
                "at least one"
            )
        self.decoder, self.layers, self.head = decoder, layers[len(layers) - count :], head
        self.first, self.rotary, self.norm = len(layers) - count, rotary, getattr(decoder, norms[0])
        self.by_kind = rotary is not None and "layer_type" in signature(rotary.forward).parameters
        config = model.config.get_text_config(decoder=True)
        kinds = getattr(config, "layer_types", None) or [""] * len(layers)
        self._kinds = dict(zip(map(id, layers), kinds, strict=True))
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def run(self, states: Tensor, mask: Any, positions: Tensor, cache: Any = None) -> Tensor:
        """States [B, T, H] before the first of these layers → [B, T, H] after the norm.

        Args:
            mask: additive [B, 1, T, all], or one per kind of layer.
            positions: [B, T].
            cache: what the layers write to; None for none.
        """
        told = {"attention_mask": mask, **self.positions(states, positions)}
        for layer in self.layers:
            out = layer(states, use_cache=cache is not None, **self.told(layer, told) | {CACHE: cache})
            states = out[0] if isinstance(out, tuple) else out
        return self.after(states)

    def copied(self) -> "Upper":
        """With layers of its own, and the rest shared."""
        own = copy(self)
        own.layers = deepcopy(self.layers)
        for module in own.layers.modules():  # without what another thread's forward has hooked in
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key, hook in hooks.items() if hasattr(hook, "of_one_forward")]:
                    del hooks[key]
        own._kinds = {id(mine): self._kinds[id(layer)] for mine, layer in zip(own.layers, self.layers, strict=True)}
        return own

    def told(self, layer: nn.Module, told: dict[str, Any]) -> dict[str, Any]:
        """A layer's masks and positions, where each kind of layer has its own."""
        kind = self._kinds[id(layer)]
        return {name: each[kind] if isinstance(each, dict) else each for name, each in told.items()}

    @contextmanager
    def entering(self, look: Callable[[Tensor], None]) -> Iterator[None]:
        """Within the block, `look` is called with the states [B, T, H] that enter the first layer in this thread."""

        def hook(_: Any, args: Any, kwargs: Any) -> None:
            look(args[0] if args else kwargs["hidden_states"])

        handle = self.layers[0].register_forward_pre_hook(here_only(hook), with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def positions(self, states: Tensor, positions: Tensor) -> dict[str, Any]:
        """The arguments by which layers take positions [B, T]; some rotate by kind of layer."""
        told: dict[str, Any] = {"position_ids": positions}
        if self.rotary is not None and self.by_kind:
            kinds = {self._kinds[id(layer)] for layer in self.layers}
            told["position_embeddings"] = {kind: self.rotary(states, positions, kind) for kind in sorted(kinds)}
        elif self.rotary is not None:
            told["position_embeddings"] = self.rotary(states, positions)
        return told

    def after(self, states: Tensor) -> Tensor:
        """What the decoder does after its last layer."""
        states = self.norm(states)
        project = getattr(self.decoder, "project_out", None)
        return states if project is None else project(states)

    def value_projections(self) -> list[nn.Module]:
        """The layers' linear maps to values."""
        return [layer.get_submodule(name) for layer in self.layers for name in VALUES]


def with_streams(seen: Tensor, depth: Tensor, gamma: int, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Which places see which, among n places of the main stream and the streams of c of them (Eq. 1 and 2).

    The main stream sees what it sees without streams. Stream j of a place sees what the place sees, and the place's
    streams up to j.

    Args:
        seen: [B or 1, n, n] which places each place sees, itself included.
        depth: [B or 1, n].
        at: [B, c] the places with streams; None for all.

    Returns:
        [B or 1, n + c γ, n + c γ] and [B or 1, n + c γ]: first the places, then their streams, place by place. Stream j
        of a place at depth d lies at d + j, where the token it foretells the next of would be.
    """
    theirs, deep = seen, depth
    if at is not None:
        rows = torch.arange(len(at), device=at.device)[:, None]
        theirs, deep = seen.expand(len(at), -1, -1)[rows, at], depth.expand(len(at), -1)[rows, at]
        seen, depth = seen.expand(len(at), -1, -1), depth.expand(len(at), -1)
    batch, c = theirs.shape[:2]
    before = torch.ones(gamma, gamma, dtype=torch.bool, device=seen.device).tril()
    among = torch.kron(torch.eye(c, dtype=torch.bool, device=seen.device), before).expand(batch, -1, -1)
    nobody = seen.new_zeros(batch, seen.shape[1], c * gamma)
    streams = torch.cat([theirs.repeat_interleave(gamma, 1), among], 2)
    deeper = (deep[:, :, None] + torch.arange(1, gamma + 1, device=depth.device)).flatten(1)
    return torch.cat([torch.cat([seen, nobody], 2), streams], 1), torch.cat([depth, deeper], 1)


def here_only(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that acts in the thread that made it only, as other threads may call the same module."""
    mine = threading.get_ident()

    def guarded(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == mine else None

    guarded.of_one_forward = True  # type: ignore[attr-defined]
    return guarded
