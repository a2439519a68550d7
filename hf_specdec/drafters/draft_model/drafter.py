"""`DraftModelDrafter`: any causal language model as the draft, one forward per drafted token over its own cache."""

import time
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ...config import LONGEST_DRAFT, DrafterConfig, ranged
from ...errors import SpeculationError
from ...protocol import Draft, DraftContext, DraftSession, Sequences, Verdict
from ...registry import register_drafter
from ...target.probe import Support, support
from ...target.runner import LockstepRunner, RaggedRunner, position_limit, prefill
from ..base import Drafter
from .window import WindowTuner


@strict
@dataclass(kw_only=True)
class DraftModelConfig(DrafterConfig):
    """Options of the draft-model drafter."""

    drafter_type: ClassVar[str] = "draft_model"

    num_draft_tokens: int | Literal["auto"] = ranged("auto", 1, LONGEST_DRAFT)
    """γ: tokens drafted per round, from 1 to 512, or "auto" to choose it from measured acceptance and times"""


@register_drafter
class DraftModelDrafter(Drafter):
    """Speculative decoding with a smaller model of the same tokenizer (Leviathan 2023)."""

    config_class = DraftModelConfig
    config: DraftModelConfig
    needs_draft_model = True

    def __init__(self, draft_model: PreTrainedModel, **options: Any) -> None:
        """
        Args:
            draft_model: a causal language model with the target's tokenizer, on any device, in any dtype.
            options: see `DraftModelConfig`.

        Raises:
            SpeculationError: a bad option, or a model that cannot draft.
        """
        super().__init__(**options)
        if not hasattr(draft_model, "forward") or not hasattr(draft_model, "config"):
            raise SpeculationError(f"draft_model must be a transformers model, got {type(draft_model).__name__}")
        if draft_model.config.is_encoder_decoder:
            raise SpeculationError(
                f"draft_model {type(draft_model).__name__} is an encoder-decoder; a decoder-only target needs a "
                "decoder-only draft (AutoModelForCausalLM)"
            )
        self.draft_model = draft_model
        self._tuners: dict[int, WindowTuner] = {}  # per batch size: more rows take longer

    def check_target(self, target: PreTrainedModel) -> None:
        check_same_tokenizer(target, self.draft_model)
        if self.draft_support() is Support.PLAIN:
            raise SpeculationError(
                f"draft_model {type(self.draft_model).__name__} keeps a state that cannot be rolled back; "
                "choose a draft with attention layers only"
            )

    def draft_support(self) -> Support:
        """How the draft model can be run; where it lies elsewhere, as it was found out there."""
        return support(self.draft_model)

    def takes_ragged(self) -> bool:
        return self.draft_support() is Support.RAGGED

    def start(self, context: DraftContext) -> DraftSession:
        tuner = None
        if self.config.num_draft_tokens == "auto":  # what a call has measured serves the next one
            tuner = self._tuners.setdefault(context.prompt_ids.shape[0], WindowTuner())
        return DraftModelSession(context, self.draft_model, self.config.num_draft_tokens, tuner)


class DraftModelSession(DraftSession):
    """Drafts with a model over its own cache, whose slots are the columns of the target's `ids`."""

    def __init__(
        self, context: DraftContext, model: PreTrainedModel, window: int | str, tuner: WindowTuner | None = None
    ) -> None:
        super().__init__(context)
        self.model, self.fixed_window, self.tuner = model, window, tuner
        config = model.config.get_text_config(decoder=True)
        self.vocab = config.vocab_size
        self.device = model.device  # asked once: transformers looks for it among the parameters
        self.context_limit = position_limit(model)
        if (longest := int(context.prompt_mask.sum(-1).max())) >= self.context_limit:
            raise ValueError(f"the prompt has {longest} tokens, the draft's context {self.context_limit}")
        self.rows = list(range(context.prompt_ids.shape[0]))
        self.runner = self._prefilled()
        self.good = list(self.runner.lengths)
        """per row, leading slots of the cache that hold accepted tokens"""
        self.q: list[Tensor] = []

    def window(self) -> int:
        """γ of the next round."""
        return self.tuner.choose() if self.tuner is not None else int(self.fixed_window)

    def shortened(
        self, step: int, logits: Tensor, tokens: Tensor, sequences: Sequences, lengths: list[int]
    ) -> list[int]:
        """Asked once token `step` (from 0) is drawn: how many tokens each row drafts in all. Stop rules add to it.

        Token `step` itself stays: a rule that dropped a token after seeing it would change the output's distribution.
        """
        # On an accelerator, to wait for every token would cost more than to draft past the end once per text.
        return self.until_eos(step, tokens.tolist(), lengths) if tokens.device.type == "cpu" else lengths

    def until_eos(self, step: int, tokens: list[int], lengths: list[int]) -> list[int]:
        """Nothing behind an EOS is ever kept."""
        eos = self.context.eos_token_ids
        return [min(most, step + 1) if token in eos else most for token, most in zip(tokens, lengths, strict=True)]

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self._follow_rows(sequences)
        room = self.context_limit - max(sequences.lengths)
        width = min(self.window(), max(budget), room)
        if width < 1:
            return Draft.from_lists([[]] * len(self.rows), self.context.device)
        began = time.perf_counter()
        lengths = [min(width, most) for most in budget]
        # Rows in lockstep advance by their shortest draft, so nobody drafts past it.
        longest = min if self.context.lockstep else max
        active = [b for b, most in enumerate(budget) if most > 0]
        logits = self._catch_up(sequences)
        self.q = []
        drafted: list[Tensor] = []
        ids = self._with_room(sequences, width)
        at = torch.tensor(sequences.lengths, device=ids.device)[:, None]
        for i in range(width):
            tokens, q = self.context.pick(ids, [n + i for n in sequences.lengths], sequences.rows, logits)
            drafted.append(tokens)
            if q is not None:
                self.q.append(q)
            if i + 1 < width:
                lengths = self.shortened(i, logits, tokens, sequences, lengths)
            if i + 1 >= longest(lengths[b] for b in active):
                break
            ids.scatter_(1, at + i, tokens[:, None])
            logits = self._step(tokens[:, None])
        if self.tuner is not None:
            self.tuner.observe_draft((time.perf_counter() - began) / len(drafted))
        chain = torch.stack(drafted, 1)
        probs = [q.gather(1, chain[:, i, None]) for i, q in enumerate(self.q)]
        lengths = [min(k, len(drafted)) for k in lengths]
        return Draft(chain, lengths, token_probs=torch.cat(probs, 1) if probs else None)

    def residual(self, row: int, node: int, tokens: Tensor | None = None) -> Tensor:
        return self.q[node][row] if tokens is None else self.q[node][row, tokens]

    def observe(self, verdict: Verdict) -> None:
        if self.tuner is not None:
            self.tuner.observe_verify(verdict.width, verdict.seconds)
            self.tuner.observe_acceptance(verdict.drafted, verdict.accepted)
        if verdict.rows != self.rows:
            return  # nothing was drafted in this round
        # The last drafted token was never fed, so at most K - 1 drafted tokens are in the cache.
        fed = [length - good for length, good in zip(self.runner.lengths, self.good, strict=True)]
        kept = [min(n, k) for n, k in zip(verdict.accepted, fed, strict=True)]
        if self.context.lockstep:
            kept = [min((n for n, out in zip(kept, verdict.stopped, strict=True) if not out), default=0)] * len(kept)
        self.good = [good + n for good, n in zip(self.good, kept, strict=True)]
        self.runner.truncate(self.good)

    # ------------------------------------------------------------------ the draft's own cache

    def _prefilled(self) -> Any:
        """A runner over a cache that holds the prompt."""
        ids = self._own(self.context.prompt_ids)
        mask = self.context.prompt_mask.to(ids.device)
        cache = DynamicCache(config=self.model.config)
        kwargs: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "position_ids": _positions(mask)}
        kwargs["attention_mask"] = None if self.context.lockstep and bool(mask.all()) else mask
        prefill(self.model, ids, kwargs, None)
        self.context.stats.draft_calls += 1
        if self.context.lockstep:
            return LockstepRunner(self.model, cache, kwargs, ids)
        return RaggedRunner(self.model, cache, kwargs, ids.shape[1])

    def _follow_rows(self, sequences: Sequences) -> None:
        """Rows that stopped leave this cache too; drafts that were never judged are forgotten."""
        if self.runner.lengths != self.good:
            self.runner.truncate(self.good)
        if sequences.rows != self.rows:
            stay = [self.rows.index(row) for row in sequences.rows]
            self.good = [self.good[b] for b in stay]
            self.runner.select(stay)
            self.rows = list(sequences.rows)

    def _catch_up(self, sequences: Sequences) -> Tensor:
        """Feed the accepted tokens that the cache does not hold; logits [B, V] after the last one."""
        if any(good >= length for good, length in zip(self.good, sequences.lengths, strict=True)):
            # transformers' own loop asks for a draft right after the prompt: its last token is fed again.
            self.good = [length - 1 for length in sequences.lengths]
            self.runner.truncate(self.good)
        missing = [length - good for length, good in zip(sequences.lengths, self.good, strict=True)]
        index = torch.tensor(self.good, device=sequences.ids.device)[:, None]
        index = index + torch.arange(max(missing), device=index.device)
        tokens = sequences.ids.gather(1, index.clamp(max=sequences.ids.shape[1] - 1))
        logits = self._step(tokens, missing)
        self.good = list(sequences.lengths)
        return logits

    def _step(self, tokens: Tensor, counts: list[int] | None = None) -> Tensor:
        """Append tokens [B, T], of which `counts` are real; logits [B, V] after the last real one."""
        tokens = self._own(tokens)
        self.context.stats.draft_calls += 1
        if counts is None or len(set(counts)) == 1:
            return self.runner.forward(tokens).logits[:, -1]
        logits = self.runner.forward(tokens, counts=counts).logits
        last = torch.tensor(counts, device=logits.device) - 1
        return logits[torch.arange(len(counts), device=logits.device), last]

    def _own(self, ids: Tensor) -> Tensor:
        """Ids for the draft's embedding; ones it does not know cost acceptance, not the run."""
        return ids.to(self.device).clamp(0, self.vocab - 1)

    def _with_room(self, sequences: Sequences, width: int) -> Tensor:
        """The sequences' ids with columns to write the draft to."""
        missing = max(sequences.lengths) + width - sequences.ids.shape[1]
        return sequences.ids if missing <= 0 else torch.nn.functional.pad(sequences.ids, (0, missing))


def check_same_tokenizer(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Refuse a draft of another tokenizer: told by a size difference too large for padding, or by special ids.

    Raises:
        SpeculationError: with a pointer to transformers' own route for different tokenizers.
    """
    mine, theirs = (model.config.get_text_config(decoder=True) for model in (target, draft))
    largest = max(mine.vocab_size, theirs.vocab_size)
    reason = None
    if abs(mine.vocab_size - theirs.vocab_size) > max(1024, largest // 50):
        reason = f"vocabularies of {mine.vocab_size} and {theirs.vocab_size} tokens"
    for name in ("bos_token_id", "eos_token_id"):
        a, b = _ids(getattr(mine, name, None)), _ids(getattr(theirs, name, None))
        if a and b and not a & b:
            reason = f"{name} {sorted(a)} and {sorted(b)}"
    if reason:
        raise SpeculationError(
            f"the target and the draft have different tokenizers ({reason}). Use a draft of the same family, or "
            "transformers' own route for different tokenizers: "
            "generate(assistant_model=draft, tokenizer=..., assistant_tokenizer=...) without speculation_type"
        )


def _ids(value: int | list[int] | None) -> set[int]:
    return set(value if isinstance(value, list) else [] if value is None else [value])


def _positions(mask: Tensor) -> Tensor:
    return (mask.long().cumsum(-1) - 1).clamp_min(0)
