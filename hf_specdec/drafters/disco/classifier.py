"""The stop classifier (Mamou 2024, Equation 2), and what it reads: the draft's distribution, and a lookup."""

import math
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ...transfer import to_host, waits

EXTRA = 4
"""features beside the top probabilities"""
RECURRING = 3
"""tokens that must recur for the lookup to propose one"""
NONE = -1
"""the lookup's proposal where they do not recur"""


def features(logits: Tensor, position: Sequence[int], proposed: Sequence[int], k: int) -> Tensor:
    """The top k of the draft's distribution, its entropy, the position, and whether copying proposes the same.

    Args:
        logits: [B, V] raw logits of the draft, all finite.
        position: [B] tokens generated before this one.
        proposed: [B] the token that followed when the last ones occurred before, or -1 (`Recurrence`).

    Returns:
        [B, k + 4] float32 on the host: probabilities in falling order; entropy in nats; log(1 + position); whether
        there is a proposal; whether it is the draft's best token. All are known before a token is drawn.
    """
    return torch.from_numpy(assembled(read(logits, k), position, proposed))


class Reading(NamedTuple):
    """What is read off the draft's distribution, on the host."""

    top: np.ndarray
    """[B, k] probabilities in falling order"""
    best: np.ndarray
    """[B] the likeliest token"""
    entropy: np.ndarray
    """[B] in nats"""
    drawn: list[int]
    """[B] the tokens drawn from it, where they were asked for"""


def read(logits: Tensor, k: int, drawn: Tensor | None = None) -> Reading:
    """Read the logits [B, V] of a draft, in one transfer where they lie on an accelerator.

    Args:
        drawn: [B] tokens to be told along.
    """
    if waits(logits.device):
        return _on_device(logits, k, drawn)
    return Reading(*_on_host(logits, k), [] if drawn is None else to_host(drawn))


def assembled(reading: Reading, position: Sequence[int], proposed: Sequence[int]) -> np.ndarray:
    """See `features`."""
    top, best, entropy, _ = reading
    k = top.shape[1]
    x = np.empty((len(top), k + EXTRA), np.float32)
    x[:, :k], x[:, k] = top, entropy
    for row, token, n, copied in zip(x, best.tolist(), position, proposed, strict=True):
        row[k + 1 :] = math.log1p(n), copied >= 0, copied == token
    return x


def _on_host(logits: Tensor, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Top probabilities [B, k], best token [B], entropy [B].

    In numpy where its calls cost less than torch's: the whole must cost little beside a forward of a small draft. Not
    so its selection of the largest, which takes a hundred times as long where most are equal, as of tokens that a
    draft does not know.
    """
    logits = logits.float()
    likely = logits.softmax(-1)
    top, tokens = (found.numpy() for found in likely.topk(k))
    x, q, best = logits.numpy(), likely.numpy(), tokens[:, 0]
    # With logits counted from the best token's: log q = logit + log q(best).
    entropy = -np.log(top[:, 0]) - np.einsum("bv,bv->b", q, x - x[np.arange(len(x)), best, None])
    return top, best, entropy


def _on_device(logits: Tensor, k: int, drawn: Tensor | None = None) -> Reading:
    """The same by torch, where the vocabulary lies on an accelerator."""
    logits = logits.float()
    q = logits.softmax(-1)
    top, tokens = q.topk(k)
    entropy = -torch.linalg.vecdot(q, logits.log_softmax(-1))
    told = [top.double(), tokens[:, :1].double(), entropy[:, None].double()]
    told += [] if drawn is None else [drawn[:, None].double()]
    x = np.array(to_host(torch.cat(told, dim=1)))
    return Reading(x[:, :k], x[:, k].astype(np.int64), x[:, k + 1], x[:, k + 2 :].astype(np.int64).flatten().tolist())


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
    """C = FFN(top k, entropy, position, lookup): the chance that the token drafted here is accepted.

    Two layers, and one output for greedy decoding and one for sampling, which accept at different rates.
    """

    def __init__(self, k: int, hidden: int) -> None:
        super().__init__()
        self.k = k
        self.inner = nn.Linear(k + EXTRA, hidden)
        self.outer = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Features [..., k + 4] → log-odds [..., 2] of acceptance, greedy and sampled."""
        return linear(linear(x, self.inner.weight, self.inner.bias).relu(), self.outer.weight, self.outer.bias)

    def reader(self, do_sample: bool) -> Chance:
        """`forward` for one generation, in numpy: a few hundred weights are not worth a call of torch each."""
        (w1, b1), (w2, b2) = (
            (layer.weight.numpy(force=True), layer.bias.numpy(force=True)) for layer in (self.inner, self.outer)
        )
        w1, w2, last = w1.T, w2[int(do_sample)], float(b2[int(do_sample)])

        def chance(reading: Reading, position: Sequence[int], proposed: Sequence[int]) -> list[float]:
            x = assembled(reading, position, proposed)
            odds = np.maximum(x @ w1 + b1, 0.0) @ w2
            return [0.5 + 0.5 * math.tanh(0.5 * (z + last)) for z in odds.tolist()]

        return chance
