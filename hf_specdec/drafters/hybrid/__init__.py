"""Hybrid drafter: copy where a match is worth more than what the draft model would draft, else ask the draft model.

Both sources are measured while they run, and a round takes the one that promises more tokens per second.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ...config import LONGEST_DRAFT, ranged
from ...protocol import Draft, DraftContext, DraftSession, Sequences, Verdict
from ...registry import register_drafter
from ...target.inputs import position_limit
from ..base import Drafter
from ..draft_model import DraftModelDrafter, DraftModelSession
from ..draft_model.drafter import MOST_CANDIDATES
from ..draft_model.session import candidates_of
from ..learned import Learned
from ..prompt_lookup import PromptLookupConfig, PromptLookupSession
from ..prompt_lookup.branches import draft_from_branches
from .meter import Meter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["HybridConfig", "HybridDrafter", "HybridSession", "Meter"]


@strict
@dataclass(kw_only=True)
class HybridConfig(PromptLookupConfig):
    """Options of `HybridDrafter`, which says what they mean: those of prompt lookup, and the draft model's."""

    drafter_type: ClassVar[str] = "hybrid"

    num_draft_tokens: int | Literal["auto"] = ranged("auto", 1, LONGEST_DRAFT)
    num_candidates: int = ranged(1, 1, MOST_CANDIDATES)


class HybridSession(DraftSession):
    """A prompt-lookup session, and a draft-model session opened when it is first needed."""

    def __init__(self, context: DraftContext, config: HybridConfig, model: DraftModelDrafter, meter: Meter) -> None:
        super().__init__(context)
        self.lookup = PromptLookupSession(context, config)
        self.meter = meter
        self._model_drafter = model
        self._model: DraftModelSession | None = None
        self._model_limit = position_limit(model.draft_model)  # columns; text that fills them is left to the lookup
        self._copies: dict[int, tuple[int, list[int]]] = {}  # row → match length, and what a lookup would draft
        self._used_model = False
        self._candidates = candidates_of(context, config.num_candidates)

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        matches, branches = self.lookup.copies(sequences, budget)
        self._copies = {
            row: (match, copies[0])
            for row, match, copies in zip(sequences.rows, matches, branches, strict=True)
            if copies
        }
        lengths = [len(copies[0]) if copies else 0 for copies in branches]
        copied = draft_from_branches(branches, self.context)
        pays = self.meter.lookup_pays(matches, lengths, copied.lengths, self.context.lockstep, self._candidates)
        self._used_model = not pays and max(sequences.lengths) < self._model_limit
        if self._used_model:
            draft, source = self._ask_model(sequences, budget), self._model_drafter.config.drafter_type
        else:
            draft, source = copied, PromptLookupConfig.drafter_type
        draft.sources = [source] * len(sequences.rows)
        return draft

    def _ask_model(self, sequences: Sequences, budget: list[int]) -> Draft:
        if self._model is None:
            self._model = self._model_drafter.start(self.context)
        began = time.perf_counter()
        draft = self._model.propose(sequences, budget)
        if steps := max(draft.lengths, default=0) // self._model.candidates:
            self.meter.observe_draft(time.perf_counter() - began, steps)
        return draft

    def observe(self, verdict: Verdict) -> None:
        self.meter.model.observe_verify(verdict.width, verdict.seconds)
        for row, emitted in zip(verdict.rows, verdict.tokens, strict=True):
            if row in self._copies:
                match, copied = self._copies[row]
                self.meter.observe_lookup(match, copied, emitted)
        if self._used_model and self._model is not None:
            self._model.tell(self.meter.model, verdict)
            self._model.observe(verdict)
        self._used_model, self._copies = False, {}

    def close(self) -> None:
        if self._model is not None:
            self._model.close()


@register_drafter
class HybridDrafter(Drafter):
    """Prompt lookup and a draft model, whichever pays more; what was measured is kept for the next call."""

    config_class = HybridConfig
    config: HybridConfig
    needs_draft_model = True

    def __init__(
        self,
        draft_model: "PreTrainedModel",
        *,
        num_draft_tokens: int | Literal["auto"] = "auto",
        num_candidates: int = 1,
        max_draft_tokens: int = 16,
        tokens_per_match: int = 4,
        min_match: int = 1,
        max_match: int = 8,
        num_branches: int = 1,
    ) -> None:
        """
        Args:
            draft_model: a causal language model with the target's tokenizer, on any device, in any dtype.
            num_draft_tokens: γ of the draft model, from 1 to 512; "auto" chooses it from measured acceptance and times.
            num_candidates: of the draft model, tokens tried at each position of a greedy draft, from 1 to 16.
            max_draft_tokens: the longest copy, from 1 to 512.
            tokens_per_match: copied tokens per matched token, from 1 to 512: a short match copies little, a long one
                much.
            min_match: shorter matches copy nothing; from 1 to 256.
            max_match: longer matches count as this long; from 1 to 256, and at least `min_match`.
            num_branches: competing copies drafted at once as a tree, from 1 to 64; 1 drafts a chain.

        Raises:
            SpeculationError: a bad option, or a model that cannot draft.
        """
        super().__init__(
            num_draft_tokens=num_draft_tokens,
            num_candidates=num_candidates,
            max_draft_tokens=max_draft_tokens,
            tokens_per_match=tokens_per_match,
            min_match=min_match,
            max_match=max_match,
            num_branches=num_branches,
        )
        self.draft_model = draft_model
        self._model_drafter = DraftModelDrafter(
            draft_model, num_draft_tokens=self.config.num_draft_tokens, num_candidates=self.config.num_candidates
        )
        self._meters = Learned(lambda: Meter(self.config.max_match))
        self.proposes_trees = self.config.num_branches > 1 or self.config.num_candidates > 1

    def check_target(self, target: "PreTrainedModel") -> None:
        self._model_drafter.check_target(target)

    def takes_ragged(self) -> bool:
        return self._model_drafter.takes_ragged()

    def start(self, context: DraftContext) -> HybridSession:
        meter = self._meters.of(context.target, len(context.prompt_ids))
        return HybridSession(context, self.config, self._model_drafter, meter)
