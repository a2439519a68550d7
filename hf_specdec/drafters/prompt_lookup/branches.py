"""From copied text to a `Draft`: what may not be proposed is cut, branches that begin alike are joined."""

from collections.abc import Iterable, Sequence

import torch

from ..base import Draft, DraftContext


def cut(tokens: Iterable[int], context: DraftContext) -> list[int]:
    """`tokens` up to the first EOS, which stays, or to the first id that the target does not have."""
    kept = []
    for token in tokens:
        if not 0 <= token < context.vocab_size:
            break
        kept.append(token)
        if token in context.eos_token_ids:
            break
    return kept


def join_branches(branches: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Merge branches into one tree.

    Returns:
        tokens and parents of its nodes, the first branch first; a parent comes before its children, -1 is the root.
    """
    tokens: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) → node
    for branch in branches:
        node = -1
        for token in branch:
            child = nodes.setdefault((node, token), len(tokens))
            if child == len(tokens):
                tokens.append(token)
                parents.append(node)
            node = child
    return tokens, parents


def draft_from_branches(rows: Sequence[Sequence[Sequence[int]]], context: DraftContext) -> Draft:
    """A point-mass draft from each row's branches; a chain where no row has more than one."""
    if all(len(branches) <= 1 for branches in rows):
        return Draft.from_lists([branches[0] if branches else [] for branches in rows], context.device)
    trees = [join_branches(branches) for branches in rows]
    draft = Draft.from_lists([tokens for tokens, _ in trees], context.device)
    # Padding nodes hang on the root: -1 is a valid parent everywhere.
    parents = torch.full_like(draft.tokens, -1)
    for b, (_, row_parents) in enumerate(trees):
        parents[b, : len(row_parents)] = torch.tensor(row_parents, dtype=torch.long)
    draft.parents = parents
    return draft
