"""What the loop and the drafters both know, and all that either knows of the other.

A `DraftSession` is one `generate` call of a drafter. A simple one writes `propose` and nothing else; the base class
turns that into all the loop asks for.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation import CandidateGenerator

from .stats import SpeculationStats


@dataclass
class Sequences:
    """The accepted tokens of the rows that are still being decoded."""

    ids: Tensor
    """[B, capacity] on the target's device, laid out as plain decoding's `input_ids` (left padding included);
    what lies past a row's length is undefined."""
    lengths: list[int]
    """Columns of `ids` that count, per row."""
    rows: list[int]
    """Index of each row in the call's batch; a row that stopped is not here any more."""
    tokens: list[list[int]]
    """The same rows on the host, without left padding. Read only: the engine appends to these lists."""


@dataclass
class Draft:
    """What a session proposes: B rows, K nodes."""

    tokens: Tensor
    """[B, K]"""
    lengths: list[int]
    """[B] nodes that count in each row"""
    parents: Tensor | None = None
    """[B, K] index of each node's parent, smaller than its own, -1 for the last accepted token; None for a chain"""
    token_probs: Tensor | None = None
    """[B, K] float32 q of each drafted token; None for a point mass (the token was not drawn at random)"""
    sources: list[str] = field(default_factory=list)
    """[B] where each row's draft came from, or empty; counted in the statistics"""

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> "Draft":
        """A point-mass chain per row, of uneven lengths."""
        width = max((len(row) for row in rows), default=0)
        padded = [list(row) + [0] * (width - len(row)) for row in rows]
        tokens = torch.tensor(padded, dtype=torch.long, device=device).view(len(rows), width)
        return cls(tokens, [len(row) for row in rows])

    def depths(self) -> list[list[int]]:
        """[B][K] how many drafted tokens lead to each node, itself included."""
        if self.parents is None:
            return [list(range(1, self.tokens.shape[1] + 1)) for _ in self.lengths]
        rows = []
        for parents in self.parents.tolist():
            depths: list[int] = []
            for parent in parents:
                depths.append(1 + (depths[parent] if parent >= 0 else 0))
            rows.append(depths)
        return rows


@dataclass
class Verdict:
    """What became of a draft; rows as in the draft."""

    rows: list[int]
    """[B] index in the call's batch"""
    drafted: list[int]
    """[B] draft tokens sent to the target, one below the other (the depth of a tree)"""
    accepted: list[int]
    """[B] draft tokens kept"""
    tokens: list[list[int]]
    """[B] tokens appended to each row: the accepted ones, then the target's own. Cut where the row stopped."""
    stopped: list[bool]
    """[B] whether the row is finished"""
    width: int
    """tokens per row in the verification forward"""
    seconds: float
    """duration of the verification forward"""
    draft: Draft | None = None
    """what was judged, which may be more than the session's last draft; None in transformers' own loop"""


class Picker(Protocol):
    """Applies the call's processors and picks a token: how every stochastic draft is drawn."""

    def __call__(
        self, ids: Tensor, lengths: Sequence[int], rows: Sequence[int], logits: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            ids: [B, capacity] accepted and drafted tokens so far.
            lengths: columns of `ids` that count, per row.
            rows: each row's index in the call's batch.
            logits: [B, any vocabulary] raw logits of the draft; cut or padded to the target's vocabulary.

        Returns:
            tokens [B], and q [B, target vocabulary] in float32, what they were drawn from; None when greedy.
            Processors of the user's own are left out of q (a second call of theirs could change what they do).
        """


class Forbids(Protocol):
    """Tells the tokens that the call's processors give no chance, whatever the target's scores."""

    def __call__(self, ids: Tensor, rows: Sequence[int], lengths: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """
        Args:
            ids: [R, capacity] accepted and drafted tokens.
            rows: [N] the row of `ids` that each token would continue.
            lengths: [N] columns of it that come before the token.
            tokens: [N] ids below the target's vocabulary.

        Returns:
            whether each is forbidden. Processors of the user's own are not asked (a second call of theirs could change
            what they do).
        """


@dataclass
class DraftContext:
    """What a session knows of its `generate` call."""

    prompt_ids: Tensor
    """[B, P] left-padded"""
    prompt_mask: Tensor
    """[B, P] 1 where `prompt_ids` is not padding"""
    max_length: int
    """columns that `ids` will never exceed"""
    vocab_size: int
    """of the target's logits; every drafted id is below it"""
    eos_token_ids: frozenset[int]
    do_sample: bool
    lockstep: bool
    """rows keep equal lengths (always true of a single row); otherwise each row advances at its own pace"""
    trees: bool
    """whether a draft with `parents` is welcome; elsewhere the engine keeps the first branch only"""
    pick: Picker
    device: torch.device
    """of the target's logits and ids"""
    stats: SpeculationStats
    """of this call; a session adds to `draft_calls`"""
    forbids: Forbids | None = None
    """for drafts that do not go through `pick`; None where no processor of the call forbids anything"""


class DraftSession(CandidateGenerator):
    """One generation. The engine calls, in every round: `start_draft`, `poll` and `take`, then `observe`.

    Background drafters override those; all others write `propose`. It is also a transformers `CandidateGenerator`
    (batch 1), which can be constructed into transformers' own assisted loop.
    """

    patience: float = 60.0
    """seconds a draft may take before the drafter is given up"""

    def __init__(self, context: DraftContext) -> None:
        self.context = context
        self._draft: Draft | None = None

    @abstractmethod
    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        """Draft at most `budget[b]` tokens (tree depth) for each row. An empty draft is fine."""

    def start_draft(self, sequences: Sequences, budget: list[int]) -> None:
        """Begin to draft. A serial session drafts here and now."""
        self._draft = self.propose(sequences, budget)
        if self._draft is None:
            raise TypeError(f"{type(self).__name__}.propose returned None instead of a Draft")

    def poll(self) -> bool:
        """Is the whole draft there?"""
        return self._draft is not None

    def take(self) -> Draft:
        """The draft, or as much of it as is there. Called once per round."""
        draft, self._draft = self._draft, None
        assert draft is not None, "take() follows start_draft()"
        return draft

    def cancel(self, rows: list[int]) -> None:
        """Drafting for these rows has become useless."""

    def residual(self, row: int, node: int, tokens: Tensor | None = None) -> Tensor:
        """q of `tokens` (of all [V] where None) at node `node` of row `row` of the draft taken last.

        Asked once before the first test, then after rejections, and at every tested node of a tree; only of drafts with
        `token_probs`.
        """
        raise NotImplementedError(f"{type(self).__name__} gives token_probs and must answer for the rest of q")

    def observe(self, verdict: Verdict) -> None:
        """What became of the draft."""

    def close(self) -> None:
        """Always called at the end, also after an error."""

    def get_candidates(self, input_ids: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
        """transformers' protocol, batch 1: the sequence with the draft appended, and log q for sampled drafts."""
        length = input_ids.shape[1]
        sequences = Sequences(input_ids, [length], [0], [input_ids[0].tolist()])
        draft = self.propose(sequences, [self.context.max_length - length - 1])
        k = draft.lengths[0]
        logits = None
        if draft.token_probs is not None and k:
            logits = torch.stack([self.residual(0, i) for i in range(k)])[None].log()
        return torch.cat([input_ids, draft.tokens[:, :k].to(input_ids.device)], dim=1), logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """transformers' protocol: tells what was accepted."""
        tested = scores.shape[1] - 1
        # The matched tokens and the target's own one are the last of input_ids.
        tokens = input_ids[0, input_ids.shape[1] - int(num_matches) - 1 :].tolist()
        self.observe(Verdict([0], [tested], [int(num_matches)], [tokens], [False], tested + 1, 0.0))
