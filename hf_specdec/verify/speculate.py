"""`speculate`: Algorithm 1 for whatever is drawn and gone on from. Text is one case of it."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import SpeculationError, shown
from ..theory import SUM_TOLERANCE
from .verification import accepts, draw, residual

X = TypeVar("X")
Y = TypeVar("Y", bound=Hashable)


def speculate(
    f: Callable[[X], Mapping[Y, float]],
    g: Callable[[X, Y], X],
    q: Callable[[X], Mapping[Y, float]],
    x: X,
    gamma: int = 1,
) -> Iterator[tuple[Y, X]]:
    """Draw y ~ f(x), go on to g(x, y), and so on, with f and g at work in parallel (Leviathan et al. 2023, section 6).

    While f weighs what may come at x, g goes on from what q guesses, gamma steps ahead, and f is asked at each of them.
    Then the guesses are tested as in Algorithm 1, so every y is distributed as f says, whatever q guesses. Where f is
    the target, q the draft, and g appends a token to a text, this is speculative decoding.

    The walk has no end: take as many steps as needed. `torch.manual_seed` fixes it.

    Args:
        f: the chances of each y at x, which sum to 1. It runs in threads, gamma + 1 calls at once. A call that has
            begun runs to its end, even where its guess is given up.
        g: the x behind y. It is called for guesses that are given up, too, so it must leave the old x as it is.
        q: a cheap guess at f, of the same form.
        x: where to begin.
        gamma: γ, how many steps are guessed in a round; 0 guesses none.

    Yields:
        y, and the x behind it.

    Raises:
        SpeculationError: gamma is negative, or f or q gives no distribution.
    """
    if not gamma >= 0:
        raise SpeculationError(f"gamma is a number of steps and must be 0 or more, got {shown(gamma)}")
    dice = torch.Generator().manual_seed(int(torch.randint(2**62, (), device="cpu")))
    with ThreadPoolExecutor(gamma + 1) as threads:
        while True:
            guesses, ahead, asked = [], [x], [threads.submit(f, x)]
            for _ in range(gamma):
                q_x = _checked("q", q(ahead[-1]))
                guesses.append((_drawn(q_x, dice), q_x))
                ahead.append(g(ahead[-1], guesses[-1][0]))
                asked.append(threads.submit(f, ahead[-1]))
            for (guess, q_x), answer, behind in zip(guesses, asked, ahead[1:], strict=False):
                y = _sampled(_checked("f", answer.result()), q_x, guess, dice)
                x = behind if y == guess else g(x, y)
                yield y, x
                if y != guess:
                    break
            else:
                y = _drawn(_checked("f", asked[gamma].result()), dice)
                x = g(x, y)
                yield y, x
            for answer in asked:  # those behind a guess that was given up
                answer.cancel()


def _sampled(p: Mapping[Y, float], q: Mapping[Y, float], guess: Y, dice: torch.Generator) -> Y:
    """Speculative sampling (section 2.3): the guess, which was drawn from q, where it passes; else what p has left."""
    px, qx = torch.tensor([p.get(guess, 0.0), q[guess]], dtype=torch.float64, device="cpu")
    if accepts(px, qx, _uniform(dice)):
        return guess
    left = residual(_tensor(p), _tensor({y: q.get(y, 0.0) for y in p}))
    return list(p)[int(draw(left, _uniform(dice)))]


def _drawn(p: Mapping[Y, float], dice: torch.Generator) -> Y:
    return list(p)[int(draw(_tensor(p), _uniform(dice)))]


def _tensor(p: Mapping[Y, float]) -> Tensor:
    """[1, number of objects]"""
    return torch.tensor([list(p.values())], dtype=torch.float64, device="cpu")


def _uniform(dice: torch.Generator) -> Tensor:
    """[1] in [0, 1)"""
    return torch.rand(1, dtype=torch.float64, generator=dice, device="cpu")


def _checked(name: str, p: Mapping[Y, float]) -> Mapping[Y, float]:
    if not (all(chance >= 0 for chance in p.values()) and abs(math.fsum(p.values()) - 1) <= SUM_TOLERANCE):
        raise SpeculationError(
            f"{name} must give chances of 0 or more that sum to 1, got {shown(dict(p))}; divide them by their sum"
        )
    return p
