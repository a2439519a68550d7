"""`LateStreams`: where width costs time, streams run behind the verdict, at the one node of each row that counts.

They run by themselves then, as behind the prompt: through the upper layers alone, N_s / N of a step, and no forward of
the target is wider for them.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...protocol import Forward, Runner
from ...target.grouped import grouped_attention
from .streams import Streams
from .upper import Upper

ADDED_TO = (torch.float32, torch.float16, torch.bfloat16)
"""dtypes of weights that an adapter can be added to"""
OwnLayers = tuple[Streams, Upper]
"""streams, and the layers that they run through by themselves"""


class LateStreams:
    """Wraps the engine's runner, of which each forward is as without streams: it is only looked on."""

    def __init__(self, engine: Runner, upper: Upper, own: OwnLayers) -> None:
        self.engine: Any = engine
        self.upper, self.own = upper, own
        self.states: Tensor | None = None
        """[B, T, H] of the last forward's tokens before the first layer with streams"""
        self.at: list[list[int]] = []
        """[B][T] of which of the fed tokens those are"""
        self.rides = True
        """not asked for: to look on costs nothing"""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def prefill(self) -> Forward:
        """The prompt's forward; streams begin with the last token's state."""
        return self._noted(self.engine.prefill, last=True)

    def forward(
        self, tokens: Tensor, parents: Sequence[Sequence[int]] | None = None, counts: Sequence[int] | None = None
    ) -> Forward:
        return self._noted(lambda: self.engine.forward(tokens, parents, counts))

    def _noted(self, forward: Callable[[], Forward], last: bool = False) -> Forward:
        seen: list[Tensor] = []
        with self.upper.entering(seen.append):
            answer = forward()
        self.states = seen[0][:, -1:].clone() if last else seen[0]
        self.at = [list(range(self.states.shape[1]))] * len(self.states)
        return answer

    def streams_at(self, begins: Tensor) -> Tensor | None:
        """[B, γ, H] after the norm, behind each row's end; None where not all rows of the cache are asked for.

        Args:
            begins: [B, H] of `states`, those of the rows' last tokens in the cache.
        """
        if len(begins) != len(self.engine.lengths):
            return None
        return streams_alone(self.engine, *self.own, begins[:, None])


def streams_alone(engine: Any, streams: Streams, upper: Upper, begins: Tensor) -> Tensor:
    """The streams [B, γ, H] of the rows' last tokens, whose states [B, 1, H] entered the upper layers. Their keys are
    written behind the rows' ends, and do not count."""
    gamma, cache, rows = streams.gamma, engine.cache, len(begins)
    begins = pad(begins, (0, 0, 0, 0, 0, cache.rows - rows))
    depth = torch.arange(gamma, device=cache.device)[None]  # a chain
    cache.tell()
    cache.reserve(gamma)
    with streams.beside(upper, 0, gamma), grouped_attention():
        states = upper.run(streams.begin(begins), engine.masks(None, depth), engine.positions(depth), cache)
    return states[:rows]


def own_layers(streams: Streams, upper: Upper) -> OwnLayers:
    """The streams without adapters, and a copy of the layers that has them in its weights, W + U D: dozens of small
    products less per pass. Where weights cannot be added to, both as they are."""
    weights = streams.adapted(upper)
    plain = all(type(w) is nn.Parameter and w.is_cpu and w.dtype in ADDED_TO for w in weights)
    if not weights or not plain or any(hasattr(module, "_hf_hook") for module in upper.layers.modules()):
        return streams, upper
    own, bare = upper.copied(), copy(streams)
    streams.merge(own)
    bare._modules = {**streams._modules, "adapters": nn.ModuleList()}
    return bare, own
