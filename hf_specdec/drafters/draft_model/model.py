"""`ModelOverCache`: a draft model with its own cache, whose slots are the columns of the target's `ids`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...protocol import Sequences
from ...target.encoder_decoder import EncoderDecoderRunner, crosses, encoded, fresh_cache
from ...target.inputs import position_limit
from ...target.joining import JoiningRunner, read_at_once
from ...target.lockstep import LockstepRunner
from ...target.ragged import RaggedRunner
from ...transfer import moved, to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelOverCache:
    """Fed with accepted and drafted tokens, rolled back to what was accepted. Rows may leave, come twice, or be new."""

    runner: LockstepRunner | RaggedRunner

    def __init__(
        self,
        model: "PreTrainedModel",
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        lockstep: bool,
        most_rows: int = 0,
        most_tokens: int = 0,
        source: dict[str, Any] | None = None,
    ) -> None:
        """Reads the prompt.

        Args:
            prompt_ids: [B, P] left-padded.
            prompt_mask: [B, P] 1 where it is not padding.
            lockstep: rows keep equal lengths.
            most_rows: where rows come and go, how many are expected at once; there is no prompt then.
            most_tokens: of those together.
            source: for a draft of an encoder-decoder, `DraftContext.source`.

        Raises:
            ValueError: the prompt fills the model's context.
        """
        self.vocab = model.config.get_text_config(decoder=True).vocab_size
        self.device = model.device  # asked once: transformers looks for it among the parameters
        self.context_limit, self.lockstep = position_limit(model), lockstep
        self.good: list[int] = []
        """[B] leading slots that hold accepted tokens"""
        if most_rows:
            self.runner = JoiningRunner(model, most_rows, most_tokens)
            return
        if (longest := int(prompt_mask.sum(-1).max())) >= self.context_limit:
            raise ValueError(f"the prompt has {longest} tokens, the draft's context {self.context_limit}")
        ids, mask = self._known(prompt_ids), prompt_mask.to(self.device)
        if source is not None and crosses(model):
            with torch.no_grad():
                said = encoded(model, source)
            padded = {} if bool(mask.all()) else {"decoder_attention_mask": mask}
            over = said | padded | {"past_key_values": fresh_cache(model), "use_cache": True}
            self.runner = EncoderDecoderRunner(model, over, ids)
            self.runner.prefill()
            self.good = list(self.runner.lengths)
            return
        kwargs: dict[str, Any] = {"past_key_values": DynamicCache(config=model.config), "use_cache": True}
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)
        kwargs["attention_mask"] = None if lockstep and bool(mask.all()) else mask
        kwargs["logits_to_keep"] = 1
        self.runner = (LockstepRunner if lockstep else RaggedRunner)(model, kwargs, ids)
        self.runner.prefill()
        self.good = list(self.runner.lengths)

    @property
    def fed(self) -> list[int]:
        """[B] slots behind those, which hold drafted tokens."""
        return [length - good for length, good in zip(self.runner.lengths, self.good, strict=True)]

    def catch_up(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Feed the accepted tokens that the cache does not hold; logits [B, V] after the last one.

        Args:
            ids: [B, capacity], `lengths` columns of which count.
        """
        if any(good >= length for good, length in zip(self.good, lengths, strict=True)):
            # transformers' own loop asks for a draft right after the prompt: its last token is fed again.
            self.roll_back([length - 1 for length in lengths])
        missing = [length - good for length, good in zip(lengths, self.good, strict=True)]
        if len(set(self.good)) == 1:
            tokens = ids[:, self.good[0] : self.good[0] + max(missing)]
        else:
            index = to_device(self.good, ids.device)[:, None] + torch.arange(max(missing), device=ids.device)
            tokens = ids.gather(1, index.clamp(max=ids.shape[1] - 1))
        logits = self.feed(tokens, missing)
        self.good = list(lengths)
        return logits

    def feed(self, tokens: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Append tokens [B, T], of which `counts` are real; logits [B, V] after the last real one."""
        tokens = self._known(tokens)
        if counts is None or len(set(counts)) == 1:
            return self.runner.forward(tokens).logits[:, -1]
        logits = self.runner.forward(tokens, counts=counts).logits
        last = to_device(counts, logits.device) - 1
        return logits[torch.arange(len(counts), device=logits.device), last]

    def accept(self, counts: Sequence[int], stopped: Sequence[bool]) -> None:
        """Of what was fed behind the accepted tokens the first `counts` stay."""
        kept = [min(n, k) for n, k in zip(counts, self.fed, strict=True)]
        if self.lockstep:
            kept = [min((n for n, out in zip(kept, stopped, strict=True) if not out), default=0)] * len(kept)
        self.roll_back([good + n for good, n in zip(self.good, kept, strict=True)])

    def roll_back(self, good: list[int] | None = None) -> None:
        """Forget what was fed behind so many slots per row; behind the accepted ones, where none are given."""
        self.good = self.good if good is None else good
        if self.runner.lengths != self.good:
            self.runner.truncate(self.good)

    def follow(self, before: list[int], sequences: Sequences) -> bool:
        """Forget what was not accepted, and go on with the rows that are here now: those of `before`, and new ones.
        Whether there were any, whose text had to be read."""
        self.roll_back()
        new = [b for b, row in enumerate(sequences.rows) if row not in before]
        for b in new:
            self._read(sequences.tokens[b])
        order = [*before, *(sequences.rows[b] for b in new)]
        if sequences.rows != order:
            self.select([order.index(row) for row in sequences.rows])
        return bool(new)

    def _read(self, tokens: list[int]) -> None:
        """A row joins. What does not fit into the context is left out: nothing is drafted then."""
        assert isinstance(self.runner, JoiningRunner), "a batch with a prompt gets no new rows"
        known = tokens[: min(len(tokens), self.context_limit) - 1]
        ids = self._known(to_device([known], self.device))
        self.runner.join(read_at_once(self.runner.model, ids), len(known))
        self.good.append(len(known))

    def select(self, rows: list[int]) -> None:
        """Go on with these rows; one that comes twice is a fork."""
        self.good = [self.good[b] for b in rows]
        self.runner.select(rows)

    def _known(self, ids: Tensor) -> Tensor:
        """Ids for the model's embedding; ones it does not have cost acceptance, not the run."""
        return moved(ids, self.device).clamp(0, self.vocab - 1)
