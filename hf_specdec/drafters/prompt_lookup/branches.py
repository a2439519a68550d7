"""What may not be proposed of copied text is cut."""

from collections.abc import Iterable, Sequence

import torch

from ...protocol import DraftContext, Sequences
from ...transfer import to_device

Branches = list[list[int]]
"""Continuations of one row, the likeliest first."""


def cut(rows: Sequence[Iterable[Iterable[int]]], sequences: Sequences, context: DraftContext) -> list[Branches]:
    """What of each row's branches may be proposed: up to an EOS, and before the first token that is ruled out."""
    cut_rows = [[kept for branch in branches if (kept := cut_at_end(branch, context))] for branches in rows]
    if context.forbids is None or not any(cut_rows):
        return cut_rows
    return _cut_at_forbidden(cut_rows, sequences, context)


def _cut_at_forbidden(rows: list[Branches], sequences: Sequences, context: DraftContext) -> list[Branches]:
    """All positions of all branches are asked about at once."""
    assert context.forbids is not None
    flat = [(b, branch) for b, branches in enumerate(rows) for branch in branches]
    ends = [sequences.lengths[b] for b, _ in flat]
    room = max(end + len(branch) for end, (_, branch) in zip(ends, flat, strict=True))
    ids = sequences.ids[to_device([b for b, _ in flat], sequences.ids.device), :room]
    ids = torch.nn.functional.pad(ids, (0, room - ids.shape[1]))
    for i, (end, (_, branch)) in enumerate(zip(ends, flat, strict=True)):
        ids[i, end : end + len(branch)] = to_device(branch, ids.device)
    where = [(i, ends[i] + depth, token) for i, (_, branch) in enumerate(flat) for depth, token in enumerate(branch)]
    owners, lengths, tokens = zip(*where, strict=True)
    forbidden = iter(context.forbids(ids, owners, lengths, tokens))
    kept: list[Branches] = [[] for _ in rows]
    for b, branch in flat:
        verdicts = [*(next(forbidden) for _ in branch), True]
        if allowed := branch[: verdicts.index(True)]:
            kept[b].append(allowed)
    return kept


def cut_at_end(tokens: Iterable[int], context: DraftContext) -> list[int]:
    """`tokens` up to the first EOS, which stays, or to the first id that the target does not have."""
    kept = []
    for token in tokens:
        if not 0 <= token < context.vocab_size:
            break
        kept.append(token)
        if token in context.eos_token_ids:
            break
    return kept
