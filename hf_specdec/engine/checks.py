"""What a drafter hands over is checked for its form before anything is done with it: drafts, forwards, corrections.

Ids and probabilities themselves are checked where the verification reads them (`verify.drafts.is_sound`), so that a GPU
is waited for once.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..budget import are_chains
from ..errors import shown
from ..protocol import Draft, Forward
from ..session import DraftSession
from ..transfer import moved

MOST_FED, LEAST_FED = 4096, 16
"""nodes of one draft that go to the target: over all rows, and in each row, however many those are"""
MOST_SUCCESSORS = 64
"""of the target's likeliest tokens that verdicts carry for each place: so many ids are read in every round"""


class Unfit(ValueError):
    """Something that a drafter gave is not what was asked for."""


def expect(fine: bool, name: str, allowed: str, got: object) -> None:
    """Refuse what is not fine.

    Raises:
        Unfit: with the name, what is allowed, and what was got.
    """
    if not fine:
        told = f"{got.dtype} of shape {list(got.shape)}" if isinstance(got, Tensor) else shown(got)
        raise Unfit(f"{name} must be {allowed}, got {told}")


def whole(name: str, value: Any, least: int, most: int) -> int:
    """The value, if it is a whole number in this range."""
    expect(type(value) is int and least <= value <= most, name, f"a whole number from {least} to {most}", value)
    return value


def tensor(name: str, values: Any, shape: Sequence[int | None], integers: bool = False) -> Tensor:
    """The values, if they are a dense tensor of this kind and shape; None in the shape allows any size."""
    fine = isinstance(values, Tensor) and values.layout == torch.strided
    fine = fine and len(values.shape) == len(shape)
    fine = fine and all(size in (None, n) for size, n in zip(shape, values.shape, strict=True))
    fine = fine and (values.dtype in (torch.int32, torch.int64) if integers else values.is_floating_point())
    expect(fine, name, f"a tensor of {'integers' if integers else 'floats'} of shape {list(shape)}", values)
    return values


def most_nodes(rows: int) -> int:
    """Nodes that each of so many rows may draft."""
    return max(MOST_FED // rows, LEAST_FED)


# ---------------------------------------------------------------------- drafts


def checked_draft(draft: Draft, room: Sequence[int], vocab: int) -> Draft:
    """A draft in form. In each row it ends before the first node that is deeper than there is room for.

    Raises:
        Unfit, or whatever comes of reading something else than a draft.
    """
    expect(isinstance(draft, Draft), "a draft", "a Draft", draft)
    rows, sources = len(room), [str(name) for name in draft.sources]
    tokens = tensor("tokens", draft.tokens, (rows, None), integers=True)
    width, lengths = tokens.shape[1], [int(length) for length in draft.lengths]
    fine = len(lengths) == rows and all(0 <= length <= width for length in lengths)
    expect(fine, "lengths", f"{rows} numbers from 0 to {width}, the columns of tokens", lengths)
    parents = None if draft.parents is None else _parents(draft.parents, rows, width)
    for b, depths in enumerate(Draft(tokens, lengths, parents).depths()):
        lengths[b] = next((i for i in range(lengths[b]) if depths[i] > room[b]), lengths[b])
    expect(len(sources) in (0, rows), "sources", f"empty, or {rows} strings", sources)
    survival = None if draft.survival is None else [[float(chance) for chance in row] for row in draft.survival]
    if survival is not None:
        fine = len(survival) == rows and all([0 <= chance <= 1 for row in survival for chance in row])
        fine = fine and all(len(row) >= length for row, length in zip(survival, lengths, strict=True))
        expect(fine, "survival", f"a chance from 0 to 1 for each of {lengths} nodes", survival)
    probs = None if draft.token_probs is None else tensor("token_probs", draft.token_probs, (rows, width))
    q = None if draft.q is None else tensor("q", draft.q, (rows, width, vocab))
    return Draft(tokens, lengths, parents, probs, q, sources, survival)


def _parents(parents: Any, rows: int, width: int) -> list[list[int]]:
    """[B][K] on the host; a tensor is taken, too."""
    lists = parents.tolist() if isinstance(parents, Tensor) else [list(row) for row in parents]
    fine = len(lists) == rows and all(len(row) == width for row in lists)
    fine = fine and all([type(parent) is int and -1 <= parent < i for row in lists for i, parent in enumerate(row)])
    expect(fine, "parents", f"{rows} rows of {width} integers, each -1 or an earlier node", lists)
    return lists


def cut(draft: Draft, lengths: list[int]) -> Draft:
    """The first nodes of each row, and no columns beyond them."""
    width, parents = max(lengths), draft.parents
    if lengths == draft.lengths and width == draft.tokens.shape[1]:
        return draft
    if parents is not None:
        chains = are_chains([row[:length] for row, length in zip(parents, lengths, strict=True)])
        parents = None if chains else [row[:width] for row in parents]
    return replace(
        draft,
        tokens=draft.tokens[:, :width],
        lengths=lengths,
        parents=parents,
        survival=None,  # of no more use: it said where to cut
        token_probs=None if draft.token_probs is None else draft.token_probs[:, :width],
        q=None if draft.q is None else draft.q[:, :width],
    )


def with_q(session: DraftSession, draft: Draft, vocab: int) -> Draft:
    """The draft with q of its tokens, and q in whole: it is asked for before any test, as a rejection could not be made
    up for without it."""
    probs, q = draft.token_probs, draft.q
    if q is None and probs is not None:
        q = probs.new_zeros(*probs.shape, vocab, dtype=torch.float32)
        for b, length in enumerate(draft.lengths):
            for node in range(length):
                q[b, node] = tensor("q", session.q(b, node), (vocab,))
    if probs is None and q is not None:
        probs = q.gather(2, moved(draft.tokens, q.device).long().clamp(0, vocab - 1)[..., None])[..., 0]
    return replace(draft, token_probs=probs, q=q)


def on_device(draft: Draft, device: torch.device) -> Draft:
    """The draft where the target's ids are, in the types that are reckoned with."""
    return replace(
        draft,
        tokens=moved(draft.tokens, device).long().clone(),  # the session may write on into its own
        token_probs=None if draft.token_probs is None else moved(draft.token_probs, device).float(),
        q=None if draft.q is None else moved(draft.q, device).float(),
    )


# ---------------------------------------------------------------------- forwards


def checked_forward(answer: Forward, rows: int, width: int, vocab: int) -> Forward:
    """A forward's answer over tokens [rows, width]. What it names that is no node becomes the nearest one.

    Raises:
        Unfit, or whatever comes of reading something else than a forward.
    """
    logits = tensor("logits", answer.logits, (rows, None, vocab))
    places = whole("places of logits", logits.shape[1], 1, width)
    if answer.nodes is not None:
        nodes = tensor("nodes", answer.nodes, (rows, places - 1), integers=True)
        answer.nodes = nodes.long().clamp(-1, width - 2)
    for name, states in answer.features.items():  # those of a prompt have places of their own
        tensor(f"features[{name}]", states, (rows, places if width > 1 else None, None))
    return answer
