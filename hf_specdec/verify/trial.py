"""`Trial`, a round's drafts before the judge, and `Result`, what the judge gives each row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..protocol import Draft, Forward, Sequences
from ..schedule import Meanwhile
from ..transfer import to_device
from .drafts import NO_VALUES, padded, to_host_together
from .largest import topk
from .verification import NOTHING, last_two


@dataclass
class Result:
    """What a round gives a row: what the judge said, once it is taken no more than the row has room for."""

    path: list[int]
    """the accepted nodes of its draft, from the root down"""
    tokens: list[int]
    """that it gains: the accepted ones, then the target's own (the recovered or the bonus token), if there is one.
    `NOTHING` where none can be drawn, which is an error if the text gets there. Cut where the row stops."""
    drafted: int = 0
    """draft tokens that were verified, one below the other"""
    likeliest: list[tuple[int, list[int]]] = field(default_factory=list)
    """as in `Verdict`"""
    emitted: int = 0
    """of `tokens` the ones that are no padding; said by who takes them"""

    @property
    def kept(self) -> list[int]:
        """The accepted nodes that stay in the cache: what was appended last is fed again."""
        return self.path[: len(self.tokens) - 1]


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


@dataclass(eq=False)
class Trial:
    """What is judged in a round, of rows whose tokens are chosen in the same way. A *place* is where the target was
    asked: behind the last accepted token (place 0), or behind a node of the draft."""

    draft: Draft
    forward: Forward
    """the target's, over N places"""
    sequences: Sequences
    answered: list[int] | None = None
    """[B] nodes that the forward answers for; None for all"""
    meanwhile: Meanwhile | None = None
    """told of chains what is accepted before the host has read it"""
    successors: int = 0
    """how many of the target's likeliest tokens to tell of every place"""

    last: Tensor | None = None
    """[B, 1] what the drafts of such chains hang on"""

    scores: Tensor = field(init=False)
    """[B, N, V] after the call's processors"""
    nodes: Sequence[Sequence[int]] = field(init=False)
    """[B][at most N - 1] the node at each place from 1 on; -1 for none"""
    depths: list[list[int]] = field(init=False)
    """[B][K] how many drafted tokens lead to each node, itself included"""
    in_range: Tensor = field(init=False)
    """whether the draft's ids and probabilities are; on the device, and without a value where nothing was drafted"""
    sound: bool = field(default=True, init=False)
    """the same once it was read; of an unsound draft no token is used"""
    tokens: list[list[int]] = field(init=False)
    """[B] the drafted tokens of each row that count, once they were read: none of a draft that is not sound"""
    texts: Tensor = field(init=False)
    """[B, W] what the rows gain, on the device; what lies past a row's is undefined"""
    likeliest: list[list[int]] = field(init=False)
    """[B][N · `successors`] token ids"""

    @property
    def counted(self) -> Tensor:
        """[B] on the device, how many tokens of each row's draft count: none of a draft that is not sound."""
        lengths = to_device(self.draft.lengths, self.scores.device)
        return lengths * self.in_range if self.in_range.numel() else lengths

    def last_two(self, n: Tensor, texts: Tensor) -> Tensor:
        """[B, 2] the last tokens of each text where it gains n + 1 tokens of `texts` [B, W]."""
        assert self.last is not None
        return last_two(self.last, texts, n)

    def places(self, b: int) -> dict[int, int]:
        """The place of each node of row b that there are scores for. Node -1 is the last accepted token."""
        return {-1: 0} | {node: place for place, node in enumerate(self.nodes[b], 1) if node >= 0}

    def read(self, *others: Tensor, meanwhile: Callable[[], object] | None = None) -> list[list[Any]]:
        """Bring to the host what the device has found, the round's one transfer; returns the values of `others`, each
        in a flat list.

        Args:
            meanwhile: as in `transfer.to_host`.
        """
        draft, likeliest = self.draft, NO_VALUES
        if self.successors:
            likeliest = topk(self.forward.logits, self.successors)[1]
        tokens = NO_VALUES if draft.known is not None else draft.tokens
        told = to_host_together(self.in_range, tokens, likeliest, *others, meanwhile=meanwhile)
        sound, flat, behind, *rest = told
        rows, per_row = len(draft.lengths), len(behind) // len(draft.lengths)
        self.likeliest = [behind[b * per_row : (b + 1) * per_row] for b in range(rows)]
        k = draft.tokens.shape[1]
        self.learn(all(sound), draft.known or [flat[b * k : (b + 1) * k] for b in range(rows)])
        return rest

    def learn(self, sound: bool, drafted: Sequence[Sequence[int]]) -> None:
        """Whether the draft is sound, and its tokens [B, at least K]."""
        self.sound = sound
        counted = self.draft.lengths if sound else [0] * len(self.draft.lengths)
        self.tokens = [list(row[:length]) for row, length in zip(drafted, counted, strict=True)]

    def result(self, b: int, path: list[int], own: int | None) -> Result:
        """What row b gains: an accepted path, and behind it a token of the target's own, if there is one."""
        tokens = [self.tokens[b][node] for node in path]
        drafted = max(self.depths[b][: self.draft.lengths[b]], default=0)
        return Result(path, tokens if own is None else [*tokens, own], drafted, self._behind(b))

    def as_texts(self, results: Sequence[Result]) -> Tensor:
        """What the rows gain, from the host."""
        return padded([result.tokens for result in results], self.scores.device)

    def _behind(self, b: int) -> list[tuple[int, list[int]]]:
        """Each token of row b that the target answered, with its likeliest successors."""
        if not self.successors:
            return []
        count, text = self.successors, self.sequences.tokens[b]
        by_node = {-1: text[-1]} if text else {}  # behind `inputs_embeds` there is no token
        by_node |= dict(enumerate(self.tokens[b]))
        told = []
        for node, place in self.places(b).items():
            if node in by_node:
                told.append((by_node[node], self.likeliest[b][place * count : (place + 1) * count]))
        return told
