"""`Copies`: what followed the same words before, as nodes of a tree, with the chance that it follows again."""

from bisect import bisect
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from ...budget import Acceptance, Evidence, Tree
from ...protocol import DraftContext, Sequences
from ...transfer import to_device
from .index import LookupIndex
from .source import Source

LONGER = (12, 16, 24, 32, 48, 64)
"""Lengths of a match from which on its tokens are counted apart: a copy that was right for long seldom ends."""
LONGEST_MATCH = LONGER[-1]

Branches = list[list[int]]
"""Continuations of one row, the likeliest first."""


class CopyOptions(Protocol):
    """A config's options for copies."""

    max_draft_tokens: int
    tokens_per_match: int
    min_match: int
    max_match: int
    num_branches: int


class Copies(Source):
    """One index per row, fed with accepted tokens only."""

    name, kind = "copied", "prompt_lookup"

    def __init__(self, context: DraftContext, config: CopyOptions, acceptance: Acceptance) -> None:
        self.context, self.config, self.acceptance = context, config, acceptance
        self.indexes: dict[int, LookupIndex] = {}
        self._read: dict[int, int] = {}
        """tokens that an encoder was given for a row, which come before the text: summaries and edits copy them"""

    def join(self, trees: Sequence[Tree], sequences: Sequences, room: list[int]) -> None:
        """Add each row's copies to its tree."""
        for tree, match, copies in zip(trees, *self.found(sequences, room), strict=True):
            for i, copied in enumerate(copies):
                add_copy(tree, copied, match, self.config.max_match, self.acceptance, i)

    def join_behind(self, tree: Tree, node: int, path: Sequence[int], row: int, room: int) -> None:
        """Add what followed earlier where the text stood as it does behind this node of a row's tree."""
        if self.context.forbids is not None:  # it would have to be asked about every place anew
            return
        match, copies = self._copies(self.indexes[row], room, 1, path)
        if match > 1 and copies:
            copied = cut_at_end(copies[0], self.context)
            add_copy(tree, copied, match, self.config.max_match, self.acceptance, behind=node)

    def found(self, sequences: Sequences, room: list[int]) -> tuple[list[int], list[Branches]]:
        """Per row: how many tokens of its end were met before, and what to draft behind it, the likeliest first."""
        wanted = self.config.num_branches if self.context.trees else 1
        self.indexes = sequences.here(self.indexes)
        matches, branches = [], []
        for row, tokens, most in zip(sequences.rows, sequences.tokens, room, strict=True):
            match, copies = self._copies(self._index(row, tokens), most, wanted)
            branches.append(copies)
            matches.append(match)
        return matches, cut(branches, sequences, self.context)

    def _index(self, row: int, tokens: list[int]) -> LookupIndex:
        """The row's index, brought up to date with its accepted tokens."""
        if row not in self.indexes:
            self.indexes[row] = LookupIndex(self.config.max_match)
            self.indexes[row].extend(self.context.read(row))
            self._read[row] = len(self.indexes[row])
        index = self.indexes[row]
        index.extend(tokens[len(index) - self._read[row] :])
        return index

    def _copies(
        self, index: LookupIndex, room: int, wanted: int, drafted: Sequence[int] = ()
    ) -> tuple[int, list[list[int]]]:
        match = index.longest_match(self.config.min_match, wanted, drafted)
        if not match.positions:
            return 0, []
        met = index.agreed(match, LONGEST_MATCH, drafted)
        length = min(self.config.max_draft_tokens, self.config.tokens_per_match * met, room)
        # The likeliest at full length, the i-th at 1/i of it.
        places = enumerate(match.positions)
        return met, [index.copy_from(place, length // (i + 1), drafted) for i, place in places]


def add_copy(
    tree: Tree,
    copied: Sequence[int],
    match: int,
    max_match: int,
    acceptance: Acceptance,
    branch: int = 0,
    behind: int = -1,
    source: str = Copies.name,
) -> None:
    """Add what stood behind an earlier occurrence of the last `match` tokens of the path down to `behind`.

    A copied token that was right makes the match longer: the next one is judged by the longer match.
    """
    node = behind
    for met, token in enumerate(copied, start=match):
        length = met if met < max_match else max_match + bisect(LONGER, met)
        evidence = Evidence.of(source, min(branch, 1), length)
        acceptance.add(tree, node, [(token, acceptance.chance(evidence, guess(met, branch)), (evidence,))])
        node = tree.at[node, token]


def guess(match: int, branch: int = 0) -> float:
    """The chance of a copied token before anything was measured; a second continuation's is half as large."""
    return match / (match + 2) / (1 + branch)


def cut(rows: Sequence[Iterable[Iterable[int]]], sequences: Sequences, context: DraftContext) -> list[Branches]:
    """What of each row's branches may be proposed: up to an EOS, and before the first token that is ruled out."""
    cut_rows = [[kept for branch in branches if (kept := cut_at_end(branch, context))] for branches in rows]
    if context.forbids is None or not any(cut_rows):
        return cut_rows
    return _cut_at_forbidden(cut_rows, sequences, context)


def _cut_at_forbidden(rows: list[Branches], sequences: Sequences, context: DraftContext) -> list[Branches]:
    """Cut each branch before its first forbidden token. All places of all branches are asked about in one call."""
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
