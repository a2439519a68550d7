"""`Recalled`: what the target said behind the same last tokens, wherever in the search they stood. Beams part at a word
and go on alike."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...transfer import moved, to_device
from .tree import Path

SHARES = (0.5, 0.7, 0.85)
"""of a guess, how much is the target's word behind one, two and three equal tokens; the rest is the draft's"""
KEPT = 64
"""of the tokens behind them, the likeliest that are remembered"""
MOST = 8192
"""endings of texts that are remembered; the oldest make room"""


class Recalled:
    """Logarithms of chances by the last tokens of a text."""

    def __init__(self) -> None:
        self._said: dict[Path, tuple[Tensor, Tensor]] = {}

    def remember(self, paths: Sequence[Path], logits: Tensor) -> None:
        """The target's logits [T, V] behind texts."""
        chances, tokens = logits.float().log_softmax(-1).topk(min(KEPT, logits.shape[-1]))
        for path, said in zip(paths, zip(tokens, chances, strict=True), strict=True):
            for ending in _endings(path):
                self._said.pop(ending, None)  # what is said anew is the newest
                self._said[ending] = said
        while len(self._said) > MOST:
            self._said.pop(next(iter(self._said)))

    def mixed(self, paths: Sequence[Path], drafted: Tensor) -> Tensor:
        """What the draft says behind texts [T, V], in logarithms, and what is remembered behind the longest ending of
        each that is known."""
        endings = {
            i: ending
            for i, path in enumerate(paths)
            if (ending := next(filter(self._said.__contains__, _endings(path)), ()))
        }
        if not endings:
            return drafted
        rows, device = to_device(list(endings), drafted.device), drafted.device
        share = to_device([SHARES[len(ending) - 1] for ending in endings.values()], device, torch.float)[:, None]
        said = zip(*(self._said[ending] for ending in endings.values()), strict=True)
        tokens, chances = (moved(torch.stack(each), device) for each in said)
        # One column more, for tokens that the draft does not have.
        mixed = torch.nn.functional.pad(drafted[rows] + (1 - share).log(), (0, 1))
        tokens = tokens.clamp(max=drafted.shape[1])
        mixed.scatter_(1, tokens, torch.logaddexp(mixed.gather(1, tokens), chances + share.log()))
        return drafted.index_copy(0, rows, mixed[:, :-1])


def _endings(path: Path) -> list[Path]:
    """A text's last tokens, the most of them first."""
    return [path[-n:] for n in range(min(len(SHARES), len(path)), 0, -1)]
