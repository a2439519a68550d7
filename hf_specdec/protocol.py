"""What the engine and the drafters both know, and all that either knows of the other.

A round: a session (`session.py`) gives a `Draft`, a `Runner` feeds it to the target and gives a `Forward`, the judge
says what is kept, and a `Verdict` tells the session.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .budget import Advance, Cost, CostView, are_chains
from .grammars import Grammar
from .picker import Forbids, Picker
from .stats import SpeculationStats
from .transfer import moved, on_host

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
Feature = int | str
"""what a session may ask for beside tokens: a hidden state, by its index in `hidden_states` (0 the embeddings, -1 the
last layer's after the norm), or keys and values that a model shares, by the kind of layers (`target/features.py`)"""


@dataclass
class Sequences:
    """The accepted tokens of the rows that are still decoded: a copy, which nobody else reads."""

    ids: Tensor
    """[B, capacity] on the target's device, laid out as plain decoding's `input_ids` (left padding included);
    what lies past a row's length is undefined, and free to write to"""
    lengths: list[int]
    """[B] columns of `ids` that count"""
    rows: list[int]
    """[B] index of each row in the call's batch; a row that stopped is not here any more, and where rows come and go
    (`BatchDecoder`) others are new, with all of their prompt in `tokens`"""
    tokens: list[list[int]]
    """[B] the same rows on the host, without left padding"""

    def here(self, held: dict[int, T]) -> dict[int, T]:
        """Of what is held of rows that of those which are still decoded."""
        return held if held.keys() <= set(self.rows) else {row: held[row] for row in self.rows if row in held}


@dataclass
class Draft:
    """What a session proposes: B rows, K nodes."""

    tokens: Tensor
    """[B, K] token ids, on any device"""
    lengths: list[int]
    """[B] nodes that count in each row"""
    parents: Sequence[Sequence[int]] | None = None
    """`[B][K]` on the host: index of each node's parent, smaller than its own, -1 for the last accepted token; None for
    a chain"""
    token_probs: Tensor | None = None
    """[B, K] float32 q of each drafted token; None for a point mass (the token was not drawn at random)"""
    q: Tensor | None = None
    """[B, K, V] the distributions that the tokens were drawn from, where they are at hand; else `DraftSession.q` is
    asked for them. Of fewer nodes, the first ones, where those behind were not drawn"""
    sources: list[str] = field(default_factory=list)
    """[B] where each row's draft came from, or empty; counted in the statistics"""
    survival: Sequence[Sequence[float]] | None = None
    """`[B][K]` on the host: each node's chance to be kept, it and all above it; the first ones are verified, as many as
    pay. None: all are, as are draws"""
    least: Sequence[int] = ()
    """[B] nodes, the first ones, that are verified whether they pay or not, where others have their `survival`. All
    draws must be among them"""
    known: Sequence[Sequence[int]] | None = None
    """[B][K] the tokens once more, where they come from the host: the engine brings them to the target's device"""

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> "Draft":
        """A point-mass chain per row, of uneven lengths.

        Args:
            device: where `tokens` are wanted now; the engine brings them to the target's in any case.
        """
        width = max(map(len, rows), default=0)
        known = [[*row, *[0] * (width - len(row))] for row in rows]
        tokens = moved(on_host(known).view(len(rows), width), torch.device(device))
        return cls(tokens, [len(row) for row in rows], known=known)

    @classmethod
    def from_trees(
        cls, rows: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device | str = "cpu"
    ) -> "Draft":
        """A point-mass tree per row, of uneven sizes: tokens, and the parent of each. A chain where all are chains.

        Args:
            device: as of `from_lists`.
        """
        draft = cls.from_lists([tokens for tokens, _ in rows], device)
        if are_chains([parents for _, parents in rows]):
            return draft
        width = draft.tokens.shape[1]  # padding nodes hang on the root: -1 is a valid parent everywhere
        draft.parents = [[*parents, *[-1] * (width - len(parents))] for _, parents in rows]
        return draft

    def depths(self) -> list[list[int]]:
        """`[B][K]` how many drafted tokens lead to each node, itself included."""
        if self.parents is None:
            return [list(range(1, self.tokens.shape[1] + 1))] * len(self.lengths)
        rows = []
        for parents in self.parents:
            depths: list[int] = []
            for parent in parents:
                depths.append(1 + (depths[parent] if parent >= 0 else 0))
            rows.append(depths)
        return rows


@dataclass
class Forward:
    """What a forward of the target over [B, T] tokens answers."""

    logits: Tensor
    """[B, N, V] after the first token and after N - 1 more of them"""
    nodes: Tensor | None = None
    """[B, N - 1] which nodes of the draft those are (the fed token i + 1 is node i), -1 for none: nodes that were
    pruned in mid-forward have no logits. None: the first N - 1"""
    features: dict[Feature, Tensor] = field(default_factory=dict)
    """[B, N, H] hidden states, or keys and values, at the same places, by the names that were asked for"""
    outputs: Any = None
    """the model's own"""
    found: "Found | None" = None
    """what was accepted, where that was found with the forward: then the cache holds the accepted path, as if nothing
    else had been fed, and `logits` have a shape only"""


class FedTree(NamedTuple):
    """How W tokens that the target is fed hang together, on its device. They come before what hangs on them."""

    parents: Tensor
    """[R, W] index of the token that each one hangs on; its own, of what hangs on none of them"""
    seen: Tensor
    """[R, W, W] itself and all above"""
    depth: Tensor
    """[R, W] below the first"""


class Found(NamedTuple):
    """What a round has come to, on the device. Good until the next forward."""

    told: Tensor
    """[B, any] for the host"""
    n: Tensor
    """[B] accepted tokens"""
    kept: Tensor
    """[B, W] which of the fed tokens stays where a chain's would stand"""
    texts: Tensor
    """[B, W] what rows gain, of which n + 1 count"""
    last: Tensor
    """[B, 2] the last two tokens of each text then"""


class Finder(Protocol):
    """What can be found by steps that are recorded with the forward. Equal ones find the same."""

    @property
    def vocab(self) -> int:
        """Of the target's logits; other ids are fed as some of these."""

    def __call__(self, logits: Tensor, tokens: Tensor, counted: Tensor, tree: FedTree | None) -> Found:
        """
        Args:
            logits: [R, W, V]
            tokens: [R, W] each row's last one, and its draft.
            counted: [R] nodes of the draft that count.
            tree: None of chains.
        """


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
    paths: list[list[int]] = field(default_factory=list)
    """[B] the accepted nodes of each row, from the root down"""
    features: dict[Feature, Tensor] = field(default_factory=dict)
    """[B, T, H] of those asked for, where each of `tokens` was decided: at the token that the draft hung on, then at
    the accepted ones; `len(tokens[b])` of them count in row b. Of the prompt [B, P, H], left padding
    included, without the columns that a continued cache held."""
    draft_seconds: float = 0.0
    """seconds for which the target stood still, waiting for the draft"""
    nodes: Tensor | None = None
    """[B, N] the nodes that there were logits for, as in `Forward`; None: all"""
    likeliest: list[list[tuple[int, list[int]]]] = field(default_factory=list)
    """[B] each token that the target answered, the last accepted one before the draft's, with those that it found
    likeliest behind it, as many as were asked for; empty where the call's processors are asked place by place"""


@dataclass
class DraftContext:
    """What a session knows of its `generate` call. Its own copy: nothing in it is read by anybody else."""

    prompt_ids: Tensor
    """[B, P] left-padded; [0, 0] where rows come and go"""
    prompt_mask: Tensor
    """[B, P] 1 where `prompt_ids` is not padding"""
    max_length: int
    """columns that `ids` will never exceed"""
    vocab_size: int
    """of the target's logits; every drafted id is below it"""
    eos_token_ids: frozenset[int]
    """behind which nothing need be drafted"""
    do_sample: bool
    """whether tokens are drawn; else decoding is greedy"""
    lockstep: bool
    """rows keep equal lengths (always true of a single row); otherwise each row advances at its own pace"""
    trees: bool
    """whether a draft with `parents` is welcome; elsewhere the engine keeps the first branch only"""
    pick: Picker
    """draws each token of a stochastic draft"""
    device: torch.device
    """of the target's logits and ids"""
    stats: SpeculationStats
    """a session adds to `draft_calls` and `notes`, and says its `window` where that is a number the user has set"""
    forbids: Forbids | None = None
    """for drafts that do not go through `pick`; None where no processor of the call forbids anything"""
    grammar: Grammar | None = None
    """holds the call's texts, behind the prompt; asked for paths of a drafter's own. None where none does"""
    cost: CostView = field(default_factory=lambda: CostView(Cost()))
    """times of the target's forwards, whoever drafts for it; one object for the whole call, always up to date"""
    target: "PreTrainedModel | None" = None
    """its embedding and head are `get_input_embeddings()` and `get_output_embeddings()`; None in another process"""
    source: dict[str, Any] | None = None
    """of an encoder-decoder what its encoder read (by the name of its input, with `attention_mask`, a row for each of
    the call's), and `encoder_outputs`"""
    coupled: bool = False
    """whether the random numbers that choose the target's tokens are known before: `pick` goes by them"""
    most_rows: int = 0
    """at once, where rows come and go"""
    most_tokens: int = 0
    """of those together: what a cache may hold"""
    forwards: str = "auto"
    """how the call's are made: `Rules.forwards`"""

    def read(self, row: int) -> list[int]:
        """The tokens that an encoder was given for a row, without padding; none where it read something else."""
        ids = None if self.source is None else self.source.get("input_ids")
        if ids is None or self.source is None:
            return []
        mask = self.source.get("attention_mask")
        return (ids[row] if mask is None else ids[row][mask[row].bool()]).tolist()

    @property
    def advance(self) -> Advance:
        """How the rows do."""
        return Advance(self.lockstep, 0 if self.most_rows else max(self.max_length - self.prompt_ids.shape[1], 1))

    @property
    def rows(self) -> int:
        """How many are decoded together at most."""
        return self.most_rows or len(self.prompt_ids)


class Runner(Protocol):
    """Forwards of the target over its cache. `forward` appends tokens after each row's length and advances it;
    `truncate` and `keep` set the lengths back."""

    features: Sequence[Feature]
    """to give with each forward"""

    @property
    def lengths(self) -> list[int]:
        """[B] slots that count"""

    @property
    def widths(self) -> Sequence[int]:
        """Of forwards, in tokens per row, to the next of which tokens are padded, the narrowest first; empty where a
        forward is as wide as what it is fed."""

    def prefill(self) -> Forward:
        """The prompt's forward, as plain decoding does it: logits [B, 1, V], features [B, P, H]."""

    def forward(
        self, tokens: Tensor, parents: Sequence[Sequence[int]] | None = None, counts: Sequence[int] | None = None
    ) -> Forward:
        """Append tokens [B, T] to every row.

        Args:
            parents: `[B][T]` index of each token's parent among the T, -1 for the row's last one; None for a chain.
            counts: [B] how many of the T count in each row (the others are overwritten by the next forward).
        """

    def truncate(self, lengths: list[int]) -> None:
        """Roll every row back to its length. Follows every forward."""

    def keep(self, lengths: list[int], paths: list[list[int]]) -> None:
        """Roll back to `lengths`, then keep the tokens of an accepted path (nodes, counted from that length on)."""

    def retire(self, stay: list[int], keep: bool) -> None:
        """Go on with the rows `stay`; put the others' part of the cache aside where it is still wanted."""

    def finish(self, ids: Tensor | None) -> None:
        """Leave the cache as plain decoding leaves it behind the output `ids` [B, columns]; None: as it was after the
        prompt's forward, where a call was interrupted."""
