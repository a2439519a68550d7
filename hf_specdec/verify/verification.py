"""The accept rules: pure tensor functions of p, the target's distribution, and q, the draft's.

Greedy decoding is sampling from a distribution with all its mass on one token (Leviathan §2.2), so p and q are all
that the rules need. Probabilities are float32, and all tests are strict.

Drawn tokens are tested in one of two exact ways. Token by token from the root: Algorithm 1 (`accepts`, `residual`), and
`choose_candidate` on trees. Or all of a chain together: `block_verified` (Sun et al. 2024), which carries weights
w(x) = min(1, w(parent) · p(x) / q(x)), so a likely token makes up for an unlikely one before it, and on average no
fewer tokens are accepted.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .largest import argmax

NOTHING = -1
"""in place of a token: none can be drawn"""


def distribution(scores: Tensor) -> Tensor:
    """p from processed scores [..., V]: a float32 softmax.

    Scores that are NaN or +inf, or -inf throughout, give NaN, where plain decoding fails too: nothing can be drawn.
    """
    return torch.softmax(scores.float(), dim=-1)


def drawable(q: Tensor) -> Tensor:
    """q of a draft, with 1/V in place of NaN, so that a token can be drawn. The target tests it like any other."""
    return torch.nan_to_num(q, nan=1.0 / q.shape[-1])


def draw(p: Tensor, u: Tensor) -> Tensor:
    """Draw one token per row of p [N, V] with uniform numbers u [N] in [0, 1): the first with a cumulated mass above u.

    So no token of probability 0 is drawn. `NOTHING` where p is NaN.
    """
    mass = p.double().cumsum(-1)
    total = mass[:, -1:].contiguous()
    tokens = torch.searchsorted(mass, u.double()[:, None] * total, right=True)
    last = torch.searchsorted(mass, total)  # where rounding made u * total reach the total
    return torch.where(total.isnan(), NOTHING, torch.minimum(tokens, last))[:, 0]


def gumbel_max(noisy: Tensor) -> Tensor:
    """The likeliest token of scores with Gumbel noise [..., V], which is a draw; `NOTHING` where none can be drawn."""
    tokens = argmax(noisy)
    return torch.where(noisy.gather(-1, tokens[..., None])[..., 0].isfinite(), tokens, NOTHING)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """p'(x) = norm(max(0, p(x) - q(x))), rows [N, V] (Algorithm 1).

    Where nothing is left, p equals q up to rounding and the rejection came of rounding, too: it is p itself.
    """
    left = torch.nan_to_num(p - q, nan=0.0, posinf=0.0, neginf=0.0).clamp_min(0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.clamp_min(torch.finfo(left.dtype).tiny), p)


def accepts(p: Tensor, q: Tensor, r: Tensor | float) -> Tensor:
    """The test of Algorithm 1, r < p(x)/q(x), for the probabilities of drafted tokens; any shape, strict.

    Written without the division, so that it rejects at r = 0 and p = 0.
    """
    return r * q < p


def tolerance(scores: Tensor, tokens: Tensor, lenience: float) -> Tensor:
    """By how much tokens [N] pass the lenient test of greedy decoding, p(x) ≥ l · max p, negative where they fail.

    Leviathan A.5 prints the comparison the other way round. Scores [N, V] are processed.
    """
    p = distribution(scores).double()
    return p.gather(1, tokens[:, None])[:, 0] - lenience * p.amax(-1)


def accepted_lengths(passed: Tensor, lengths: Tensor) -> Tensor:
    """n of Algorithm 1: how many leading tests [B, K] passed, counting the first `lengths` [B] only."""
    counted = torch.arange(passed.shape[1], device=passed.device) < lengths[:, None]
    return (passed & counted).long().cumprod(dim=1).sum(dim=1)


def last_two(last: Tensor, texts: Tensor, n: Tensor) -> Tensor:
    """[B, 2] the last tokens of texts that end with `last` [B, 1] and gain the first n + 1 of `texts` [B, W]."""
    return torch.cat([last, texts], 1).gather(1, n[:, None] + torch.arange(2, device=n.device))


def follow(tokens: Sequence[int], parents: Sequence[int] | None, choices: Sequence[int | None]) -> list[int]:
    """Walk a draft along what the target chose; returns the accepted nodes from the root down.

    The target has chosen a token after the last accepted one (`choices[0]`) and after every node i
    (`choices[i + 1]`), by argmax or by a draw from p. A node is accepted when it is its parent's choice; the walk ends
    where there is no such node, or no choice (None, or the list ends). This is lossless for point-mass drafts, on trees
    too: the tokens along the walk are the target's own.
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


def block_verified(p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification of chains.

    The draft up to token i is accepted, with or without later tokens, with probability w_i (Sun et al. 2024, Algorithm
    2). The test at i has the part of w_i that the acceptance of later tokens does not use up. Whether a
    chain goes on behind a token may depend on that token, which stays, and on those before it: in either case the draft
    up to it is accepted with probability w_i.

    Args:
        p: [B, K + 1, V] the target's distributions.
        q: [B, K, V] what the tokens were drawn from.
        tokens: [B, K]
        lengths: [B] tokens that count.
        r: [B, K] uniform numbers, none of which decided anything before.

    Returns:
        n [B], how many are accepted, and w_n [B]. What follows is drawn from p where n = lengths, else from
        norm(max(0, w_n · p - q)).
    """
    k = tokens.shape[1]
    ratio = p[:, :k].gather(2, tokens[..., None])[..., 0].double() / q.gather(2, tokens[..., None])[..., 0].double()
    nothing = p[..., 0].isnan()  # places behind which nothing can be drawn: the chain ends before them
    walk = torch.nan_to_num(ratio, nan=1.0).masked_fill(nothing[:, :k], 0.0).log().cumsum(1)
    w = (walk - walk.cummax(1).values.clamp_min(0)).exp()  # min(1, w · ratio), step by step
    left = (w[:, :-1, None] * p[:, 1:k] - q[:, 1:]).clamp_min(0).sum(-1)  # at every token but the last
    spare = left + 1 - w[:, :-1]
    inner = torch.where(spare > 0, left / spare.clamp_min(1e-300), 1.0)
    places = torch.arange(1, k + 1, device=p.device)
    last = (places == lengths[:, None]) | nothing[:, 1:]
    h = torch.where(last, w, torch.nn.functional.pad(inner, (0, 1)))
    passed = (r < h) & (places <= lengths[:, None])
    n = torch.where(passed, places, 0).amax(1)
    return n, torch.cat([torch.ones_like(w[:, :1]), w], 1).gather(1, n[:, None])[:, 0]


def choose_candidate(
    p: Tensor, q: Tensor, candidates: Sequence[int], r: Sequence[float], lenience: float = 1.0
) -> tuple[int | None, Tensor]:
    """Lossless choice among several draws behind one parent (multi-candidate speculative sampling).

    Each candidate is tested as in Algorithm 1; after a rejection the next one is tested against the residual.

    Args:
        p: [V] the target's distribution at the parent.
        q: [n, V] what each of n candidates was drawn from, independently (the same token may come twice); all mass on
            the candidate itself where nobody drew it.
        candidates: their tokens, in any order that does not look at p.
        r: one uniform number per candidate.
        lenience: l of A.5; below 1 it is lossless no more.

    Returns:
        The index of the accepted candidate (None: all rejected), and the distribution [V] to draw from if none was.
    """
    for i, x in enumerate(candidates):
        if accepts(p[x].double(), lenience * q[i, x].double(), r[i]):
            return i, p
        p = residual(p[None], q[i, None])[0]
    return None, p
