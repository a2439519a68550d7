"""One forward over all rows, and what each of several sessions and judges has to do with it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..protocol import Draft, Forward, Verdict
from ..transfer import to_device
from ..verify.verification import NOTHING
from .outputs import along_paths


@dataclass
class Result:
    """What a round gave a row."""

    drafted: int
    """draft tokens that were verified, one below the other"""
    path: list[int]
    """of its draft's nodes those that were accepted"""
    tokens: list[int]
    likeliest: list[tuple[int, list[int]]]
    """as in `Verdict`"""
    stopped: bool = False

    def end(self, tokens: int, stopped: bool) -> None:
        """The row has taken so many of the tokens."""
        self.tokens, self.path, self.stopped = self.tokens[:tokens], self.path[:tokens], stopped
        if NOTHING in self.tokens:  # the row has failed: whoever is told of it is told of a token all the same
            self.tokens = [max(token, 0) for token in self.tokens]


def together(drafts: Sequence[Draft], places: Sequence[Sequence[int]], device: torch.device) -> Draft:
    """What the target is fed: the drafts of all rows, which stand at these places of the batch."""
    if len(drafts) == 1:
        return drafts[0]
    rows, width = sum(map(len, places)), max(draft.tokens.shape[1] for draft in drafts)
    tokens = torch.zeros(rows, width, dtype=torch.long, device=device)
    lengths, parents = [0] * rows, [list(range(-1, width - 1)) for _ in range(rows)]
    for draft, mine in zip(drafts, places, strict=True):
        tokens[to_device(list(mine), device), : draft.tokens.shape[1]] = draft.tokens
        for i, b in enumerate(mine):
            lengths[b] = draft.lengths[i]
            if draft.parents is not None:
                parents[b] = [*draft.parents[i], *[-1] * (width - draft.tokens.shape[1])]
    trees = any(draft.parents is not None for draft in drafts)
    return Draft(tokens, lengths, parents if trees else None)


def of_draft(draft: Draft, places: Sequence[int]) -> Draft:
    """Some rows of a draft of point masses."""
    if list(places) == list(range(len(draft.lengths))):
        return draft
    parents = None if draft.parents is None else [draft.parents[b] for b in places]
    tokens = draft.tokens[to_device(list(places), draft.tokens.device)]
    return Draft(tokens, [draft.lengths[b] for b in places], parents)


def of_forward(forward: Forward, places: Sequence[int], width: int) -> Forward:
    """Some rows of a forward, whose drafts are so wide."""
    everybody = list(places) == list(range(len(forward.logits)))
    ends = forward.logits.shape[1] if forward.nodes is not None else width + 1
    if everybody and ends == forward.logits.shape[1]:
        return forward
    index = to_device(list(places), forward.logits.device)

    def mine(states: Tensor) -> Tensor:
        return states[index, :ends]

    nodes = None if forward.nodes is None else forward.nodes[index]
    return Forward(mine(forward.logits), nodes, {name: mine(states) for name, states in forward.features.items()})


def verdict_of(rows: list[int], draft: Draft, forward: Forward, results: Sequence[Result], seconds: float) -> Verdict:
    """What a session is told of its rows' results."""
    verdict = Verdict(
        rows=rows,
        drafted=[result.drafted for result in results],
        accepted=[len(result.path) for result in results],
        tokens=[result.tokens for result in results],
        stopped=[result.stopped for result in results],
        width=forward.logits.shape[1],
        seconds=seconds,
        draft=replace(draft),
        paths=[result.path for result in results],
        nodes=forward.nodes,
        likeliest=[result.likeliest for result in results] if any(result.likeliest for result in results) else [],
    )
    verdict.features = along_paths(forward, draft, verdict)
    return verdict
