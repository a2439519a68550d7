"""What the judge says of a round."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .successors import Behind
from .verification import NOTHING


@dataclass
class Judgement:
    """What the target says of one row's draft."""

    path: list[int]
    """accepted nodes, from the root down"""
    text: list[int]
    """the tokens that it adds: theirs, then the target's own (the correction, or the bonus token), if there is one;
    `NOTHING` where none can be drawn, which is an error if the text gets there"""


def expect_token(token: int) -> None:
    """
    Raises:
        RuntimeError: as plain decoding does where no token can be drawn.
    """
    if token == NOTHING:
        raise RuntimeError(
            "no token can be drawn: scores are NaN or +inf somewhere, or -inf for every token. Logits processors may "
            "have forbidden all of them, or logits have overflowed (float16 does beyond 65504; try bfloat16)"
        )


class Block(NamedTuple):
    """What the target says of a round's drafts."""

    rows: list[Judgement]
    scores: Tensor
    """[B, N, V] processed, at every place that there are logits for"""
    sound: bool
    """whether ids and probabilities were in range; of an unsound draft no token is used"""
    texts: Tensor
    """[B, W] the rows' texts on the device; what lies past a row's is undefined"""
    likeliest: Behind
    """as in `Verdict`"""
