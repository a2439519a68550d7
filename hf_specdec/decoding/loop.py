"""The loop: draft, one target forward, judge, keep, stop, stream, next round.

Two ways to move a batch on:

- *lockstep*: all rows advance together, exactly as in plain decoding, only several positions per forward: a round ends
  at the first position where some row disagrees with its draft. A single row is the simple case of it.
- *ragged*: each row advances by its own accepted count, and leaves the batch when it stops.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from ..drafters.base import Drafter
from ..judge.judging import Judge, Judgement, is_sound
from ..judge.picking import DraftPicker
from ..judge.processing import Bans
from ..judge.randomness import Randomness
from ..protocol import Draft, DraftContext, Sequences, Verdict
from ..stats import SpeculationStats
from ..target.cache import is_adoptable
from ..target.ranks import ranks_of
from ..target.runner import LockstepRunner, RaggedRunner, position_limit, prefill
from .call import Call, choose_ragged
from .guard import GuardedSession, as_chain
from .outputs import StepOutputs
from .shared import SharedSession

BLOCK = 256
"""columns by which the buffer of token ids grows"""


def decode(call: Call, drafter: Drafter) -> GenerateDecoderOnlyOutput | Tensor:
    """Generate with a drafter what plain decoding would generate.

    Raises:
        PlainDecodingNeeded: the model, its cache or the call do not allow more; nothing has been touched.
    """
    ragged = choose_ragged(call, drafter)
    if call.streamer is not None:
        call.streamer.put(call.input_ids.cpu())
    with torch.no_grad(), drafter.runner(call.target) or nullcontext() as wrap:
        schedule = drafter.schedule() or Decoding
        return schedule(call, drafter, ragged, wrap).run()


class Decoding:
    """The state of one call, and the serial schedule: a round drafts, then verifies. Other schedules override
    `play_round`."""

    runner: Any
    guard: type[GuardedSession] = GuardedSession
    session: GuardedSession | None = None

    def __init__(self, call: Call, drafter: Drafter, ragged: bool, wrap: Callable[[Any], Any] | None) -> None:
        self.call, self.drafter, self.ragged, self.wrap = call, drafter, ragged, wrap
        self.stopping = call.stopping
        self.device = call.target.device
        self.stats = SpeculationStats(mode="ragged" if ragged else "lockstep")
        self.randomness = Randomness.from_torch() if call.config.do_sample else Randomness(0)
        self.ranks = ranks_of(call.target)
        if self.ranks is not None:
            self.randomness.seed = self.ranks.share(self.randomness.seed)
        self.judge = Judge(call.processing, call.processors, bool(call.config.do_sample), self.randomness, self.stats)
        self.steps = StepOutputs(call.config)
        self.rows, self.prompt_columns = call.input_ids.shape
        mask = call.model_kwargs.get("attention_mask")
        self.prompt_mask = (
            torch.ones_like(call.input_ids)
            if mask is None
            else mask[:, -self.prompt_columns :].to(call.input_ids.device)
        )
        self.sequences = Sequences(
            ids=torch.nn.functional.pad(call.input_ids, (0, BLOCK)),
            lengths=[self.prompt_columns] * self.rows,
            rows=list(range(self.rows)),
            tokens=[
                [token for token, seen in zip(ids, mask, strict=True) if seen]
                for ids, mask in zip(call.input_ids.tolist(), self.prompt_mask.tolist(), strict=True)
            ],
        )
        self.finished = [False] * self.rows
        self.texts: dict[int, Tensor] = {}
        self.round = 0

    def run(self) -> GenerateDecoderOnlyOutput | Tensor:
        start = time.perf_counter()
        try:
            self._prefill()
            self.stats.prefill_seconds = time.perf_counter() - start
            if not all(self.finished):
                self._open_session()
            while not all(self.finished):
                self.play_round()
        finally:
            if self.session is not None:
                self.session.close()
            self.stats.total_seconds = time.perf_counter() - start
            self.drafter.last_stats = self.stats
        if self.call.streamer is not None:
            self.call.streamer.end()
        return self._result()

    def _prefill(self) -> None:
        """The prompt's forward is the verification of an empty draft."""
        call = self.call
        cache = call.model_kwargs["past_key_values"]
        outputs = prefill(call.target, call.input_ids, call.model_kwargs, call.new_columns)
        self.ragged = self.ragged and is_adoptable(cache)
        self.stats.mode = "ragged" if self.ragged else "lockstep"
        if self.ragged:
            self.runner = RaggedRunner(call.target, cache, call.model_kwargs, self.prompt_columns)
        else:
            self.runner = LockstepRunner(call.target, cache, call.model_kwargs, call.input_ids)
        if self.wrap is not None:
            self.runner = self.wrap(self.runner)
        self.last_column = position_limit(call.target) - (cache.get_seq_length() - self.prompt_columns)
        self.steps.windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
        self.stats.target_calls = 1
        logits = outputs.logits[:, -1:].to(call.input_ids.device)
        self.vocab = logits.shape[-1]
        self._advance(Draft.from_lists([[]] * self.rows, logits.device), logits, outputs)
        self._drop_finished()

    def _open_session(self) -> None:
        call = self.call
        self.picker = DraftPicker(
            call.processing, self.vocab, bool(call.config.do_sample), self.randomness, call.input_ids.device
        )
        context = DraftContext(
            prompt_ids=call.input_ids,
            prompt_mask=self.prompt_mask,
            max_length=self._max_length(),
            vocab_size=self.vocab,
            eos_token_ids=self.stopping.eos,
            do_sample=bool(call.config.do_sample),
            lockstep=not self.ragged,
            trees=self.ragged,
            pick=self.picker,
            device=call.input_ids.device,
            stats=self.stats,
            forbids=Bans(call.processing, self.vocab) or None,
        )
        if self.ranks is None:
            self.session = self.guard(self.drafter, context)
        else:
            self.session = SharedSession(self.ranks, self.guard, self.drafter, context)

    def play_round(self) -> None:
        """Draft, verify in one forward, keep what the judge accepts, roll the rest back."""
        assert self.session is not None
        self.round += 1
        self.picker.attempt = self.round
        began = time.perf_counter()
        draft = self._draft(self.session)
        verifying = time.perf_counter()
        self.stats.draft_seconds += verifying - began
        slots, rows = list(self.runner.lengths), list(self.sequences.rows)
        active = [not self.finished[row] for row in rows]
        outputs = self.runner.forward(*self._verification_inputs(draft))
        logits = outputs.logits.to(self.call.input_ids.device)
        seconds = time.perf_counter() - verifying
        draft = self._tested(draft, self.session)
        emitted, accepted, paths, sound = self._advance(draft, logits, outputs)
        if logits.device.type != "cpu":  # a forward is over only when its results have been looked at
            seconds = time.perf_counter() - verifying
        if draft.parents is not None:
            kept = [path[: len(new) - 1] for path, new in zip(paths, emitted, strict=True)]
            self.runner.keep([slot + 1 for slot in slots], kept)
        else:
            self.runner.truncate([slot + len(new) for slot, new in zip(slots, emitted, strict=True)])
        stopped = [self.finished[row] for row in rows]
        width = logits.shape[1]
        self.stats.verify_seconds += seconds
        drafted = [max(depths[:k], default=0) for depths, k in zip(draft.depths(), draft.lengths, strict=True)]
        verdict = Verdict(rows, drafted, accepted, emitted, stopped, width, seconds, draft)
        self._count(draft, verdict, active)
        self._drop_finished()
        if not sound:
            self.session.drop("it returned token ids or probabilities out of range")
        self.session.observe(verdict)

    def _tested(self, draft: Draft, session: GuardedSession) -> Draft:
        """A schedule's hook, called after the forward: what is judged, where that is more than the target was fed."""
        return draft

    def _draft(self, session: GuardedSession) -> Draft:
        s = self.sequences
        done = [self.finished[row] for row in s.rows]
        budget = [0 if out else self._room(n) for n, out in zip(s.lengths, done, strict=True)]
        draft = session.draft(s, budget)
        if self.ragged:
            return draft
        # Rows in lockstep advance by their shortest draft; finished rows are fed padding, as in plain decoding.
        draft = as_chain(draft)
        passive = [out and self.stopping.has_eos for out in done]
        width = min(length for length, out in zip(draft.lengths, passive, strict=True) if not out)
        tokens = draft.tokens[:, :width]
        if any(passive):
            tokens = tokens.masked_fill(torch.tensor(passive, device=tokens.device)[:, None], self.call.pad_token_id)
        probs = None if draft.token_probs is None else draft.token_probs[:, :width]
        return Draft(tokens, [0 if out else width for out in passive], None, probs, draft.sources)

    def _verification_inputs(self, draft: Draft) -> tuple[Tensor, Tensor | None]:
        """The last accepted token followed by the draft [B, K + 1], and their parents in a tree."""
        s = self.sequences
        last = s.ids.gather(1, torch.tensor(s.lengths, device=s.ids.device)[:, None] - 1)
        tokens = torch.cat([last, draft.tokens.clamp(0, self.vocab - 1)], dim=1)
        self.stats.target_calls += 1
        self.stats.verify_widths[tokens.shape[1]] += 1
        if draft.parents is None:
            return tokens.to(self.device), None
        root = draft.parents.new_full((len(s.rows), 1), -1)
        return tokens.to(self.device), torch.cat([root, draft.parents + 1], dim=1).to(self.device)

    def _advance(
        self, draft: Draft, logits: Tensor, outputs: Any
    ) -> tuple[list[list[int]], list[int], list[list[int]], bool]:
        """Judge and append. Returns per row: the tokens appended, how many of them were drafted, the accepted path;
        and whether the draft was sound."""
        self._reserve(logits.shape[1])
        ask = self.session.residual if self.session is not None else lambda row, node: None
        if self.call.processing.opaque:
            steps = self.judge.stepwise(draft, logits, self.sequences, ask)
            sound = bool(is_sound(draft, self.vocab))
            return *self._advance_lockstep(steps, logits, outputs), [], sound
        judged, scores, sound = self.judge.block(draft, logits, self.sequences, ask)
        paths = [judgement.path for judgement in judged]
        if self.ragged:
            return *self._advance_ragged(judged, draft), paths, sound
        return *self._advance_lockstep(replay(judged, draft, scores), logits, outputs), paths, sound

    def _advance_ragged(self, judged: list[Judgement], draft: Draft) -> tuple[list[list[int]], list[int]]:
        """Each row by itself, cut where it stops."""
        s, drafted = self.sequences, draft.tokens.tolist()
        texts = [[drafted[b][node] for node in judged[b].path] + [judged[b].own] for b in range(len(judged))]
        where = [(b, s.lengths[b] + i) for b, text in enumerate(texts) for i in range(len(text))]
        rows, columns = torch.tensor(where, device=s.ids.device).T
        s.ids[rows, columns] = torch.tensor([token for text in texts for token in text], device=s.ids.device)
        emitted = []
        for b, text in enumerate(texts):
            stops = (self.stopping.row(s.ids[b, : s.lengths[b] + i + 1], token) for i, token in enumerate(text))
            cut = next((i + 1 for i, stop in enumerate(stops) if stop), None)
            self.finished[s.rows[b]] = cut is not None
            new = text[:cut]
            s.tokens[b].extend(new)
            s.lengths[b] += len(new)
            self.stats.emitted_tokens += len(new)
            emitted.append(new)
        return emitted, [min(len(j.path), len(new)) for j, new in zip(judged, emitted, strict=True)]

    def _advance_lockstep(
        self, steps: Iterator[tuple[list[int], list[bool], Tensor]], logits: Tensor, outputs: Any
    ) -> tuple[list[list[int]], list[int]]:
        """All rows together, position by position: plain decoding's own loop over logits that are already there."""
        s, start = self.sequences, self.sequences.lengths[0]
        emitted: list[list[int]] = [[] for _ in s.rows]
        accepted = [0] * len(s.rows)
        for i, (tokens, agrees, scores) in enumerate(steps):
            passive = [out and self.stopping.has_eos for out in self.finished]
            tokens = [self.call.pad_token_id if out else x for x, out in zip(tokens, passive, strict=True)]
            s.ids[:, start + i] = torch.tensor(tokens, device=s.ids.device)
            s.lengths = [start + i + 1] * len(s.rows)
            for b, token in enumerate(tokens):
                emitted[b].append(token)
                s.tokens[b].append(token)
                accepted[b] += agrees[b]
                self.stats.emitted_tokens += not passive[b]
            self.steps.add(i, logits, scores, outputs, is_prefill=self.round == 0)
            stopped = self.stopping.batch(s.ids[:, : start + i + 1], tokens, self.steps.scores)
            newly = any(now and not before for now, before in zip(stopped, self.finished, strict=True))
            self.finished = [now or before for now, before in zip(stopped, self.finished, strict=True)]
            if self.call.streamer is not None:
                self.call.streamer.put(torch.tensor(tokens))
            together = all(agree or out for agree, out in zip(agrees, passive, strict=True))
            if all(self.finished) or not together or (newly and self.stopping.has_eos):
                break
        return emitted, accepted

    def _count(self, draft: Draft, verdict: Verdict, active: list[bool]) -> None:
        """Statistics of a round, over the rows that were not finished before it."""
        for b in (b for b, counts in enumerate(active) if counts):
            self.stats.row_steps += 1
            self.stats.drafted_per_position.update(range(verdict.drafted[b]))
            self.stats.accepted_per_position.update(range(verdict.accepted[b]))
            if draft.sources:
                self.stats.sources[draft.sources[b]] += 1

    def _drop_finished(self) -> None:
        """Ragged rows that stopped leave the batch."""
        s = self.sequences
        leave = [b for b, row in enumerate(s.rows) if self.finished[row]]
        if not self.ragged or not leave:
            return
        stay = [b for b, row in enumerate(s.rows) if not self.finished[row]]
        for b in leave:
            self.texts[s.rows[b]] = s.ids[b, self.prompt_columns : s.lengths[b]].clone()
        self.runner.retire(stay, keep=self.call.keeps_cache)
        s.ids = s.ids[stay]
        for name in ("lengths", "tokens", "rows"):
            setattr(s, name, [getattr(s, name)[b] for b in stay])

    def _reserve(self, columns: int) -> None:
        """Room for that many more tokens in every row."""
        s = self.sequences
        missing = max(s.lengths) + columns - s.ids.shape[1]
        if missing > 0:
            s.ids = torch.nn.functional.pad(s.ids, (0, -(-missing // BLOCK) * BLOCK))

    def _room(self, columns: int) -> int:
        """Tokens that may be drafted behind so many columns: the target's own one needs a place, and drafted ones
        need positions that its embeddings have."""
        return max(0, min(self._max_length() - 1, self.last_column) - columns)

    def _max_length(self) -> int:
        return self.stopping.max_length if self.stopping.max_length is not None else 2**31

    def _result(self) -> GenerateDecoderOnlyOutput | Tensor:
        call = self.call
        if self.ragged:
            longest = max(len(text) for text in self.texts.values())
            ids = call.input_ids.new_full((self.rows, self.prompt_columns + longest), call.pad_token_id)
            ids[:, : self.prompt_columns] = call.input_ids
            for row, text in self.texts.items():
                ids[row, self.prompt_columns : self.prompt_columns + len(text)] = text
        else:
            ids = self.sequences.ids[:, : self.sequences.lengths[0]].clone()
        if call.keeps_cache:
            self.runner.finish(ids)
        if not call.config.return_dict_in_generate:
            return ids
        output = GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=self.steps.scores,
            logits=self.steps.logits,
            attentions=self.steps.attentions,
            hidden_states=self.steps.hidden_states,
            past_key_values=call.model_kwargs["past_key_values"],
        )
        output.speculation = self.stats
        return output


def replay(judged: list[Judgement], draft: Draft, scores: Tensor) -> Iterator[tuple[list[int], list[bool], Tensor]]:
    """A block's judgement of chains, position by position, while all rows agree with their drafts."""
    drafted = draft.tokens.tolist()
    for i in range(scores.shape[1]):
        agrees = [i < len(judgement.path) for judgement in judged]
        tokens = [drafted[b][i] if agree else judged[b].own for b, agree in enumerate(agrees)]
        yield tokens, agrees, scores[:, i]
