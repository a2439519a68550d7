"""What the stop rule looks at, and the classifier over it (Mamou 2024, Equation 2)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

EXTRA = 4
"""features beside the top probabilities"""


def features(logits: Tensor, position: Tensor, proposed: Tensor, k: int) -> Tensor:
    """The top k of the draft's distribution, its entropy, the position, and whether copying proposes the same.

    Args:
        logits: [B, V] raw logits of the draft.
        position: [B] tokens generated before this one.
        proposed: [B] the token that followed when the last ones occurred before, or -1 (`lookup.Recurrence`).

    Returns:
        [B, k + 4] float32: probabilities in falling order; entropy in nats; log(1 + position); whether there is a
        proposal; whether it is the draft's best token. All are known before a token is drawn.
    """
    log_q = logits.float().log_softmax(-1).clamp_min(-1e4)  # processors forbid tokens with -inf
    q = log_q.exp()
    entropy = -(q * log_q).sum(-1, keepdim=True)
    values, tokens = q.topk(k)
    known = torch.stack([position.log1p(), proposed >= 0, proposed == tokens[:, 0]], dim=-1)
    return torch.cat([values, entropy, known], dim=-1)


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

    @torch.no_grad()
    def chance(self, logits: Tensor, position: Tensor, proposed: Tensor, do_sample: bool) -> Tensor:
        """C [B] from what `features` takes."""
        return self(features(logits, position, proposed, self.k))[:, int(do_sample)].sigmoid()
