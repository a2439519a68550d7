"""`Streams`: all that is trained, everything else is the target's own; and their adapters as a LoRA for PEFT."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ...errors import SpeculationError
from ...target.packing import PackedLinear, pack_linear
from ...target.remembered import Copied
from ...transfer import moved
from .config import StreamingConfig
from .upper import Upper, here_only

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "base_model.model."
"""PEFT's name for the model that it wraps"""


class LowRank(nn.Module):
    """x ↦ U D x with D [rank, in] and U [out, rank], zero before it is trained."""

    def __init__(self, size: int, rank: int, out: int) -> None:
        super().__init__()
        self.down = nn.Linear(size, rank, bias=False)
        self.up = nn.Linear(rank, out, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]"""
        return _flat(lambda rows: self.up(self.down(rows)), x)


class Streams(nn.Module):
    """Stream embeddings P (none where values are rotated), the map f_η, adapters beside linear layers, the pruning map
    o_θ, and the known tokens."""

    known: Tensor
    """[K] ids of the tokens that streams can predict; empty for all tokens"""

    def __init__(self, config: StreamingConfig) -> None:
        super().__init__()
        size, self.gamma, self.rotation = config.hidden_size, config.num_streams, config.rotation
        self.embeddings = None if self.rotation else nn.Parameter(torch.zeros(self.gamma, size))
        self.map = LowRank(size, config.map_rank, size) if config.map_rank else None
        self.pruning = LowRank(size, config.prune_rank, size) if config.prune_rank else None
        self.adapters = nn.ModuleList()
        for _ in range(config.num_layers if config.adapter_rank else 0):
            beside = {
                name.replace(".", "/"): LowRank(sizes[0], config.adapter_rank, sizes[1])
                for name, sizes in config.adapted.items()
            }
            self.adapters.append(nn.ModuleDict(beside))
        self.register_buffer("known", torch.zeros(config.known_tokens, dtype=torch.long))
        self._head: Copied[nn.Linear] = Copied()

    @property
    def device(self) -> torch.device:
        """Of all that streams begin with, which is the first layer's; the known tokens may lie elsewhere."""
        return next(self.parameters(), self.known).device

    def begin(self, states: Tensor) -> Tensor:
        """The streams of each place, S_tj = f_η(M_t) + P_j (Eq. 3); f_η is the identity plus a map of rank η. P_j is
        left out where values are rotated (Appendix B).

        Args:
            states: M [B, n, H] of the main stream, before the first layer with streams.

        Returns:
            [B, n γ, H], the γ streams of a place one after the other.
        """
        states = moved(states, self.device)  # a layer's inputs come from the device of the one before
        mapped = states if self.map is None else states + self.map(states)
        streams = mapped[:, :, None].expand(-1, -1, self.gamma, -1)
        return (streams if self.embeddings is None else streams + self.embeddings).flatten(1, 2)

    def adapted(self, upper: Upper) -> list[Any]:
        """The weights of the linear layers that adapters stand beside, in their order; None of one that has none."""
        return [
            getattr(layer.get_submodule(name.replace("/", ".")), "weight", None)
            for layer, beside in zip(upper.layers, self.adapters, strict=False)
            for name in beside  # type: ignore[union-attr, attr-defined]
        ]

    def merge(self, upper: Upper) -> None:
        """Write the adapters into the linear layers that they stand beside, W + U D, for good."""
        adapters: list[Any] = [adapter for beside in self.adapters for adapter in beside.values()]  # type: ignore[union-attr, operator]
        for weight, adapter in zip(self.adapted(upper), adapters, strict=True):
            more = adapter.up.weight.float() @ adapter.down.weight.float()
            with torch.no_grad():
                weight.copy_((weight.float() + more.to(weight.device)).to(weight.dtype))

    @contextmanager
    def beside(self, upper: Upper, main: int, width: int, turns: bool = True) -> Iterator[None]:
        """Within the block, adapters act on the streams' places only, and so does the rotation of values.

        Args:
            main: places of the main stream, the first ones of each row.
            width: places per row, those of the streams included.
            turns: whether values are rotated, too.
        """
        with ExitStack() as hooks:
            for layer, beside in zip(upper.layers, self.adapters, strict=False):
                for name, adapter in beside.items():  # type: ignore[union-attr, operator]
                    linear = layer.get_submodule(name.replace("/", "."))
                    hooks.callback(linear.register_forward_hook(here_only(_adding(adapter, main, width))).remove)
            if self.rotation and turns:
                for linear in upper.value_projections():
                    turn = _turning(self.rotation, self.gamma, upper.head_size, main)
                    hooks.callback(linear.register_forward_hook(here_only(turn)).remove)
            yield

    def head(self, upper: Upper, states: Tensor) -> Tensor:
        """Logits [..., K] over the known tokens, by the target's own head."""
        head = self._known_head(upper.head) if len(self.known) else upper.head
        return _flat(head, moved(states, head.weight.device))

    def notice(self, head: nn.Linear) -> None:
        """Begin a call with this head, which may have changed since the last one."""
        if len(self.known):
            self._known_head(head, look=True)

    def _known_head(self, head: nn.Linear, look: bool = False) -> nn.Linear:
        """A copy of the head's rows of the known tokens, packed as the head is; made anew when the head changes."""

        def make() -> nn.Linear:
            copied = nn.Linear(head.in_features, len(self.known), bias=head.bias is not None, device="meta")
            copied.weight = nn.Parameter(head.weight.detach()[self.known], requires_grad=False)
            if head.bias is not None:
                copied.bias = nn.Parameter(head.bias.detach()[self.known], requires_grad=False)
            if isinstance(head, PackedLinear):
                pack_linear(copied)
            return copied

        parts = [head.weight, self.known] if head.bias is None else [head.weight, head.bias, self.known]
        return self._head.of(parts, make, look)

    def named(self, rows: Tensor) -> Tensor:
        """Token ids of rows of the head."""
        return self.known[rows] if len(self.known) else rows

    def rows_of(self, tokens: Tensor) -> Tensor:
        """Rows of the head for token ids; -1 for tokens that streams do not know."""
        if not len(self.known):
            return tokens
        tokens = moved(tokens, self.known.device).contiguous()
        order = self.known.argsort()
        place = torch.searchsorted(self.known[order], tokens).clamp_max(len(order) - 1)
        rows = order[place]
        return torch.where(self.known[rows] == tokens, rows, -1)


def _flat(linear: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A linear map over contiguous rows: over strided ones in bfloat16 it takes a hundred times as long."""
    return linear(x.reshape(-1, x.shape[-1])).unflatten(0, x.shape[:-1])


def _adding(adapter: nn.Module, main: int, width: int) -> Any:
    def add(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        # Some models put the rows of a batch one behind the other.
        x, y = (t if t.ndim == 3 else t.unflatten(0, (-1, width)) for t in (args[0], output))
        extra = adapter(x[:, main:]).to(y.dtype)
        if main == 0:
            y.add_(extra)
        elif torch.is_grad_enabled():
            return torch.cat([y[:, :main], y[:, main:] + extra], 1).view_as(output)
        else:
            y[:, main:] += extra
        return output

    return add


def _turning(step: float, gamma: int, size: int, main: int) -> Any:
    """V_tn e^(iεn) for stream n = 1 … γ (Eq. 7): neighbouring values of a head are a complex number."""

    def turn(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        values = output[:, main:].unflatten(-1, (-1, size // 2, 2))
        n = torch.arange(values.shape[1], device=output.device) % gamma + 1
        cos, sin = (f(step * n).to(output.dtype)[:, None, None] for f in (torch.cos, torch.sin))
        a, b = values.unbind(-1)
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(2)
        return torch.cat([output[:, :main], turned], 1)

    return turn


def write_lora(streams: Streams, target: "PreTrainedModel", folder: str | Path) -> None:
    """W + U D of every adapted linear layer, as PEFT's `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        SpeculationError: a folder that cannot be written.
    """
    names = {module: name for name, module in target.named_modules()}
    weights: dict[str, Tensor] = {}
    adapted: list[str] = []
    rank = 0
    for layer, beside in zip(Upper(target, len(streams.adapters)).layers, streams.adapters, strict=True):
        for name, adapter in beside.items():  # type: ignore[union-attr, operator]
            adapted.append(f"{names[layer]}.{name.replace('/', '.')}")
            for letter, part in (("A", adapter.down), ("B", adapter.up)):
                weights[f"{PREFIX}{adapted[-1]}.lora_{letter}.weight"] = part.weight.detach().cpu().contiguous()
            rank = adapter.down.out_features
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": target.name_or_path,
        "r": rank,
        "lora_alpha": rank,  # PEFT scales by alpha / r
        "lora_dropout": 0.0,
        "target_modules": adapted,
        "inference_mode": True,
    }
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(weights, Path(folder) / "adapter_model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise SpeculationError(f"cannot write to folder {str(folder)!r}: {error}; name another one") from error
