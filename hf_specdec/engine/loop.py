"""The loop: draft, one target forward, judge, keep, stop, stream, next round.

Two ways to move a batch on:

- *lockstep*: all rows advance together, exactly as in plain decoding, only several positions per forward: a round ends
  at the first position where some row disagrees with its draft. A single row is the simple case of it.
- *ragged*: each row advances by its own accepted count (staggered: up to a bound), and leaves when it stops.
"""

from copy import copy, deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..budget import Cost, Learned
from ..clock import now
from ..protocol import Draft, DraftContext, Forward, Verdict
from ..schedule import AnyDrafter, Round, Schedule
from ..stats import SpeculationStats
from ..target.devices import input_device
from ..target.inputs import CACHE, as_when_decoding, own_cache, position_limit
from ..target.probe import ability
from ..target.ranks import ranks_of
from ..target.staggered import farthest
from ..target.state import StateRunner
from ..transfer import moved, to_host
from ..verify.drafts import as_chain, inputs_of, is_sound
from ..verify.picking import DraftPicker
from ..verify.processing import Bans
from ..verify.randomness import Randomness
from .call import Call, Mode, choose_mode
from .checks import most_nodes, successors_of
from .guard import GuardedDrafter, GuardedSession
from .outputs import along_paths
from .own_runner import target_runner
from .own_schedule import schedule_of
from .paying import Paying, record_of
from .ranks import SharedSession
from .serial import Serial, in_step
from .session_stats import take_over
from .static_cache import stand_in
from .text import Text

_costs: Learned[Cost] = Learned(Cost)
"""of each target's forwards; of those that a drafter's own runner widens apart"""


def decode(call: Call, drafter: AnyDrafter) -> GenerateDecoderOnlyOutput | Tensor:
    """Generate with a drafter what plain decoding would generate.

    Raises:
        PlainDecodingNeeded: the model, its cache or the call do not allow more; nothing has been touched.
    """
    guarded = GuardedDrafter(drafter)
    with stand_in(call):
        mode = choose_mode(call, guarded)
        if call.streamer is not None:
            call.streamer.put(call.input_ids.cpu())
        with torch.no_grad():
            output = Decoding(call, guarded, mode).run()
    if not isinstance(output, Tensor):
        output[CACHE] = call.model_kwargs[CACHE]
    return output


class Decoding:
    """One call: its text, the judge, the target's runner, the drafter's session, and a schedule."""

    def __init__(self, call: Call, drafter: GuardedDrafter, mode: Mode) -> None:
        self.call, self.drafter, self.mode, self.ragged = call, drafter, mode, mode.ragged
        self.device, self.vocab = call.input_ids.device, ability(call.target).vocab_size
        self.target_device = input_device(call.target)  # asked once: transformers looks for it among the parameters
        self.do_sample = call.draws
        self.stats = SpeculationStats(mode=mode.name)
        randomness = Randomness.from_torch() if call.config.do_sample else Randomness(0)
        self.ranks = ranks_of(call.target)
        if self.ranks is not None:
            randomness.seed = self.ranks.share(randomness.seed)
        self.judge = call.judge(randomness, self.stats)
        self.shown_processing = deepcopy(call.processing)
        self.drawing = copy(randomness)
        """of drafts: the picker is the drafter's, and may be spoilt"""
        self.picker = DraftPicker(
            self.shown_processing, self.vocab, self.do_sample, self.drawing, self.device, copy(self.judge.noise)
        )
        self.cost = _costs.of(call.target, type(drafter.drafter) if drafter.brings_runner else None)
        self.text = Text(call, mode.ragged)
        self.shown_stats = SpeculationStats()
        self.schedule: Schedule
        self.paying: Paying | None = None
        self.session: Any = None
        """the drafter's, guarded; shared where the target is spread over ranks"""
        self.round = 0
        self.waited = 0.0
        """seconds for which the schedule held the next round up"""

    def run(self) -> GenerateDecoderOnlyOutput | Tensor:
        start = now()
        try:
            self._decode(start)
            if self.call.streamer is not None:
                self.call.streamer.end()
            return self._result()
        except BaseException:
            if self.call.keeps_cache and self.stats.target_calls:  # the prompt was read
                self.runner.finish(None)
            raise

    def _decode(self, start: float) -> None:
        """The prompt and all rounds. The session is closed in any case."""
        try:
            self._open()
            self._prefill()
            with as_when_decoding(self.call.target):
                while not all(self.text.finished):
                    self._play_round()
        finally:
            if self.session is not None:
                self.session.close()
            take_over(self.shown_stats, self.stats)
            parts = [part for part in (self.session, self.paying) if part is not None]
            said = [self.drafter.dropped] if self.drafter.dropped else [part.note() for part in parts]
            self.stats.notes += filter(None, [self.call.rules.note(), *said])
            self.stats.plain_steps = max(0, self.text.longest() - 1)
            self.stats.total_seconds = now() - start
            self.drafter.report(self.stats)

    def _open(self) -> None:
        """The session, and the target's runner around which it may put one of its own."""
        call = self.call
        context = DraftContext(
            prompt_ids=call.input_ids.clone(),
            prompt_mask=call.prompt_mask.clone(),
            max_length=self._max_length(),
            vocab_size=self.vocab,
            eos_token_ids=call.stopping.eos,
            do_sample=self.do_sample,
            lockstep=not self.ragged,
            trees=self.mode.trees,
            pick=self.picker,
            device=self.device,
            stats=self.shown_stats,
            forbids=Bans(self.shown_processing, self.vocab) or None,
            cost=self.cost.copy(),
            target=call.target,
            source=call.source,
            coupled=self.judge.noise is not None,
        )
        self.session = (
            GuardedSession(self.drafter, context, self.cost)
            if self.ranks is None
            else SharedSession(self.ranks, self.drafter, context, self.cost)
        )
        self.runner = target_runner(call, self.drafter, self.session, self.mode)
        self.judge.likeliest = self.session.ask(lambda session: successors_of(session, self.vocab)) or 0
        self.schedule = schedule_of(self.drafter, self.session, context, self.device, self.vocab)
        self.serial = isinstance(self.schedule, Serial)
        keeps_state = self.mode.runner is StateRunner
        weighs = self.session.ask(lambda session: bool(session.weighs))
        if self.ranks is None and (keeps_state or not weighs):  # ranks go by clocks of their own
            mine = self.drafter.drafter, id(call.target), self.do_sample
            record = partial(record_of, *mine)
            self.schedule = self.paying = Paying(self.schedule, record, keeps_state, own_order=not self.serial)

    def _prefill(self) -> None:
        """The prompt's forward is the verification of an empty draft."""
        began = now()
        forward = self.runner.prefill()
        held = self.runner.lengths[0] - self.text.prompt_columns
        self.last_column = position_limit(self.call.target) - held
        cache = own_cache(self.call.model_kwargs[CACHE])
        self.text.steps.windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
        self.stats.target_calls = 1
        empty = Draft.from_lists([[]] * self.text.rows, self.device)
        verdict, _ = self._judged(empty, forward, None)
        self.stats.prefill_seconds = now() - began
        verdict.features = self._shown(forward.features)
        self._drop_finished()
        self.session.ask(lambda session: session.observe_prompt(verdict))

    def _play_round(self) -> None:
        """Draft, verify in one forward, keep what the judge accepts, roll the rest back."""
        text, call = self.text, self.call
        self.round += 1
        self.drawing.round = self.judge.randomness.round = self.round
        began = now()
        passive, active = text.passive(), [not text.finished[row] for row in text.sequences.rows]
        fed = self.schedule.feed(Round(text.view(), self._room(), passive, not self.ragged))
        fed = fed if self.mode.trees else as_chain(fed)
        fed = fed if self.ragged or fed.parents is not None else in_step(fed, passive, call.pad_token_id)
        verifying, width = now(), fed.tokens.shape[1] + 1
        starts = list(self.runner.lengths)
        if not self.session.alive:
            self.runner.features, self.judge.likeliest = (), 0
        forward = self.runner.forward(*self._inputs(fed))
        forward.logits = moved(forward.logits, self.device)
        launched = now()
        draft, answered = self.schedule.test(fed)
        tested = now()
        verdict, sound = self._judged(draft, forward, answered)
        if self.device.type != "cpu":  # a forward is over only when its results have been looked at
            launched, tested = tested, now()
        verdict.seconds, verdict.width = launched - verifying, forward.logits.shape[1]
        verdict.draft_seconds = self.waited + verifying - began + tested - launched
        self._keep(starts, fed, verdict)
        self._count(draft, verdict, active, width=width)
        self._drop_finished()
        if not sound:
            self.session.drop("it returned token ids or probabilities out of range, or a q that does not match them")
        self.stats.draft_seconds += verdict.draft_seconds
        if self.serial:  # beside a worker in the background a forward takes longer
            again = max(starts) - min(starts) if self.mode.staggered else 0
            self.cost.observe_forward(len(verdict.rows), again + width, verdict.seconds)
        if self.paying is not None:
            self.paying.observe(sum(map(len, verdict.tokens)))
        self.session.ask(lambda session: session.observe(verdict))  # which may spoil it
        if self.serial:
            self.cost.observe_between(width, now() - tested)
        settling = now()
        self.schedule.settle(verdict)
        self.waited = now() - settling

    def _inputs(self, draft: Draft) -> tuple[Tensor, list[list[int]] | None]:
        """The last accepted token followed by the draft [B, K + 1], and their parents in a tree."""
        tokens, parents = inputs_of(self.text.last(), draft, self.vocab)
        self.stats.target_calls += 1
        self.stats.verify_widths[tokens.shape[1]] += 1
        return moved(tokens, self.target_device), parents

    def _judged(self, draft: Draft, forward: Forward, answered: list[int] | None) -> tuple[Verdict, bool]:
        """Judge and append. What became of the draft, and whether it was sound."""
        text, call, logits = self.text, self.call, forward.logits
        text.reserve(max(logits.shape[1], draft.tokens.shape[1] + 1))
        s, correct = text.sequences, self.schedule.correct
        rows = list(s.rows)
        if call.processing.opaque:
            logits = logits[:, : _places_of_all(forward.nodes, logits.shape[1])]
            sound = bool(is_sound(draft, self.vocab))
            steps = self.judge.stepwise(draft, logits, s, correct)
            grown = text.grow_together(steps, logits, forward.outputs, self.round == 0, written=False)
            paths, likeliest = [list(range(n)) for n in grown.accepted], []
        else:
            block = self.judge.block(draft, logits, s, forward.nodes, answered, correct)
            sound, paths, likeliest = block.sound, [judgement.path for judgement in block.rows], block.likeliest
            if not self.ragged:
                steps = text.replay(block)
                grown = text.grow_together(steps, logits, forward.outputs, self.round == 0, written=True)
        if self.ragged:
            cost = self.cost if self.ranks is None else None  # ranks go by clocks of their own
            emitted = text.grow_ragged(block, farthest(cost, len(rows)) if self.mode.staggered else None)
            accepted = [min(len(path), len(new)) for path, new in zip(paths, emitted, strict=True)]
            self.stats.emitted_tokens += sum(map(len, emitted))
        else:
            emitted, accepted = grown.emitted, grown.accepted
            self.stats.emitted_tokens += grown.counted
        depths = zip(draft.depths(), draft.lengths, strict=True)
        verdict = Verdict(
            rows=rows,
            drafted=[max(below[:k], default=0) for below, k in depths],
            accepted=accepted,
            tokens=emitted,
            stopped=[text.finished[row] for row in rows],
            width=logits.shape[1],
            seconds=0.0,
            draft=draft,
            paths=[path[:n] for path, n in zip(paths, accepted, strict=True)],
            nodes=forward.nodes,
            likeliest=likeliest,
        )
        verdict.features = self._shown(along_paths(forward, draft, verdict))
        return verdict, sound

    def _shown(self, features: dict[int, Tensor]) -> dict[int, Tensor]:
        """Features as a session may have them: it may write into them, and the caller may be given the same states."""
        if self.text.steps.hidden_states is None:
            return features
        return {name: states.clone() for name, states in features.items()}

    def _keep(self, starts: list[int], fed: Draft, verdict: Verdict) -> None:
        """Of what was fed the accepted tokens stay in the cache, but for the last: it is fed again."""
        kept = [path[: len(new) - 1] for path, new in zip(verdict.paths, verdict.tokens, strict=True)]
        if fed.parents is not None:
            self.runner.keep([start + 1 for start in starts], kept)
        else:
            self.runner.truncate([start + len(new) for start, new in zip(starts, verdict.tokens, strict=True)])

    def _count(self, draft: Draft, verdict: Verdict, active: list[bool], width: int) -> None:
        """Statistics of a round, over the rows that were not finished before it."""
        self.stats.verify_seconds += verdict.seconds
        by_width = self.stats.seconds_by_width
        by_width[width] = by_width.get(width, 0.0) + verdict.seconds
        for b in (b for b, counts in enumerate(active) if counts):
            self.stats.row_steps += 1
            if verdict.drafted[b]:
                self.stats.drafted_per_position.update(range(verdict.drafted[b]))
                self.stats.accepted_per_position.update(range(verdict.accepted[b]))
            if draft.sources:
                self.stats.sources[draft.sources[b] if draft.lengths[b] else "none"] += 1

    def _drop_finished(self) -> None:
        """Ragged rows that stopped leave the batch."""
        rows = len(self.text.sequences.rows)
        stay = self.text.leaving()
        if len(stay) < rows:
            self.runner.retire(stay, keep=self.call.keeps_cache)

    def _room(self) -> list[int]:
        """[B] tokens that may be drafted: the target's own one needs a place, and drafted ones need positions that its
        embeddings have."""
        s, end = self.text.sequences, min(self._max_length() - 1, self.last_column)
        most = most_nodes(len(s.rows)) if s.rows else 0
        return [
            0 if self.text.finished[row] else min(most, max(0, end - columns))
            for row, columns in zip(s.rows, s.lengths, strict=True)
        ]

    def _max_length(self) -> int:
        return 2**31 if (most := self.call.stopping.max_length) is None else most

    def _result(self) -> GenerateDecoderOnlyOutput | Tensor:
        call, ids, steps = self.call, self.text.ids(), self.text.steps
        if call.keeps_cache:
            self.runner.finish(ids)
        if not call.config.return_dict_in_generate:
            return ids
        if call.source is not None:
            kept = {"scores": steps.scores, "logits": steps.logits, CACHE: call.model_kwargs[CACHE]}
            both = GenerateEncoderDecoderOutput(sequences=ids, **kept)
            both.speculation = self.stats
            return both
        output = GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=steps.scores,
            logits=steps.logits,
            attentions=steps.attentions,
            hidden_states=steps.hidden_states,
            **{CACHE: call.model_kwargs[CACHE]},
        )
        output.speculation = self.stats
        return output


def _places_of_all(nodes: Tensor | None, places: int) -> int:
    """Of a chain, how many leading places every row has logits for: behind them something was pruned in some row."""
    if nodes is None:
        return places
    return 1 + min(row.index(-1) if -1 in row else len(row) for row in to_host(nodes))
