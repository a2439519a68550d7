"""`Trial`, a round's drafts beside the target's scores for them, and `Block`, what the judge decides about them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..protocol import Draft, Sequences
from ..transfer import to_device
from .drafts import padded
from .verification import NOTHING

Behind = list[list[tuple[int, list[int]]]]
"""[B] tokens that the target answered, each with its likeliest successors"""


@dataclass
class Judgement:
    """What the target says of one row's draft."""

    path: list[int]
    """accepted nodes, from the root down"""
    text: list[int]
    """the tokens that the row gains: the accepted ones, then the target's own (the recovered or the bonus token), if
    there is one. `NOTHING` where none can be drawn, which is an error if the text gets there"""


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


@dataclass
class Trial:
    """What is judged in a round. A *place* is where the target was asked: behind the last accepted token (place 0), or
    behind a node of the draft."""

    draft: Draft
    sequences: Sequences
    scores: Tensor
    """[B, N, V] at N places, after the call's processors"""
    nodes: Sequence[Sequence[int]]
    """[B][at most N - 1] the node at each place from 1 on; -1 for none"""
    sound: Tensor
    """whether ids and probabilities are in range; on the device, and without a value where nothing was drafted"""
    likeliest: Tensor
    """[B, N, count] the target's likeliest tokens at each place; empty where no drafter asks for them"""

    @property
    def counted(self) -> Tensor:
        """[B] how many tokens of each row's draft count: none of a draft that is not sound."""
        lengths = to_device(self.draft.lengths, self.scores.device)
        return lengths * self.sound if self.sound.numel() else lengths

    def places(self, b: int) -> dict[int, int]:
        """The place of each node of row b that there are scores for. Node -1 is the last accepted token."""
        return {-1: 0} | {node: place for place, node in enumerate(self.nodes[b], 1) if node >= 0}

    def tokens(self, flat: list[int], sound: float) -> list[list[int]]:
        """[B] the drafted tokens of each row that count: none of a draft that is not sound.

        Args:
            flat: [B · K] the draft's tokens, on the host.
        """
        k = self.draft.tokens.shape[1]
        return [flat[b * k : b * k + (length if sound else 0)] for b, length in enumerate(self.draft.lengths)]

    def decided(
        self,
        rows: list[Judgement],
        sound: float,
        drafted: list[list[int]],
        likeliest: Sequence[int],
        texts: Tensor | None = None,
    ) -> Block:
        """The judgements as a block.

        Args:
            drafted: the rows' `tokens`.
            likeliest: the values of `self.likeliest`, on the host.
            texts: as in `Block`, where they are on the device already.
        """
        if texts is None:
            texts = padded([judgement.text for judgement in rows], self.scores.device)
        return Block(rows, self.scores, bool(sound), texts, self._behind(drafted, likeliest))

    def _behind(self, drafted: list[list[int]], likeliest: Sequence[int]) -> Behind:
        rows, places, _ = self.scores.shape
        if not likeliest:
            return []
        count = len(likeliest) // (rows * places)
        told: Behind = []
        for b, (text, tokens) in enumerate(zip(self.sequences.tokens, drafted, strict=True)):
            by_node = {-1: text[-1]} if text else {}  # behind `inputs_embeds` there is no token
            by_node |= dict(enumerate(tokens))
            fed = [
                ((b * places + place) * count, by_node[node])
                for node, place in self.places(b).items()
                if node in by_node
            ]
            told.append([(token, list(likeliest[at : at + count])) for at, token in fed])
        return told
