"""Streams learn to foretell: stream j of every place where the target writes, the token j further on (Eq. 5)."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...drafters.nodes import likeliest_nodes
from ...drafters.streaming import Streams, Upper, with_streams
from ...target.masks import as_bias
from ..learning import Examined, examining
from ..lessons import Lessons, batches

ALPHA_MAIN, ALPHA_STREAM = 1.0, 0.1
"""α0 and αj of Equation 5, where the target is tuned (Appendix A.2)"""
NODES = 16
"""of the tree whose tokens per call an examination promises"""


class Learner(nn.Module):
    """Streams over the upper layers of a target, which are not trained and not saved with them."""

    def __init__(
        self, streams: Streams, upper: Upper, windows: dict[str, int | None], candidates: int, tuned: bool = False
    ) -> None:
        super().__init__()
        self.streams, self.candidates, self.tuned = streams, candidates, tuned
        self._target = (upper, windows)  # in a tuple, where torch does not look for modules

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """At the places that count: logits [B, c, γ, K] of the streams, [B, c, K] of the early exit and, where the
        target is tuned, [B, c, V] of the main stream."""
        (upper, windows), streams, at = self._target, self.streams, batch["at"]
        main = batch["states"]
        rows, width = main.shape[:2]
        index = torch.arange(rows, device=at.device)[:, None]
        seen = torch.ones(1, width, width, dtype=torch.bool, device=at.device).tril()
        seen, depth = with_streams(seen, torch.arange(width, device=at.device)[None], streams.gamma, at)
        chosen, kept = main[index, at], MainStream()
        mask = as_bias(seen[:, :width, :width], _distance(depth[:, :width]), windows, main.dtype)
        # Left untouched, the main stream keeps no graph: nothing that is trained reaches it.
        with torch.set_grad_enabled(self.tuned and torch.is_grad_enabled()), ExitStack() as adapted:
            if self.tuned:
                adapted.enter_context(streams.beside(upper, 0, width, turns=False))
            behind = upper.run(main, mask, depth[:, :width], kept)
        states = streams.begin(chosen).to(main.dtype)
        mask = as_bias(seen[:, width:], _distance(depth)[:, width:], windows, main.dtype)
        with streams.beside(upper, 0, states.shape[1]):
            states = upper.run(states, mask, depth[:, width:], kept)
        logits = streams.head(upper, states.unflatten(1, (-1, streams.gamma)))
        early = None
        if streams.pruning is not None:
            early = streams.head(upper, upper.after(chosen + streams.pruning(chosen).to(main.dtype)))
        return logits, early, upper.head(behind[index, at]) if self.tuned else None

    def wanted(self, batch: dict[str, Tensor]) -> Tensor:
        """[B, c, 1 + γ] rows of the head of the tokens that come next at each place; -1 where streams do not know them
        or the text is at its end."""
        ids, at, gamma = batch["input_ids"], batch["at"], self.streams.gamma
        ahead = at[:, :, None] + 1 + torch.arange(gamma + 1, device=at.device)
        inside = (ahead < batch["lengths"][:, None, None]) & batch["counts"][:, :, None]
        rows = torch.arange(len(ids), device=at.device)[:, None, None]
        tokens = ids[rows, ahead.clamp_max(ids.shape[1] - 1)]
        return torch.where(inside, self.streams.rows_of(tokens), -1)


class MainStream:
    """The main stream's keys and values in each layer, for those of the streams to stand behind."""

    def __init__(self) -> None:
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """As a cache is asked: of the main stream first."""
        if layer not in self.states:
            self.states[layer] = keys, values
            return keys, values
        return torch.cat([self.states[layer][0], keys], 2), torch.cat([self.states[layer][1], values], 2)


def _distance(depth: Tensor) -> Tensor:
    return depth[:, :, None] - depth[:, None]


def _entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    known = wanted >= 0
    if not known.any():
        return logits.sum() * 0.0
    return cross_entropy(logits[known].float(), wanted[known])


def acceptance(model: Any, lessons: Lessons, rows: int) -> dict[str, Any]:
    """How often streams are right on texts.

    Returns:
        `acceptance` and `acceptance_sampled`, [γ][k] each: of the places where all streams before were right with one
        of their k candidates, the share where this candidate of this stream is; of greedy texts and of sampled ones.
        `first`: the share where the first stream's first choice is right, greedy; `stream_1` … `stream_γ`: that one of
        its candidates is; `promised`: tokens per call that a tree of 16 nodes promises in greedy text. `early_exit`: of
        the pruning map, where there is one.
    """
    ranks: list[Tensor] = []
    sampled: list[Tensor] = []
    early_right: list[Tensor] = [torch.zeros(0)]
    device, dtype = next(model.parameters()).device, model._target[0].head.weight.dtype
    with examining(model):
        for batch in batches(lessons, rows, device):
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                logits, early, _ = model(batch)
            wanted = model.wanted(batch)
            best = logits.topk(model.candidates).indices
            hits = best == wanted[:, :, 1:, None]
            rank = torch.where(hits.any(-1), hits.float().argmax(-1), model.candidates)
            whole = batch["counts"] & (batch["at"] + model.streams.gamma + 1 < batch["lengths"][:, None])
            ranks.append(rank[whole].cpu())
            sampled.append(batch["sampled"][:, None].expand_as(whole)[whole].cpu())
            if early is not None:
                early_right.append((early.argmax(-1) == wanted[:, :, 0])[batch["counts"]].float().cpu())
    rank, is_sampled = torch.cat(ranks), torch.cat(sampled)
    found: dict[str, Any] = {
        "acceptance": _table(rank[~is_sampled], model.candidates),
        "acceptance_sampled": _table(rank[is_sampled], model.candidates),
    }
    table = found["acceptance"] or found["acceptance_sampled"] or [[0.0]]
    found["first"] = table[0][0]
    found |= {f"stream_{j}": sum(row) for j, row in enumerate(table, 1)}
    found["promised"] = 1 + sum(chance for chance, _ in likeliest_nodes(table, NODES))
    if len(right := torch.cat(early_right)):
        found["early_exit"] = float(right.mean())
    return found


def _table(rank: Tensor, candidates: int) -> list[list[float]]:
    """[γ][k] from the rank [N, γ] of each right token, k where it is no candidate; empty where there is nothing."""
    table: list[list[float]] = []
    alive = torch.ones(len(rank), dtype=torch.bool)
    for mine in rank.unbind(1) if len(rank) else ():
        counts = torch.bincount(mine[alive], minlength=candidates + 1)[:candidates]
        # None is ruled out for having been wrong every time.
        table.append([round((float(n) + 0.1) / (int(alive.sum()) + 1), 4) for n in counts])
        alive = alive & (mine < candidates)
    return table


def said(found: dict[str, Any]) -> str:
    """The figures of `acceptance` in words."""
    streams = ", ".join(f"{sum(row):.0%}" for row in found["acceptance"] or found["acceptance_sampled"])
    early = f"; early exit right {found['early_exit']:.0%}" if "early_exit" in found else ""
    return (
        f"first stream right {found['first']:.1%}; one of the candidates of each stream right, given those "
        f"before: {streams}; a tree of {NODES} nodes would give {found['promised']:.2f} tokens per call{early}"
    )


class StreamTrainer(Examined):
    """The streams' cross entropy, each stream's mean alike; the pruning map learns beside it, from the next token."""

    acceptance, said = staticmethod(acceptance), staticmethod(said)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Untouched: the mean over j of -log p(y_(t+j) | y_<t). Tuned (Eq. 5): -α0 log p(y_t | y_<t) of the main stream
        and αj times each stream's. The early exit's -log p(y_t | y_<t) is added: it shares nothing with the others."""
        with self.accelerator.autocast():
            logits, early, main = model(inputs)
        wanted = model.wanted(inputs)
        streams = torch.stack([_entropy(logits[:, :, j], wanted[:, :, j + 1]) for j in range(logits.shape[2])])
        if main is None:
            loss = streams.mean()
        else:
            following = inputs["input_ids"].gather(1, inputs["at"] + 1).where(inputs["counts"], -1)
            loss = ALPHA_MAIN * _entropy(main, following) + ALPHA_STREAM * streams.sum()
        if early is not None:
            loss = loss + _entropy(early, wanted[:, :, 0])
        return (loss, {"loss": loss}) if return_outputs else loss
