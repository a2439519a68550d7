"""`Recycled`: what earlier forwards of a call found likely behind a token is thought of when the token comes again.

It costs no step of any model: the forwards happened anyway, and most of what they said was left unused.
"""

from collections.abc import Sequence

from ...budget import Acceptance, Evidence, Tree
from ...protocol import DraftContext, Sequences, Verdict
from .copies import cut
from .source import Source

FIRST = 0.25
"""taken for the chance of the likeliest before anything was measured; the next are less likely in proportion"""
LEAST = 0.05
"""chance, counted from where they join a tree, below which nothing is thought of behind one"""


class Recycled(Source):
    """By row, behind each token of its text and of its drafts the target's likeliest successors, where it stood last.
    Bounded by the vocabulary, and gone with the call."""

    name = kind = "recycled"

    def __init__(self, context: DraftContext, acceptance: Acceptance, count: int) -> None:
        """
        Args:
            count: successors that are remembered of a token.
        """
        self.context, self.acceptance, self.likeliest = context, acceptance, count
        self.ranks: tuple[list[float], list[tuple[Evidence, ...]]] = [], []
        """the chances of the successors of each rank in this round, and what speaks for them"""
        self.known: dict[int, dict[int, list[int]]] = {}
        """[row][token] its successors, the likeliest first"""

    def observe_prompt(self, verdict: Verdict) -> None:
        self.observe(verdict)

    def observe(self, verdict: Verdict) -> None:
        """What a forward said at every token it was fed, of the text or not."""
        for row, told in zip(verdict.rows, verdict.likeliest, strict=bool(verdict.likeliest)):
            self.known.setdefault(row, {}).update(reversed(told))  # of a token met twice the likelier place counts
        for row, stopped in zip(verdict.rows, verdict.stopped, strict=True):
            if stopped:
                self.known.pop(row, None)

    def join(self, trees: Sequence[Tree], sequences: Sequences, room: list[int]) -> None:
        """Add to each row's tree what may come behind its accepted tokens, at most `room` deep."""
        self.known = sequences.here(self.known)
        kinds = [Evidence.of(self.name, rank) for rank in range(self.likeliest)]
        chances = [self.acceptance.chance(kind, FIRST / (1 + rank)) for rank, kind in enumerate(kinds)]
        self.ranks = chances, [(kind,) for kind in kinds]
        ends = zip(sequences.rows, sequences.tokens, room, strict=True)
        found = [[[token] for token in self._behind(row, tokens[-1])] if most else [] for row, tokens, most in ends]
        allowed = cut(found, sequences, self.context)
        for tree, row, most, successors in zip(trees, sequences.rows, room, allowed, strict=True):
            self._grow(tree, -1, [token for (token,) in successors], row, most)

    def join_behind(self, tree: Tree, node: int, path: Sequence[int], row: int, room: int) -> None:
        """Add what may come behind a node of a row's tree."""
        if self.context.forbids is None:  # it would have to be asked about every place anew
            self._grow(tree, node, self._behind(row, path[-1]), row, room)

    def _behind(self, row: int, token: int) -> Sequence[int]:
        return () if token in self.context.eos_token_ids else self.known.get(row, {}).get(token, ())

    def _grow(self, tree: Tree, node: int, successors: Sequence[int], row: int, room: int) -> None:
        """What may follow a node, what may follow that, and so on, as long as there is a chance to get there."""
        known = self.known.get(row, {}) if self.context.forbids is None else {}
        places = [(node, successors, room, 1.0)]
        for node, successors, room, here in places:  # which become more meanwhile
            ranked = list(zip(successors, *self.ranks, strict=False))
            self.acceptance.add(tree, node, ranked)
            for token, *_ in ranked if room > 1 else ():
                child = tree.at[node, token]
                chance = here * tree.chances[child]
                if chance >= LEAST and token in known and token not in self.context.eos_token_ids:
                    places.append((child, known[token], room - 1, chance))
