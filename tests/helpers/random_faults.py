"""What a bad drafter may raise, answer, claim in a draft, and write into what it is handed: chosen by dice."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_specdec import SpeculationError
from hf_specdec.protocol import Draft

Dice = random.Random


class Unspeakable(Exception):
    """An error that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("planted in repr")

    __str__ = __repr__


class Unhashable(str):
    __hash__ = None  # type: ignore[assignment]


class Undecided:
    """Neither true nor false."""

    def __bool__(self) -> bool:
        raise RuntimeError("planted in bool")


def errors() -> list[Exception]:
    return [RuntimeError("planted"), SpeculationError("planted"), StopIteration(), KeyError(3), MemoryError(),
            AssertionError(), Unspeakable(), ValueError("long " * 5000), RecursionError(), TimeoutError()]  # fmt: skip


def nonsense(dice: Dice) -> Any:
    return dice.choice(
        [None, 3, -1, 2.5, float("nan"), "x", b"x", [], [[]], {}, {1: 2}, object(), Undecided(), 10**30, 1j, int,
         torch.ones(2), torch.tensor(float("nan")), torch.empty(0), np.float32("nan"), lambda *a, **k: None]
    )  # fmt: skip


# ---------------------------------------------------------------------- lies


def values(draft: Draft, dice: Dice) -> list[tuple[str, Any]]:
    """Fields of a draft, each with something that should not be in it."""
    tokens, shape, rows = draft.tokens, draft.tokens.shape, len(draft.lengths)
    spot = tokens.clone()
    if spot.numel():
        spot.view(-1)[dice.randrange(spot.numel())] = dice.choice([-1, 31, 10**6, 2**62, -(2**62)])
    bad_ids = [
        spot, tokens + 31, tokens - 31, tokens + 2**40, tokens.float(), tokens.bool(), tokens.to(torch.complex64),
        tokens.int(), tokens.tolist(), tokens.numpy(), tokens.flatten(), tokens[:-1], tokens[None], tokens.t(),
        torch.cat([tokens, tokens]), tokens.to("meta"), tokens.to_sparse(), tokens.to(torch.uint8),
        tokens.expand(2, *shape), torch.empty(0), torch.nn.functional.pad(tokens, (0, 9), value=-7),
    ]  # fmt: skip
    lengths = draft.lengths
    bad_lengths = [
        [n + 9 for n in lengths], [-1] * rows, lengths[:-1], [*lengths, 1], torch.tensor(lengths), np.array(lengths),
        [np.int32(n) for n in lengths], [bool(n) for n in lengths], [float(n) for n in lengths], ["1"] * rows,
        [float("nan")] * rows, [float("inf")] * rows, [None] * rows, (n for n in lengths), [[n] for n in lengths],
        [10**30] * rows, [2**63] * rows, dict.fromkeys(range(rows), 1),
    ]  # fmt: skip
    bad_probs = [
        torch.full(shape, float(x)) for x in ("nan", "inf", "-inf", "0", "-0.5", "7", "1.5", "1e-40", "0.3")
    ] + [
        torch.full(shape, 0.5, dtype=kind) for kind in (torch.complex64, torch.half, torch.double)
    ] + [torch.ones(shape, dtype=torch.long), torch.ones(rows, 99), [[0.5]], 0.5,
         torch.full(shape, 0.5).to("meta"),
         torch.full(shape, 0.5, requires_grad=True), np.full(shape, 0.5), torch.full(shape, 0.5).to_sparse(),
    ]  # fmt: skip
    whole = (*shape, 31)
    bad_q = [torch.full(whole, float(x)) for x in ("nan", "inf", "0", "-0.1", "7", "0.0323")] + [
        torch.ones(*shape, 30), torch.ones(*shape), torch.ones(whole, dtype=torch.complex64),
        torch.ones(whole, dtype=torch.long), torch.ones(31), torch.full(whole, 0.5).to("meta"), [0.5],
        torch.full(whole, 1 / 31).to_sparse()]  # fmt: skip
    bad_parents = [
        torch.full(shape, 50), torch.full(shape, -1.0), torch.full(shape, -2), torch.zeros(1, 1), [[0]] * rows,
        [[-1] * shape[1]] * (rows + 1), [list(range(shape[1]))] * rows, [["x"] * shape[1]] * rows, [[None]], 5,
        [[True] * shape[1]] * rows, np.full(shape, -1), torch.full(shape, -1), [[-1.0] * shape[1]] * rows, "tree",
        [(n for n in range(-1, shape[1] - 1))] * rows, [[-(10**30)] * shape[1]] * rows,
    ]  # fmt: skip
    bad_sources = [
        ["x"] * (rows + 1), [[]] * rows, [Unhashable("x")] * rows, [None] * rows, "x" * rows, 7, [{}] * rows,
        torch.ones(rows), [np.str_("x")] * rows, dict.fromkeys("abc"[:rows]), Undecided(), ["x" * 10**5] * rows,
    ]  # fmt: skip
    fields = {"tokens": bad_ids, "lengths": bad_lengths, "token_probs": bad_probs, "q": bad_q, "parents": bad_parents}
    return [(name, dice.choice(choice)) for name, choice in (fields | {"sources": bad_sources}).items()]


def lie(draft: Draft, dice: Dice) -> Any:
    """The draft, with one field untrue; or no draft at all."""
    if dice.random() < 0.1:
        return nonsense(dice)
    if dice.random() < 0.05:
        draft.__class__ = type("Fickle", (Draft,), {"lengths": property(lambda self: dice.choice([[1], [9, 9, 9]]))})
        return draft
    name, value = dice.choice(values(draft, dice))
    setattr(draft, name, nonsense(dice) if dice.random() < 0.1 else value)
    return draft


# ---------------------------------------------------------------------- meddling


def spoil(thing: Any, dice: Dice, depth: int = 0) -> None:
    """Write into a thing, in place, whatever it is: its attributes, items and values."""
    if isinstance(thing, Tensor):
        acts: list[Callable[[], Any]] = [
            lambda: thing.fill_(10**9 if not thing.is_floating_point() else float("nan")),
            lambda: thing.zero_(),
            lambda: thing.resize_(0),
            lambda: thing.resize_(3, 5000),
            lambda: thing.t_(),
            lambda: setattr(thing, "data", torch.zeros(1)),
        ]
    elif isinstance(thing, list):
        acts = [
            thing.clear,
            lambda: thing.append(dice.choice(["x", 10**9, None])),
            lambda: thing.__setitem__(slice(None), ["x"] * len(thing)),
            lambda: [spoil(x, dice, depth + 1) for x in thing],
        ]
    elif isinstance(thing, dict):
        acts = [thing.clear, lambda: [spoil(x, dice, depth + 1) for x in thing.values()]]
    elif hasattr(thing, "__dict__") and not isinstance(thing, (torch.nn.Module, type)) and depth < 5:
        names = [name for name in vars(thing) if name != "target"]
        name = dice.choice(names or ["x"])
        acts = [
            lambda: setattr(thing, name, nonsense(dice)),
            lambda: [spoil(getattr(thing, name), dice, depth + 1) for name in names],
            lambda: spoil(getattr(thing, name), dice, depth + 1),
            lambda: delattr(thing, name),
        ]
    else:
        return
    try:
        dice.choice(acts)()
    except Exception:  # what cannot be written to is left alone
        return
