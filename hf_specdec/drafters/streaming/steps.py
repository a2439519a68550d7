"""`StreamSteps`: the streams of the last accepted token, which are all steps of a draft at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...budget import DraftCost, Evidence
from ...clock import mark
from ...protocol import DraftContext, Runner, Sequences, Verdict
from ...transfer import to_device
from ..steps import Several, Step, Steps, Took
from .config import StreamingConfig
from .late import LateStreams, OwnLayers
from .runner import StreamRunner
from .streams import Streams
from .upper import Upper


class StreamSteps(Steps):
    """Stream j foretells the token of place j, whatever stands before it in the draft."""

    blind = at_once = independent = True
    name = StreamingConfig.drafter_type
    unread = 0

    def __init__(
        self,
        context: DraftContext,
        config: StreamingConfig,
        streams: Streams,
        upper: Upper,
        cost: DraftCost,
        own: OwnLayers | None = None,
    ) -> None:
        """
        Args:
            cost: told what they take beside the target's forwards.
            own: what streams run through behind the verdict; None for streams that join the target's forwards.
        """
        self.context, self.config, self.streams, self.upper, self.own = context, config, streams, upper, own
        self.cost, self.shares = cost, config.shares(context.do_sample)
        self._runner: StreamRunner | LateStreams | None = None
        self.rows: list[int] = []
        self.ends: Tensor | None = None
        """[rows, γ, H] the streams of the last token of each row that the target has read; [rows, H] what they begin
        with where they have not run yet"""
        self._rested = False
        """whether nothing was drafted in the last round"""
        self._all: Several
        """that this round has drafted"""
        self._took: Took | None = None
        self.pruned = 0
        """nodes, in mid-forward"""

    @property
    def slots_per_token(self) -> int:  # type: ignore[override]
        return 1 + self.streams.gamma if self.own is None else 1

    @property
    def candidates(self) -> int:
        """k"""
        return self.config.num_candidates if self.context.trees else 1

    def runner(self, runner: Runner) -> Runner:
        if self.own is None:
            self._runner = StreamRunner(runner, self.streams, self.upper, self.config.prune_below)
        else:
            self._runner = LateStreams(runner, self.upper, self.own)
        return self._runner

    # ------------------------------------------------------------------ a round

    def serves(self, row: int) -> bool:
        """A new row has no streams before its first forward."""
        return self.ends is not None and row in self.rows

    def room(self, sequences: Sequences) -> int:
        return 0 if self._runner is None else self.streams.gamma

    def rest(self, sequences: Sequences, wanted: bool) -> None:
        self._are_read(sequences, wanted)

    def begin(self, sequences: Sequences, steps: int, planned: int = 0) -> None:
        self._are_read(sequences, wanted=True)
        began = mark(self.context.device)
        tokens, chances = self._foretold(sequences.rows)
        ended = mark(self.context.device)
        self._took = Took(self.streams.gamma, began, ended, ended, recorded=False)
        self.steps, self._all = 0, Several(tokens, chances)

    def _foretold(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[rows, γ, k] each stream's likeliest tokens, and the chances that it gives them."""
        ends = self._ends_of(rows)
        if ends is None:
            nothing = torch.zeros(len(rows), self.streams.gamma, self.candidates, device=self.context.device)
            return nothing.long(), nothing
        likeliest = self.streams.head(self.upper, ends).float().softmax(-1).topk(self.candidates)
        return self.streams.named(likeliest.indices), likeliest.values

    def step(self) -> Step:
        return self.several(1).only

    def several(self, count: int) -> Several:
        begun, self.steps = self.steps, self.steps + count
        return self._all.part(begun, count)

    def _are_read(self, sequences: Sequences, wanted: bool) -> None:
        """Whether a next draft may read the streams of this round's forward.

        None does where the texts are full after this round. Where drafts rest, the first rest is often a round that is
        timed; behind the second no draft is expected, and a draft that does come waits a round for streams.
        """
        rested, self._rested = self._rested, not wanted
        left = self.context.max_length - 1 - min(sequences.lengths)  # room of the emptiest row
        if self._runner is not None:
            self._runner.rides = left > 1 and (wanted or not rested)

    def _ends_of(self, rows: Sequence[int]) -> Tensor | None:
        """[rows, γ, H] the streams behind each row's last token, of any other for a row that has none; None where they
        cannot be run for these rows alone."""
        assert self.ends is not None and self._runner is not None, "of rows that it serves"
        if list(rows) != self.rows:
            known = {row: place for place, row in enumerate(self.rows)}
            places = [known.get(row, 0) for row in rows]
            self.ends, self.rows = self.ends[to_device(places, self.ends.device)], list(rows)
        self.ends = self._runner.streams_at(self.ends)
        return self.ends

    # ------------------------------------------------------------------ what became of it

    def observe_prompt(self, verdict: Verdict) -> None:
        self._look(verdict)

    def observe(self, verdict: Verdict, kept: Sequence[int]) -> None:
        if self._took is not None:
            self._took.tell(self.cost, usual=True)
            self._took = None
        self.steps = 0
        if verdict.draft is not None and isinstance(self._runner, StreamRunner) and self._runner.kept is not None:
            looked = zip(verdict.draft.lengths, self._runner.kept, strict=True)
            self.pruned += sum(n - sum(1 <= fed <= n for fed in stayed) for n, stayed in looked)
        self._look(verdict)

    def _look(self, verdict: Verdict) -> None:
        """Keep the streams at the node from which the target chose each row's last token, where that has any."""
        self.ends = None
        if self._runner is None:
            return
        self._runner.rides = False  # until a draft is asked for
        if (states := self._runner.states) is None:
            return
        found: list[tuple[int, int]] = []
        for b, (path, tokens) in enumerate(zip(verdict.paths or [[]] * len(verdict.rows), verdict.tokens, strict=True)):
            decided, at = path[: len(tokens) - 1], self._runner.at[b]
            fed = decided[-1] + 1 if decided else 0
            found += [(b, at.index(fed))] if fed in at else []
        if found:
            index = to_device(found, states.device)
            self.ends = states[index[:, 0], index[:, 1]]
            self.rows = [verdict.rows[b] for b, _ in found]

    def notes(self) -> list[str]:
        if not self.pruned:
            return []
        return [f"{self.pruned} drafted tokens were pruned in the middle of the forward"]

    # ------------------------------------------------------------------ what its candidates are counted under

    def said(self, place: int, rank: int) -> Evidence:
        return Evidence.of(f"stream {place}")

    def evidence(self, place: int, rank: int) -> Sequence[Evidence]:
        return [*super().evidence(place, rank), Evidence.of(f"stream {place}", rank)]

    def guess(self, place: int, rank: int) -> float:
        """As training has measured it."""
        return self.shares[place][rank]
