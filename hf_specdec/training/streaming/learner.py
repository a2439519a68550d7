"""Streams learn to foretell: stream j of every place where the target writes, the token j further on (Eq. 5)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...drafters.streaming import Streams, Upper, likeliest_nodes, with_streams
from ...target.masks import as_bias
from ..learning import Examined

NODES = 16
"""of the tree whose tokens per call an examination promises"""


class Learner(nn.Module):
    """Streams over the upper layers of a target, which are not trained and not saved with them."""

    def __init__(self, streams: Streams, upper: Upper, windows: dict[str, int | None], candidates: int) -> None:
        super().__init__()
        self.streams, self.candidates = streams, candidates
        self._target = (upper, windows)  # in a tuple, where torch does not look for modules

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Logits [B, c, γ, K] of the streams at the places that count, and [B, c, K] of the early exit."""
        (upper, windows), streams, at = self._target, self.streams, batch["at"]
        main = batch["states"]
        rows, width = main.shape[:2]
        seen = torch.ones(1, width, width, dtype=torch.bool, device=at.device).tril()
        seen, depth = with_streams(seen, torch.arange(width, device=at.device)[None], streams.gamma, at)
        chosen = main[torch.arange(rows, device=at.device)[:, None], at]
        kept = MainStream()
        with torch.no_grad():  # what is trained never reaches it
            mask = as_bias(seen[:, :width, :width], _distance(depth[:, :width]), windows, main.dtype)
            upper.run(main, mask, depth[:, :width], kept)
        states = streams.begin(chosen).to(main.dtype)
        mask = as_bias(seen[:, width:], _distance(depth)[:, width:], windows, main.dtype)
        with streams.beside(upper, 0, states.shape[1]):
            states = upper.run(states, mask, depth[:, width:], kept)
        logits = streams.head(upper, states.unflatten(1, (-1, streams.gamma)))
        if streams.pruning is None:
            return logits, None
        return logits, streams.head(upper, upper.after(chosen + streams.pruning(chosen).to(main.dtype)))

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


def collate(lessons: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Texts padded on the right, and the places from which the target wrote."""
    lengths = torch.tensor([len(lesson["input_ids"]) for lesson in lessons])
    starts = torch.tensor([int(lesson["start"]) - 1 for lesson in lessons])
    longest, most = int(lengths.max()), int((lengths - 1 - starts).max())
    states = lessons[0]["states"].new_zeros(len(lessons), longest - 1, lessons[0]["states"].shape[1])
    ids = torch.zeros(len(lessons), longest, dtype=torch.long)
    for b, lesson in enumerate(lessons):
        ids[b, : lengths[b]], states[b, : lengths[b] - 1] = lesson["input_ids"], lesson["states"]
    at = starts[:, None] + torch.arange(most)
    counts = at < lengths[:, None] - 1
    return {
        "input_ids": ids,
        "states": states,
        "lengths": lengths,
        "at": torch.where(counts, at, starts[:, None]),
        "counts": counts,
        "sampled": torch.stack([lesson["temperature"] for lesson in lessons]) > 0,
    }


class StreamTraining(Examined):
    """The streams' cross entropy, each stream's mean alike; the pruning map learns beside it, from the next token."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Mean over j of -log p(y_(t+j) | y_<t), with -log p(y_t | y_<t) of the early exit added."""
        with self.accelerator.autocast():
            logits, early = model(inputs)
        wanted = model.wanted(inputs)
        loss = torch.stack([_entropy(logits[:, :, j], wanted[:, :, j + 1]) for j in range(logits.shape[2])]).mean()
        if early is not None:
            loss = loss + _entropy(early, wanted[:, :, 0])
        return (loss, {"loss": loss}) if return_outputs else loss

    def examine(self, lessons: Any, rows: int) -> dict[str, Any]:
        return acceptance(self.model, lessons, rows)

    def said(self, found: dict[str, Any]) -> str:
        return said(found)


def _entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    known = wanted >= 0
    if not known.any():
        return logits.sum() * 0.0
    return cross_entropy(logits[known].float(), wanted[known])


@torch.no_grad()
def acceptance(model: Any, lessons: Any, rows: int) -> dict[str, Any]:
    """How often streams are right on texts.

    Returns:
        `acceptance` and `acceptance_sampled`, [γ][k] each: of the places where all streams before were right with one
        of their k candidates, the share where this candidate of this stream is; of greedy texts and of sampled ones.
        `first`: the share where the first stream's first choice is right, greedy; `promised`: tokens per call that a
        tree of 16 nodes promises in greedy text. `early_exit`: of the pruning map, where there is one.
    """
    was_training = model.training
    model.eval()
    ranks: list[Tensor] = []
    sampled: list[Tensor] = []
    early_right: list[Tensor] = [torch.zeros(0)]
    device = next(model.parameters()).device
    dtype = model._target[0].head.weight.dtype
    for at in range(0, len(lessons), rows):
        batch = collate([lessons[i] for i in range(at, min(at + rows, len(lessons)))])
        batch = {name: value.to(device) for name, value in batch.items()}
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits, early = model(batch)
        wanted = model.wanted(batch)
        best = logits.topk(model.candidates).indices
        hits = best == wanted[:, :, 1:, None]
        rank = torch.where(hits.any(-1), hits.float().argmax(-1), model.candidates)
        whole = batch["counts"] & (batch["at"] + model.streams.gamma + 1 < batch["lengths"][:, None])
        ranks.append(rank[whole].cpu())
        sampled.append(batch["sampled"][:, None].expand_as(whole)[whole].cpu())
        if early is not None:
            early_right.append((early.argmax(-1) == wanted[:, :, 0])[batch["counts"]].float().cpu())
    model.train(was_training)
    rank, is_sampled = torch.cat(ranks), torch.cat(sampled)
    found: dict[str, Any] = {
        "acceptance": _table(rank[~is_sampled], model.candidates),
        "acceptance_sampled": _table(rank[is_sampled], model.candidates),
    }
    found["first"] = found["acceptance"][0][0]
    found["promised"] = 1 + sum(chance for chance, _ in likeliest_nodes(found["acceptance"], NODES))
    if len(right := torch.cat(early_right)):
        found["early_exit"] = float(right.mean())
    return found


def _table(rank: Tensor, candidates: int) -> list[list[float]]:
    """[γ][k] from the rank [N, γ] of each right token, k where it is no candidate."""
    table, alive = [], torch.ones(len(rank), dtype=torch.bool)
    for mine in rank.unbind(1):
        counts = torch.bincount(mine[alive], minlength=candidates + 1)[:candidates]
        table.append([round(float(n) / max(1, int(alive.sum())), 4) for n in counts])
        alive = alive & (mine < candidates)
    return table


def said(found: dict[str, Any]) -> str:
    """The figures of `acceptance` in words."""
    streams = ", ".join(f"{sum(row):.0%}" for row in found["acceptance"])
    early = f"; early exit right {found['early_exit']:.0%}" if "early_exit" in found else ""
    return (
        f"first stream right {found['first']:.1%}; a candidate of each is, behind those before: {streams}; a tree of "
        f"{NODES} nodes promises {found['promised']:.2f} tokens per call{early}"
    )
