"""A batch whose rows are drafted for by several drafters: what each drafts is put together, what the target answers is
taken apart."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..protocol import Draft, Forward, Sequences
from ..transfer import moved, to_device
from ..verify.trial import Result, Trial
from .drafting import Drafting
from .rows import Row, Rows


@dataclass(eq=False)
class BatchPart:
    """The rows of one drafter in a round."""

    drafting: Drafting | None
    """None where nobody drafts for them"""
    places: list[int] = field(default_factory=list)
    """[B] in the batch"""
    rows: list[Row] = field(default_factory=list)
    """[B]"""
    fed: Draft = field(init=False)
    """what the target reads"""
    judged: Draft = field(init=False)
    """what is judged: that, or more where drafting went on meanwhile"""
    answered: list[int] | None = field(default=None, init=False)
    """[B] nodes that the forward answers for; None for all"""
    sound: bool = field(default=True, init=False)
    """whether its ids and probabilities were in range"""
    results: list[Result] = field(default_factory=list, init=False)
    """[B] what its rows gain"""

    def by_judge(self) -> list[list[int]]:
        """Which of its rows are judged together: those of equal settings."""
        found: dict[int, list[int]] = {}
        for i, row in enumerate(self.rows):
            found.setdefault(id(row.judge), []).append(i)
        return list(found.values())

    def trial(self, mine: list[int], forward: Forward, sequences: Sequences) -> Trial:
        """What the judge of some of its rows, which `sequences` shows, is asked about."""
        answer = rows_of_forward(forward, [self.places[i] for i in mine], self.judged.tokens.shape[1])
        answered = None if self.answered is None else [self.answered[i] for i in mine]
        return Trial(rows_of_draft(self.judged, mine), answer, sequences, answered)


def parts_of(rows: Rows) -> list[BatchPart]:
    """Who drafts for which rows; those for which nobody drafts are a part, too."""
    parts: dict[int, BatchPart] = {}
    for b, row in enumerate(rows.all):
        part = parts.setdefault(id(row.drafting), BatchPart(row.drafting))
        part.places.append(b)
        part.rows.append(row)
    return list(parts.values())


def together(parts: Sequence[BatchPart], rows: int, device: torch.device) -> Draft:
    """What the target is fed: the drafts of all rows, in their places."""
    if len(parts) == 1:
        return parts[0].fed
    width = max(part.fed.tokens.shape[1] for part in parts)
    tokens = torch.zeros(rows, width, dtype=torch.long, device=device)
    lengths, parents = [0] * rows, [list(range(-1, width - 1)) for _ in range(rows)]
    for part in parts:
        draft = part.fed
        draft.tokens = moved(draft.tokens, device)
        tokens[to_device(part.places, tokens.device), : draft.tokens.shape[1]] = draft.tokens
        for i, b in enumerate(part.places):
            lengths[b] = draft.lengths[i]
            if draft.parents is not None:
                parents[b] = [*draft.parents[i], *[-1] * (width - draft.tokens.shape[1])]
    trees = any(part.fed.parents is not None for part in parts)
    return Draft(tokens, lengths, parents if trees else None)


def in_order(parts: Sequence[BatchPart]) -> list[Result]:
    """What the rows of a batch gain."""
    if len(parts) == 1:
        return parts[0].results
    by_place = {b: result for part in parts for b, result in zip(part.places, part.results, strict=True)}
    return [by_place[b] for b in sorted(by_place)]


def rows_of_draft(draft: Draft, rows: Sequence[int]) -> Draft:
    """Some rows of a draft."""
    if len(rows) == len(draft.lengths):
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
        known=None if draft.known is None else [draft.known[b] for b in rows],
    )


def rows_of_forward(forward: Forward, rows: Sequence[int], width: int) -> Forward:
    """Some rows of a forward, whose drafts are so wide."""
    if len(rows) == len(forward.logits):
        return forward
    ends = forward.logits.shape[1] if forward.nodes is not None else width + 1
    index = to_device(list(rows), forward.logits.device)
    nodes = None if forward.nodes is None else forward.nodes[index]
    features = {name: states[index, :ends] for name, states in forward.features.items()}
    return Forward(forward.logits[index, :ends], nodes, features, forward.outputs)
