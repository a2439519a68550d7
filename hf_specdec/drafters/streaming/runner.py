"""`StreamRunner`: one forward verifies a tree and makes the streams of its nodes (§3.2.2, §3.2.3)."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ...protocol import Forward, Runner
from ...target.fingerprint import fingerprint
from ...transfer import moved, to_device, to_host
from .late import streams_alone
from .streams import Streams
from .upper import Upper, here_only, with_streams


class StreamRunner:
    """Wraps the engine's runner. Below layer N - N_s a forward is the engine's own. From there on the streams run
    behind the main stream's tokens, and pruned nodes are left out. The streams' keys are not kept."""

    def __init__(self, engine: Runner, streams: Streams, upper: Upper, prune_below: float = 0.0) -> None:
        self.engine: Any = engine
        self.streams, self.upper, self.prune_below = streams, upper, prune_below
        self.states: Tensor | None = None
        """[B, c, γ, H] the streams of the last forward, after the norm"""
        self.at: list[list[int]] = []
        """[B][c] of which of the fed tokens those are"""
        self.kept: list[list[int]] | None = None
        """[B] indexes of the n among the fed tokens; None where none was pruned"""
        self.slots: Any = None
        """the upper layers' part of the cache, where nodes are pruned in mid-forward"""
        names = [list(beside) for beside in streams.adapters]  # type: ignore[call-overload]
        self.key = "streams", upper.first, hash((str(names), fingerprint(streams)))
        """of forwards with these streams"""
        self.rides = True
        """whether streams join the next forward; where drafting is paused it is a plain one"""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def prefill(self) -> Forward:
        """The prompt's forward, as without streams. The first streams begin with its last state and run alone."""
        last: list[Tensor] = []
        with self.upper.entering(lambda states: last.append(states[:, -1:].clone())):
            answer = self.engine.prefill()
        self.states = streams_alone(self.engine, self.streams, self.upper, last[-1])[:, None]
        self.kept, self.at = None, [[0]] * len(self.states)
        return answer

    def streams_at(self, ends: Tensor) -> Tensor:
        """The streams [B, γ, H] that `states` hold are there already."""
        return ends

    def forward(
        self, tokens: Tensor, parents: Sequence[Sequence[int]] | None = None, counts: Sequence[int] | None = None
    ) -> Forward:
        engine, (rows, width) = self.engine, tokens.shape
        if not self.rides:
            self.states = self.kept = None
            return engine.forward(tokens, parents, counts)
        wide = Wide(self)
        logits, self.states = engine.over(tokens, parents, wide.read, self.key, 1 + self.streams.gamma)
        self.at, self.kept = wide.kept or [list(range(width))] * rows, wide.kept
        self._advance(tokens.shape, wide, counts)
        nodes = None
        if wide.kept is not None:
            lists = [[node - 1 for node in row[1:]] + [-1] * (wide.places - len(row)) for row in wide.kept]
            nodes = to_device(lists, logits.device).view(len(lists), -1)
        return Forward(logits, nodes)

    def _advance(self, shape: Sequence[int], wide: "Wide", counts: Sequence[int] | None) -> None:
        cache, (rows, width) = self.engine.cache, shape
        lower = [width] * rows if counts is None else list(counts)
        if wide.kept is None:
            cache.set_lengths([n + m for n, m in zip(cache.lengths, lower, strict=True)])
            return
        for group, more in ((cache.slots, lower), (self.slots, [len(row) for row in wide.kept])):
            group.set_lengths([n + m for n, m in zip(group.lengths, more, strict=True)])

    def upper_slots(self) -> Any:
        """The upper layers' part of the cache. When they are reached, the lower ones have written to theirs."""
        cache = self.engine.cache
        if self.prune_below == 0:
            return cache.slots
        if not any(group is self.slots for group in cache.groups):  # rows may have come that were read elsewhere
            self.slots = cache.split(self.upper.first)
        return self.slots

    def truncate(self, lengths: list[int]) -> None:
        """Roll every row back to its length."""
        self.engine.truncate(lengths)

    def keep(self, lengths: list[int], paths: list[list[int]]) -> None:
        """Roll back, then keep an accepted path; in the upper layers its nodes lie where pruning has put them."""
        if self.kept is None:
            self.engine.keep(lengths, paths)
            return
        cache = self.engine.cache
        above = [[kept.index(node + 1) - 1 for node in path] for kept, path in zip(self.kept, paths, strict=True)]
        cache.set_lengths(lengths)
        cache.keep(paths, cache.slots)
        cache.keep(above, self.slots)
        cache.set_lengths([n + len(path) for n, path in zip(lengths, paths, strict=True)])


class Wide:
    """One forward with streams: tokens that enter the first upper layer are pruned and joined by the streams, each
    upper layer gets masks and positions for both, and the decoder's output is split again."""

    def __init__(self, runner: StreamRunner) -> None:
        self.runner = runner
        self.kept: list[list[int]] | None = None

    def read(self, tokens: Tensor, seen: Tensor | None, depth: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, n, V] and streams [B, c, γ, H], for tokens [B, T] that see what `RaggedRunner.shape` says."""
        engine, upper = self.runner.engine, self.runner.upper
        self.tokens, self.depth, self.places = tokens, depth, tokens.shape[1]
        chain = torch.ones(1, self.places, self.places, dtype=torch.bool, device=depth.device).tril
        self.seen = chain() if seen is None else seen
        self.told: dict[str, Any] | None = None
        self.slots = self.runner.upper_slots()
        with ExitStack() as self.hooks:
            for layer in upper.layers:
                hook = here_only(self.widened)
                self.hooks.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            self.hooks.callback(upper.decoder.register_forward_hook(here_only(self.narrowed)).remove)
            return engine.shared(engine.read(tokens, seen, depth).logits), self.streams

    def widened(self, layer: Any, args: Any, kwargs: Any) -> Any:
        """Called before each upper layer: its inputs with the streams."""
        states = args[0] if args else kwargs["hidden_states"]
        if self.told is None:
            states = self._begun(states)
        assert self.told is not None
        told = self.runner.upper.told(layer, self.told)
        more = {name: value for name, value in told.items() if name in kwargs}
        if args:
            return (states, *args[1:]), kwargs | more
        return args, kwargs | more | {"hidden_states": states}

    def _begun(self, states: Tensor) -> Tensor:
        """Main stream and streams [B, n (1 + γ), H]; sets the masks and positions that the layers are given."""
        runner, upper, streams = self.runner, self.runner.upper, self.runner.streams
        if runner.prune_below > 0 and self.places > 1:
            states = self._pruned(states)
        seen, depth = with_streams(self.seen, self.depth, streams.gamma)
        begun = streams.begin(states)
        states = torch.cat([moved(states, begun.device), begun], 1)
        self.slots.reserve(states.shape[1])
        self.told = {"attention_mask": runner.engine.masks(seen, depth, self.slots)}
        positions = runner.engine.positions(depth).expand(len(states), -1)
        self.told |= upper.positions(states, positions)
        self.hooks.enter_context(streams.beside(upper, self.places, states.shape[1]))
        return states

    def _pruned(self, states: Tensor) -> Tensor:
        """Leave out nodes to which their parent gives too small a chance, and all below them (§3.2.3, Appendix A.1)."""
        runner, rows, device = self.runner, len(states), self.seen.device
        chances = early_chances(runner.streams, runner.upper, states, self.tokens, self.seen)
        likely = moved(chances, device) >= runner.prune_below
        seen = self.seen.expand(rows, -1, -1)
        alive = to_host(~(seen & ~likely[:, None]).any(-1))
        kept = [[i for i, lives in enumerate(row) if lives] for row in alive]
        if all(len(row) == self.places for row in kept):
            return states
        n = max(map(len, kept))
        index = to_device([row + [0] * (n - len(row)) for row in kept], device)
        counts = torch.arange(n, device=device) < to_device([[len(row)] for row in kept], device)
        at = torch.arange(rows, device=device)[:, None]
        among = seen[at[:, :, None], index[:, :, None], index[:, None]] & counts[:, None]
        itself = torch.eye(n, dtype=torch.bool, device=device)
        self.seen, self.depth = among | itself, self.depth.expand(rows, -1)[at, index]
        self.places, self.kept = n, kept
        return states[moved(at, states.device), moved(index, states.device)]

    def narrowed(self, _: Any, args: Any, output: Any) -> Any:
        """Called after the decoder: the model's head sees the main stream only."""
        states = output.last_hidden_state
        self.streams = states[:, self.places :].unflatten(1, (-1, self.runner.streams.gamma))
        output.last_hidden_state = states[:, : self.places]
        return output


def early_chances(streams: Streams, upper: Upper, states: Tensor, tokens: Tensor, seen: Tensor) -> Tensor:
    """Chance [B, T] that each fed token's parent gives it by its early-exit logits, H(o_θ(M)); 1 for the root and for
    tokens that the streams do not know.

    Args:
        states: M [B, T, H] before the first layer with streams.
        seen: [B or 1, T, T] each token's ancestors and itself.
    """
    assert streams.pruning is not None
    states = moved(states, streams.device)
    logits = streams.head(upper, upper.after(states + streams.pruning(states))).float()
    seen = moved(seen, logits.device)
    depth = seen.sum(-1)
    # The parent is the deepest that a token sees beside itself.
    above = seen & ~torch.eye(seen.shape[1], dtype=torch.bool, device=seen.device)
    parent = (above * depth[:, None]).argmax(-1).expand(len(states), -1)
    rows = moved(streams.rows_of(tokens), logits.device)
    log_p = logits.log_softmax(-1)
    chance = log_p[torch.arange(len(states), device=logits.device)[:, None], parent, rows.clamp_min(0)].exp()
    return torch.where((rows < 0) | (depth == 1), 1.0, chance)
