"""Rows whose tokens are chosen in the same way."""

from dataclasses import dataclass, field

from ..protocol import Draft, Forward
from ..verify.judging import Judge
from ..verify.randomness import RowRandomness
from .drafting import Drafting
from .rows import Rows
from .shares import Result, of_forward


@dataclass
class Group:
    """Rows of equal settings."""

    judge: Judge
    randomness: RowRandomness
    drafting: Drafting | None
    """its own; None where all rows share one, or nobody drafts"""
    rows: set[int] = field(default_factory=set)


@dataclass
class Part:
    """A group in one round."""

    group: Group
    places: list[int]
    """of its rows in the batch"""
    draft: Draft = field(init=False)

    def judged(self, rows: Rows, forward: Forward, shared: Drafting | None) -> list[Result]:
        """What the target says of these rows' drafts. What a processor raises is theirs alone.

        Args:
            rows: all of the batch.
            shared: what drafts for all of them, if anything does.
        """
        draft, mine = self.draft, of_forward(forward, self.places, self.draft.tokens.shape[1])
        try:
            block = self.group.judge.block(draft, mine.logits, rows.view(self.places), mine.nodes)
        except Exception as error:
            for b in self.places:
                rows.all[b].failed = error
            return [Result(0, [], [0], []) for _ in self.places]
        drafting = self.group.drafting or shared
        if not block.sound and drafting is not None:
            drafting.session.drop(
                "it returned token ids or probabilities out of range, or a q that does not match them"
            )
        depths = [max(below[:n], default=0) for below, n in zip(draft.depths(), draft.lengths, strict=True)]
        likeliest = block.likeliest or [[]] * len(depths)
        return [
            Result(deep, judgement.path, judgement.text, told)
            for deep, judgement, told in zip(depths, block.rows, likeliest, strict=True)
        ]
