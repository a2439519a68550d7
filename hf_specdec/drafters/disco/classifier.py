"""The stop classifier (Mamou 2024, Equation 2), and what it reads: the draft's distribution, its token, a lookup."""

import math
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ...transfer import to_host, waits

EXTRA = 6
"""features beside the top probabilities"""
TOKEN = 2
"""the last of these, which are of the drafted token: a classifier may have been trained without"""
LEAST = -20.0
"""log chance of a token that the draft itself would hardly draw, as where a processor demands it"""
RECURRING = 3
"""tokens that must recur for the lookup to propose one"""
NONE = -1
"""the lookup's proposal where they do not recur"""


def features(logits: Tensor, tokens: Tensor, position: Sequence[int], proposed: Sequence[int], k: int) -> Tensor:
    """The top k of the draft's distribution, its entropy, the position, what copying proposes, and the drafted token.

    Args:
        logits: [B, V] raw logits of the draft, all finite.
        tokens: [B] x, the drafted tokens.
        position: [B] tokens generated before this one.
        proposed: [B] the token that followed when the last ones occurred before, or -1 (`Recurrence`).

    Returns:
        [B, k + 6] float32 on the host: probabilities in falling order; entropy in nats; log(1 + position); whether
        there is a proposal; whether it is the draft's best token; whether it is x; log q(x).
    """
    return torch.from_numpy(assembled(read(logits, tokens, k), position, proposed))


class Reading(NamedTuple):
    """What is read off the draft's distribution, on the host."""

    top: np.ndarray
    """[B, k] probabilities in falling order"""
    best: np.ndarray
    """[B] the likeliest token"""
    entropy: np.ndarray
    """[B] in nats"""
    log_q: np.ndarray
    """[B] of the drafted token, in nats"""
    tokens: list[int]
    """[B] the drafted tokens"""


def read(logits: Tensor, tokens: Tensor, k: int) -> Reading:
    """Read the logits [B, V] of a draft and its tokens [B], in one transfer where they lie on an accelerator."""
    return _on_device(logits, tokens, k) if waits(logits.device) else _on_host(logits, tokens, k)


def assembled(reading: Reading, position: Sequence[int], proposed: Sequence[int]) -> np.ndarray:
    """See `features`."""
    k = reading.top.shape[1]
    x = np.empty((len(reading.top), k + EXTRA), np.float32)
    x[:, :k], x[:, k], x[:, -1] = reading.top, reading.entropy, reading.log_q.clip(LEAST)
    found = zip(x, reading.best.tolist(), reading.tokens, position, proposed, strict=True)
    for row, best, token, n, copied in found:
        row[k + 1 : -1] = math.log1p(n), copied >= 0, copied == best, copied == token
    return x


def _on_host(logits: Tensor, tokens: Tensor, k: int) -> Reading:
    """In numpy where its calls cost less than torch's: the whole must cost little beside a forward of a small draft.
    Not so its selection of the largest, which takes a hundred times as long where most are equal, as of tokens that a
    draft does not know.
    """
    logits = logits.float()
    likely = logits.softmax(-1)
    top, ranked = (found.numpy() for found in likely.topk(k))
    x, q, best, drafted = logits.numpy(), likely.numpy(), ranked[:, 0], to_host(tokens)
    # With logits counted from the best token's: log q = logit + log q(best).
    rows, log_best = np.arange(len(x)), np.log(top[:, 0])
    x = x - x[rows, best, None]
    entropy = -log_best - np.einsum("bv,bv->b", q, x)
    return Reading(top, best, entropy, x[rows, np.minimum(drafted, x.shape[1] - 1)] + log_best, drafted)


def _on_device(logits: Tensor, tokens: Tensor, k: int) -> Reading:
    """The same by torch, where the vocabulary lies on an accelerator."""
    logits = logits.float()
    q, log_q = logits.softmax(-1), logits.log_softmax(-1)
    top, ranked = q.topk(k)
    entropy = -torch.linalg.vecdot(q, log_q)
    own = log_q.gather(1, tokens[:, None].clamp(max=q.shape[1] - 1))
    told = [top, ranked[:, :1], entropy[:, None], own, tokens[:, None]]
    x = np.array(to_host(torch.cat([part.double() for part in told], dim=1)))
    best, drafted = x[:, k].astype(np.int64), x[:, k + 3].astype(np.int64)
    return Reading(x[:, :k], best, x[:, k + 1], x[:, k + 2], drafted.tolist())


class Recurrence:
    """The lookup, a feature that costs no forward: which token followed the last occurrence of the last three."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.followers: MutableMapping[tuple[int, ...], int] = {}
        self.tail: tuple[int, ...] = ()
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if len(self.tail) == RECURRING:
                self.followers[self.tail] = token
            self.tail = (*self.tail, token)[-RECURRING:]

    def proposal(self) -> int:
        """The token that would be copied, or `NONE`."""
        return self.followers.get(self.tail, NONE)


class Branch:
    """A drafted continuation of a text, which leaves the text's index as it is."""

    def __init__(self, text: Recurrence) -> None:
        self.text, self.own = text, Recurrence()
        self.own.tail = text.tail

    def append(self, token: int) -> None:
        self.own.extend([token])

    def proposal(self) -> int:
        found = self.own.proposal()
        return found if found != NONE else self.text.followers.get(self.own.tail, NONE)


Chance = Callable[[Reading, Sequence[int], Sequence[int]], list[float]]
"""C [B] from a reading of the logits, positions, proposed tokens (see `features`)"""


class StopClassifier(nn.Module):
    """C = FFN(top k, entropy, position, lookup, token): the chance that the token drafted here is accepted.

    Two layers, and one output for greedy decoding and one for sampling, which accept at different rates.
    """

    def __init__(self, k: int, hidden: int, sees_token: bool = False) -> None:
        """
        Args:
            sees_token: whether the last features are read, those of the drafted token.
        """
        super().__init__()
        self.k, self.sees_token = k, sees_token
        self.inner = nn.Linear(k + EXTRA - TOKEN * (not sees_token), hidden)
        self.outer = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Features [..., k + 6] → log-odds [..., 2] of acceptance, greedy and sampled."""
        x = x[..., : self.inner.in_features]
        return linear(linear(x, self.inner.weight, self.inner.bias).relu(), self.outer.weight, self.outer.bias)

    def reader(self, do_sample: bool) -> Chance:
        """`forward` for one generation, in numpy: a few hundred weights are not worth a call of torch each."""
        (w1, b1), (w2, b2) = (
            (layer.weight.numpy(force=True), layer.bias.numpy(force=True)) for layer in (self.inner, self.outer)
        )
        w1, w2, last, seen = w1.T, w2[int(do_sample)], float(b2[int(do_sample)]), self.inner.in_features

        def chance(reading: Reading, position: Sequence[int], proposed: Sequence[int]) -> list[float]:
            x = assembled(reading, position, proposed)[:, :seen]
            odds = np.maximum(x @ w1 + b1, 0.0) @ w2
            return [0.5 + 0.5 * math.tanh(0.5 * (z + last)) for z in odds.tolist()]

        return chance
