"""What the stop rule looks at, and the classifier over it (Mamou 2024, Equation 2)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

EXTRA = 4
"""features beside the top probabilities"""


def features(logits: Tensor, position: Sequence[int], proposed: Sequence[int], k: int) -> Tensor:
    """The top k of the draft's distribution, its entropy, the position, and whether copying proposes the same.

    Args:
        logits: [B, V] raw logits of the draft, all finite.
        position: [B] tokens generated before this one.
        proposed: [B] the token that followed when the last ones occurred before, or -1 (`lookup.Recurrence`).

    Returns:
        [B, k + 4] float32: probabilities in falling order; entropy in nats; log(1 + position); whether there is a
        proposal; whether it is the draft's best token. All are known before a token is drawn.
    """
    # Every operation counts: the whole must cost little beside a forward of a small draft.
    logits = logits.float()
    q = logits.softmax(-1)
    entropy = -torch.linalg.vecdot(q, logits.log_softmax(-1))
    values, tokens = q.topk(k)
    agrees = tokens[:, :1] == torch.tensor(proposed, device=logits.device)[:, None]
    known = [(math.log1p(n), token >= 0) for n, token in zip(position, proposed, strict=True)]
    return torch.cat([values, entropy[:, None], torch.tensor(known, device=logits.device), agrees], dim=-1)


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

    def chance(self, logits: Tensor, position: Sequence[int], proposed: Sequence[int], do_sample: bool) -> list[float]:
        """C [B] from what `features` takes. Runs inside `torch.no_grad`."""
        return self.forward(features(logits, position, proposed, self.k))[:, int(do_sample)].sigmoid().tolist()
