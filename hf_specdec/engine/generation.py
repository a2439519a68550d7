"""One `generate` call: all its rows are there from the start."""

from collections.abc import Callable
from copy import copy
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..budget import Cost, Learned
from ..clock import now
from ..protocol import Forward, Verdict
from ..schedule import AnyDrafter
from ..stats import SpeculationStats
from ..target.captured import CapturedRunner
from ..target.inputs import CACHE, as_when_decoding, own_cache, position_limit
from ..target.ranks import ranks_of
from ..target.recorded import recorded_since, recordings
from ..target.shelf import keep_a_share
from ..target.staggered import farthest
from ..target.state import StateRunner
from ..transfer import moved, to_device
from ..verify.randomness import Randomness
from .call import Call
from .drafting import Drafting, context_of
from .engine import Engine
from .fitting import no_draft
from .guard import GuardedDrafter
from .modes import Mode, choose_mode
from .outputs import StepOutputs
from .own_runner import target_runner
from .parts import BatchPart, parts_of
from .rows import Row, Rows
from .static_cache import stand_in
from .taking import Lockstep, Ragged

_costs: Learned[Cost] = Learned(Cost)


def costs_of(call: Call, drafter: GuardedDrafter, captured: bool) -> Cost:
    """Of the target's forwards, as all its calls measure them; apart of those that are captured, and of those that a
    drafter's own runner widens."""
    own = type(drafter.drafter) if drafter.brings_runner else None
    return _costs.of(call.target, (own, captured))


def decode(
    call: Call, drafter: AnyDrafter, costs: Callable[[Call, GuardedDrafter, bool], Cost] = costs_of
) -> GenerateDecoderOnlyOutput | Tensor:
    """Generate with a drafter what plain decoding would generate.

    Args:
        costs: what forwards take, asked with whether they are captured.

    Raises:
        PlainDecodingNeeded: the model, its cache or the call do not allow more; nothing has been touched.
    """
    guarded = GuardedDrafter(drafter)
    with stand_in(call):
        mode = choose_mode(call, guarded)
        if call.streamer is not None:
            call.streamer.put(call.input_ids.cpu())
        with torch.no_grad():
            output = Generation(call, guarded, mode, costs(call, guarded, mode.runner is CapturedRunner)).run()
    if not isinstance(output, Tensor):
        output[CACHE] = call.model_kwargs[CACHE]
    return output


class Generation(Engine):
    """One call, from the prompt to the output."""

    def __init__(self, call: Call, drafter: GuardedDrafter, mode: Mode, cost: Cost) -> None:
        self.call, self.drafter = call, drafter
        stats = SpeculationStats(mode=mode.name)
        self.outputs = StepOutputs(call.config) if StepOutputs.wanted(call.config) else None
        taking = Ragged(self._farthest if mode.staggered else None) if mode.ragged else Lockstep(call, self.outputs)
        rows = Rows(call.input_ids.device)
        super().__init__(call.target, call.ability.vocab_size, rows, mode, taking, cost, stats)
        self.randomness = Randomness.from_torch() if call.config.do_sample else Randomness(0)
        self.ranks = ranks_of(call.target)
        if self.ranks is not None:
            self.randomness.seed = self.ranks.share(self.randomness.seed)
        judge = call.judge(self.randomness, stats)
        self.texts = [Row(b, call, tokens, call.input_ids.shape[1], judge) for b, tokens in enumerate(_texts(call))]
        """all rows, also those that have left"""
        self.rows.join(self.texts, call.input_ids)
        self.drafting: Drafting | None = None

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
        stats, before = self.stats, len(recordings)
        try:
            self._open()
            self._prefill()
            with as_when_decoding(self.model):
                while not all(row.stopped for row in self.rows.all):
                    self.play_round()
            for grammar in self.call.processing.grammars:
                grammar.finish([(row.tokens, row.length) for row in self.texts])
        finally:
            self.settle()
            if self.drafting is not None:
                self.drafting.close(stats)
            stats.notes += filter(None, [self.call.rules.note(), self.mode.note, recorded_since(before)])
            longest = max(row.length for row in self.texts)
            stats.plain_steps = max(0, longest - self.call.input_ids.shape[1] - 1)
            stats.held_bytes = keep_a_share()
            stats.total_seconds = now() - start
            self.drafter.report(stats)

    def _open(self) -> None:
        """The session, and the target's runner around which it may put one of its own."""
        call, noise = self.call, self.texts[0].judge.noise
        drawing = copy(self.randomness)  # the session's, and may be spoilt
        context = context_of(call, self.rows.device, drawing, self.cost, self.mode, copy(noise))
        self.drafting = drafting = Drafting(self.drafter, context, drawing, self.ranks)
        for row in self.texts:
            row.drafting = drafting
        self.runner = target_runner(call, drafting, self.mode)
        keeps_state = self.mode.runner is StateRunner
        if self.ranks is None and (keeps_state or not drafting.traits.weighs):  # ranks go by clocks of their own
            drafting.pause_where_it_loses(call.target, call.draws, keeps_state)

    def _prefill(self) -> None:
        """The prompt's forward is the verification of an empty draft."""
        began = now()
        forward = self.runner.prefill()
        self.stats.target_calls = 1
        forward.logits = moved(forward.logits, self.rows.device)
        held = self.runner.lengths[0] - self.call.input_ids.shape[1]  # by a cache that is continued
        for row in self.rows.all:
            row.end = min(self.call.most_columns - 1, position_limit(self.model) - held)
        if self.outputs is not None:
            layers = own_cache(self.call.model_kwargs[CACHE]).layers
            self.outputs.windows = [getattr(layer, "sliding_window", None) for layer in layers]
        (part,) = parts_of(self.rows)
        part.judged = no_draft(len(self.rows), self.rows.device)
        self._judge(part, forward)
        self.stats.emitted_tokens += sum([result.emitted for result in part.results])
        self.stats.prefill_seconds = now() - began
        verdict = self._verdict(part, forward, of_prompt=True)
        self._leave([b for b, row in enumerate(self.rows.all) if row.stopped])
        assert self.drafting is not None
        self.drafting.session.ask(lambda session: session.observe_prompt(verdict))

    def _farthest(self, rows: int) -> int:
        return farthest(self.cost if self.ranks is None else None, rows)  # ranks go by clocks of their own

    def _verdict(self, part: BatchPart, forward: Forward, of_prompt: bool = False) -> Verdict:
        verdict = super()._verdict(part, forward)
        if of_prompt:
            verdict.features = forward.features
        if self.drafting is not None and not self.drafting.session.alive:
            self.runner.features = ()  # nobody reads them any more
        if self.outputs is not None and self.outputs.hidden_states is not None:
            # A session may write into them, and the caller is given the same states.
            verdict.features = {name: states.clone() for name, states in verdict.features.items()}
        return verdict

    def _leave(self, places: list[int]) -> None:
        """Rows in lockstep stay until all have stopped."""
        if self.mode.ragged and places:
            stay = sorted(set(range(len(self.rows))) - set(places))
            self.rows.leave(stay)
            self.runner.retire(stay, keep=self.call.keeps_cache)

    # ------------------------------------------------------------------ the output

    def _ids(self) -> Tensor:
        """The whole output [B, columns], padded on the right."""
        if not self.mode.ragged:
            return self.rows.ids[:, : self.texts[0].length].clone()
        prompt, columns = self.call.input_ids.long(), self.call.input_ids.shape[1]
        new = [row.tokens[len(row.tokens) - (row.length - columns) :] for row in self.texts]
        width = max(map(len, new))
        padded = [[*text, *[self.call.pad_token_id] * (width - len(text))] for text in new]
        return torch.cat([prompt, to_device(padded, prompt.device)], dim=1)

    def _result(self) -> GenerateDecoderOnlyOutput | Tensor:
        call, ids = self.call, self._ids()
        if call.keeps_cache:
            self.runner.finish(ids)
        if not call.config.return_dict_in_generate:
            return ids
        steps = self.outputs or StepOutputs(call.config)
        kept: dict[str, Any] = {"scores": steps.scores, "logits": steps.logits, CACHE: call.model_kwargs[CACHE]}
        output: GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput
        if call.source is not None:
            output = GenerateEncoderDecoderOutput(sequences=ids, **kept)
        else:
            states = {"attentions": steps.attentions, "hidden_states": steps.hidden_states}
            output = GenerateDecoderOnlyOutput(sequences=ids, **kept, **states)
        output.speculation = self.stats
        return output


def _texts(call: Call) -> list[list[int]]:
    """The prompts without left padding."""
    pairs = zip(call.input_ids.tolist(), call.prompt_mask.tolist(), strict=True)
    return [list(compress(ids, mask)) for ids, mask in pairs]
