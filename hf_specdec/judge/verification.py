"""Which drafted tokens are kept: pure tensor functions over distributions, nothing of models, caches or drafters.

Everything rests on one reading of Leviathan §2.2: greedy decoding is sampling from a distribution with all its mass
on one token, so the functions below speak of p and q alone. All probabilities are float32, all tests strict.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def distribution(scores: Tensor) -> Tensor:
    """p from processed scores [..., V]: a float32 softmax that is never NaN (a row without mass is uniform)."""
    probs = torch.softmax(scores.float(), dim=-1)
    return torch.nan_to_num_(probs, nan=1.0 / scores.shape[-1])


def draw(p: Tensor, u: Tensor) -> Tensor:
    """Draw one token per row of p [N, V] with the uniform numbers u [N] in [0, 1): the inverse of the cumulated p.

    Never a token of probability 0: the drawn one is the first whose cumulated mass exceeds u.
    """
    mass = p.double().cumsum(-1)
    total = mass[:, -1:].contiguous()
    tokens = torch.searchsorted(mass, u.double()[:, None] * total, right=True)
    last = torch.searchsorted(mass, total)  # where rounding made u * total reach the total
    return torch.minimum(tokens, last)[:, 0]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """p'(x) = norm(max(0, p(x) - q(x))), rows [N, V] (Algorithm 1).

    Where nothing is left (p equals q up to rounding, so that a rejection was rounding too) it is p itself.
    """
    left = torch.nan_to_num(p - q, nan=0.0, posinf=0.0, neginf=0.0).clamp_min(0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.clamp_min(torch.finfo(left.dtype).tiny), p)


def accepts(p: Tensor, q: Tensor, r: Tensor | float) -> Tensor:
    """The test of Algorithm 1, r < p(x)/q(x), for the probabilities of drafted tokens; any shape, strict.

    Written without the division: at r = 0 and p = 0 it rejects, as it must.
    """
    return r * q < p


def accepted_lengths(passed: Tensor, lengths: Tensor) -> Tensor:
    """n of Algorithm 1: how many leading tests [B, K] passed, counting the first `lengths` [B] only."""
    counted = torch.arange(passed.shape[1], device=passed.device) < lengths[:, None]
    return (passed & counted).long().cumprod(dim=1).sum(dim=1)


def follow(tokens: Sequence[int], parents: Sequence[int] | None, choices: Sequence[int | None]) -> list[int]:
    """Walk a draft along what the target chose; returns the accepted nodes from the root down.

    The target has chosen a token after the last accepted one (`choices[0]`) and after every node i
    (`choices[i + 1]`), by argmax or by a draw from p; where it said nothing (None, or the list ends) the walk ends. A
    node is accepted when it is its parent's choice. For point-mass drafts this is lossless, on trees too: the tokens
    along the walk are the target's own, the draft only saved time.
    """
    path: list[int] = []
    here = -1
    while here + 1 < len(choices):
        wanted = choices[here + 1]
        nodes = range(here + 1, len(tokens) if parents else min(here + 2, len(tokens)))
        step = next((i for i in nodes if tokens[i] == wanted and (not parents or parents[i] == here)), None)
        if step is None:
            break
        path.append(step)
        here = step
    return path


def choose_candidate(p: Tensor, q: Tensor, candidates: Sequence[int], r: Sequence[float]) -> tuple[int | None, Tensor]:
    """Lossless choice among several draws behind one parent (multi-candidate speculative sampling).

    Each candidate is tested as in Algorithm 1; after a rejection the next one is tested against the residual.

    Args:
        p: [V] the target's distribution at the parent.
        q: [n, V] what each of n candidates was drawn from, independently (the same token may come twice); all mass on
            the candidate itself where nobody drew it.
        candidates: their tokens, in any order that does not look at p.
        r: one uniform number per candidate.

    Returns:
        The index of the accepted candidate (None: all rejected), and the distribution [V] to draw from if none was.
    """
    for i, x in enumerate(candidates):
        if accepts(p[x].double(), q[i, x].double(), r[i]):
            return i, p
        p = residual(p[None], q[i, None])[0]
    return None, p
