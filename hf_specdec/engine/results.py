"""What a round gave each row, and how its drafter is told."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from ..protocol import Draft, Forward, Verdict
from ..transfer import to_device
from .outputs import along_paths


@dataclass
class Result:
    """What a round gave a row."""

    drafted: int
    """draft tokens that were verified, one below the other"""
    path: list[int]
    """the accepted nodes of its draft, from the root down"""
    tokens: list[int]
    """appended: the accepted ones, then the target's own; cut where the row stopped"""
    emitted: int
    """of those the ones that are no padding"""
    likeliest: list[tuple[int, list[int]]] = field(default_factory=list)
    """as in `Verdict`"""

    @property
    def kept(self) -> list[int]:
        """The accepted nodes that stay in the cache: what was appended last is fed again."""
        return self.path[: len(self.tokens) - 1]


def depths(draft: Draft) -> list[int]:
    """[B] how many of a draft's tokens stand one below the other."""
    return [max(below[:n], default=0) for below, n in zip(draft.depths(), draft.lengths, strict=True)]


def verdict_of(
    rows: Sequence[int], stopped: Sequence[bool], draft: Draft, forward: Forward, results: Sequence[Result]
) -> Verdict:
    """What a session is told of its rows' results; times are filled in by who took them.

    Args:
        rows: [B] their numbers.
        stopped: [B] whether each is finished.
    """
    verdict = Verdict(
        rows=list(rows),
        drafted=[result.drafted for result in results],
        accepted=[len(result.path) for result in results],
        # A row without a token to draw has failed. Its drafter is told of a token all the same.
        tokens=[[max(token, 0) for token in result.tokens] for result in results],
        stopped=list(stopped),
        width=forward.logits.shape[1],
        seconds=0.0,
        draft=replace(draft),
        paths=[result.path for result in results],
        nodes=forward.nodes,
        likeliest=[result.likeliest for result in results] if any(result.likeliest for result in results) else [],
    )
    verdict.features = along_paths(forward, draft, verdict)
    return verdict


def rows_of_draft(draft: Draft, rows: Sequence[int]) -> Draft:
    """Some rows of a draft."""
    if list(rows) == list(range(len(draft.lengths))):
        return draft
    index = to_device(list(rows), draft.tokens.device)

    def mine(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[index]

    return Draft(
        draft.tokens[index],
        [draft.lengths[b] for b in rows],
        None if draft.parents is None else [draft.parents[b] for b in rows],
        mine(draft.token_probs),
        mine(draft.q),
        [draft.sources[b] for b in rows] if draft.sources else [],
    )


def rows_of_forward(forward: Forward, rows: Sequence[int], width: int) -> Forward:
    """Some rows of a forward, whose drafts are so wide."""
    if list(rows) == list(range(len(forward.logits))):
        return forward
    ends = forward.logits.shape[1] if forward.nodes is not None else width + 1
    index = to_device(list(rows), forward.logits.device)
    nodes = None if forward.nodes is None else forward.nodes[index]
    features = {name: states[index, :ends] for name, states in forward.features.items()}
    return Forward(forward.logits[index, :ends], nodes, features, forward.outputs)
