"""What a session hands over is held to its form before anything is done with it."""

from dataclasses import replace

import torch
from torch import Tensor

from ..budget import are_chains
from ..errors import shown
from ..protocol import Draft, DraftSession
from ..transfer import moved

MOST_FED, LEAST_FED = 4096, 16
"""nodes of one draft that go to the target: over all rows, and in each row, however many those are"""
MOST_SUCCESSORS = 64
"""of the target's tokens that verdicts carry for each place"""


def most_nodes(rows: int) -> int:
    """Nodes that each of so many rows may draft."""
    return max(MOST_FED // rows, LEAST_FED)


def successors_of(session: DraftSession, vocab: int) -> int:
    """How many of the target's likeliest tokens a session asks for at each place.

    Raises:
        ValueError: it is no number, or a large one: so many ids are read in every round.
    """
    count = session.likeliest
    if type(count) is not int or not 0 <= count <= MOST_SUCCESSORS:
        raise ValueError(f"likeliest must be a whole number from 0 to {MOST_SUCCESSORS}, got {count!r}")
    return min(count, vocab)


def in_form(draft: object, room: list[int], vocab: int) -> Draft:
    """Types and shapes, lengths cut to what was asked for; the values are checked with the verification's own transfer.

    Raises:
        ValueError, TypeError: it says what is wrong with the draft.
    """
    if not isinstance(draft, Draft):
        raise TypeError(f"a session must return a Draft, got {type(draft).__name__}")
    rows, tokens, counts, sources = len(room), draft.tokens, draft.lengths, list(draft.sources)
    if not _is_plain(tokens) or tokens.ndim != 2 or tokens.shape[0] != rows or len(counts) != rows:
        raise ValueError(
            f"a draft for {rows} rows needs tokens of shape [{rows}, any] and {rows} lengths, got shape "
            f"{tuple(tokens.shape)}"
        )
    width = tokens.shape[1]
    if sources and (len(sources) != rows or not all(type(name) is str for name in sources)):
        raise ValueError(f"sources must hold one string for each of {rows} rows, got {sources!r}")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens must be integers, got {tokens.dtype}")
    lengths = [int(length) for length in counts]
    if not all(0 <= length <= width for length in lengths):
        raise ValueError(f"lengths must be from 0 to {width}, the columns of tokens, got {lengths}")
    parents = None if draft.parents is None else _checked_parents(draft.parents, rows, width)
    if parents is None:
        lengths = [min(length, most) for length, most in zip(lengths, room, strict=True)]
    else:
        for b, depths in enumerate(Draft(tokens, lengths, parents).depths()):
            within = [depth <= room[b] for depth in depths[: lengths[b]]]
            lengths[b] = within.index(False) if False in within else lengths[b]
    probs, q = draft.token_probs, draft.q
    for name, values, shape in (("token_probs", probs, tokens.shape), ("q", q, (*tokens.shape, vocab))):
        if values is None:
            continue
        if not _is_plain(values) or values.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(values.shape)}")
        if not values.is_floating_point():
            raise ValueError(f"{name} must be floating point numbers, got {values.dtype}")
    survival = None if draft.survival is None else _checked_survival(draft.survival, lengths)
    return Draft(tokens, lengths, parents, probs, q, sources, survival)


def _checked_survival(survival: object, lengths: list[int]) -> list[list[float]]:
    lists = [[float(chance) for chance in row] for row in survival]  # type: ignore[attr-defined]
    if len(lists) != len(lengths) or not all(0 <= chance <= 1 for row in lists for chance in row):
        raise ValueError(f"survival must hold {len(lengths)} rows of chances from 0 to 1, got {shown(survival)}")
    if any(len(row) < length for row, length in zip(lists, lengths, strict=True)):
        raise ValueError(
            f"survival must have a chance for each of {lengths} nodes, got rows of {[len(row) for row in lists]}"
        )
    return [row[:length] for row, length in zip(lists, lengths, strict=True)]


def _is_plain(values: object) -> bool:
    """Whether this is a tensor with a value in every place."""
    return isinstance(values, Tensor) and values.layout == torch.strided and values.device.type != "meta"


def _checked_parents(parents: object, rows: int, width: int) -> list[list[int]]:
    """[B][K] on the host; a tensor is taken, too."""
    lists = parents.tolist() if isinstance(parents, Tensor) else [list(row) for row in parents]  # type: ignore[attr-defined]
    if len(lists) != rows or any(len(row) != width for row in lists):
        raise ValueError(
            f"parents must have {rows} rows of {width} nodes as tokens has, got rows of {[len(row) for row in lists]}"
        )
    if not all(type(parent) is int for row in lists for parent in row):
        raise ValueError("parents must be integers")
    if not all(-1 <= parent < i for row in lists for i, parent in enumerate(row)):
        raise ValueError("every parent must come before its child")
    return lists


def cut(draft: Draft, lengths: list[int]) -> Draft:
    """The first nodes of each row, and no columns beyond them."""
    width, parents = max(lengths), draft.parents
    if parents is not None:
        chains = are_chains([row[:length] for row, length in zip(parents, lengths, strict=True)])
        parents = None if chains else [row[:width] for row in parents]
    survival = draft.survival
    return replace(
        draft,
        tokens=draft.tokens[:, :width],
        lengths=lengths,
        parents=parents,
        survival=None if survival is None else [row[:n] for row, n in zip(survival, lengths, strict=True)],
        token_probs=None if draft.token_probs is None else draft.token_probs[:, :width],
        q=None if draft.q is None else draft.q[:, :width],
    )


def with_q(session: DraftSession, draft: Draft, device: torch.device, vocab: int) -> Draft:
    """The draft on the target's device, with q of the drafted tokens and whole: a rejection without the rest of q could
    not be made up for, so it is asked for before any test."""
    probs, q = draft.token_probs, draft.q
    if q is None and probs is not None:
        q = probs.new_zeros(*probs.shape, vocab, dtype=torch.float32)
        for b, length in enumerate(draft.lengths):
            for node in range(length):
                row = session.q(b, node)
                if row.shape != (vocab,):
                    raise ValueError(
                        f"q must have shape ({vocab},) for the target's {vocab} tokens, got {tuple(row.shape)}"
                    )
                q[b, node] = row.to(q)
    if probs is None and q is not None:
        probs = q.gather(2, moved(draft.tokens, q.device).long().clamp(0, vocab - 1)[..., None])[..., 0]
    return on_device(replace(draft, token_probs=probs, q=q), device)


def on_device(draft: Draft, device: torch.device) -> Draft:
    """The draft where the target's ids are, in the types that are reckoned with."""
    return replace(
        draft,
        tokens=moved(draft.tokens, device).long().clone(),  # the session may write on into its own
        token_probs=None if draft.token_probs is None else moved(draft.token_probs, device).float(),
        q=None if draft.q is None else moved(draft.q, device).float(),
    )
