"""Windows beside DISCO's: the oracle's (Mamou 2024, Appendix A), and fixed ones as predictions (Appendix D.2)."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hf_specdec.train.disco.fitting import f1
from hf_specdec.train.disco.records import Record

LONGEST = 16
"""the longest fixed window that is looked at"""


def oracle_windows(records: Iterable[Record]) -> list[int]:
    """The window of every round of an oracle, which drafts exactly the tokens that will be accepted.

    The target's own token ends each round, so a text's windows are its runs of accepted tokens, empty ones too.
    """
    windows = []
    for record in records:
        run = 0
        for accepted in record.accepted.tolist():
            if not accepted:
                windows.append(run)
            run = run + 1 if accepted else 0
        windows += [run] if run else []
    return windows


def drafted_by(gamma: int, accepted: Sequence[bool]) -> list[bool]:
    """Whether a fixed window drafts each token of a text, and so expects it to be accepted.

    A round drafts γ tokens. The target's own token stands where one is rejected, or behind all of them.

    Args:
        gamma: γ, 1 or more.
        accepted: [N] whether a draft token at each place is accepted.
    """
    drafted, run = [], 0
    for right in accepted:
        drafted.append(run < gamma)
        run = run + 1 if right and run < gamma else 0
    return drafted


def f1_of_windows(records: Sequence[Record], longest: int = LONGEST) -> dict[int, float]:
    """F1 of "accepted" of each fixed window from 1 to the longest (Table 4)."""
    accepted = torch.cat([record.accepted for record in records])

    def expected(gamma: int) -> Tensor:
        return torch.tensor([token for record in records for token in drafted_by(gamma, record.accepted.tolist())])

    return {gamma: f1(expected(gamma), accepted) for gamma in range(1, longest + 1)}
