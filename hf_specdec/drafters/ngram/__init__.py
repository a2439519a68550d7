"""N-gram drafter: draws from a Kneser-Ney model over token ids (Leviathan et al. 2023, §3.6 and Table 3).

A lookup costs next to nothing beside the target (c ≈ 0), and q is a true distribution, so sampling stays lossless.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor

from ...config import LONGEST_DRAFT, DrafterConfig, ranged
from ...errors import SpeculationError
from ...hub.tokenizer import check_fingerprint, check_same_ids
from ...protocol import Draft, DraftContext, DraftSession, Sequences
from ...registry import register_drafter
from ...transfer import to_device
from ..base import Drafter
from .model import Level, NGramModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Level", "NGramConfig", "NGramDrafter", "NGramModel", "NGramSession"]


@strict
@dataclass(kw_only=True)
class NGramConfig(DrafterConfig):
    """Options of `NGramDrafter`, which says what they mean."""

    drafter_type: ClassVar[str] = "ngram"

    num_draft_tokens: int = ranged(3, 1, LONGEST_DRAFT)
    vocab_size: int = ranged(0, 0, 1 << 24)
    sizes: list[int] = ranged([], 0, 1 << 30, entries=15)  # noqa: RUF009  (a field)
    tokenizer: dict | None = None

    def validate_tokenizer(self) -> None:
        check_fingerprint(self.tokenizer or {})


class NGramSession(DraftSession):
    """Draws γ tokens per round, each through the call's processors."""

    def __init__(self, context: DraftContext, config: NGramConfig, model: NGramModel) -> None:
        super().__init__(context)
        self.config = config
        self.model = model
        self.pick = context.pick.on(torch.device("cpu"))
        self.prompt = context.prompt_ids.cpu()
        context.stats.window = config.num_draft_tokens

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        """Drawn on the host, where the model is: nobody waits for a device between two tokens."""
        context = self.context
        gamma = [min(self.config.num_draft_tokens, room) for room in budget]
        width = max(gamma, default=0)
        drafts: list[list[int]] = [[] for _ in gamma]
        ids = self._on_host(sequences, width)
        q = torch.zeros(len(gamma), width, context.vocab_size) if context.do_sample else None
        for i in range(width):
            alive = [b for b, g in enumerate(gamma) if i < g and context.eos_token_ids.isdisjoint(drafts[b][-1:])]
            if not alive:
                break
            lengths = [sequences.lengths[b] + i for b in alive]
            probs = np.stack([self._next_probs(sequences.tokens[b], drafts[b]) for b in alive])
            tokens, drawn_from = self.pick(
                ids[alive], lengths, [sequences.rows[b] for b in alive], torch.from_numpy(probs).log()
            )
            ids[alive, lengths] = tokens
            for row, (b, token) in enumerate(zip(alive, tokens.tolist(), strict=True)):
                drafts[b].append(token)
                if q is not None and drawn_from is not None:
                    q[b, i] = drawn_from[row]
        draft = Draft.from_lists(drafts, context.device)
        if q is not None:
            draft.q = to_device(q[:, : draft.tokens.shape[1]], context.device, torch.float32)
        return draft

    def _on_host(self, sequences: Sequences, width: int) -> Tensor:
        """ids [B, columns] with room for a draft; padding on the left, as on the device."""
        ids = torch.zeros(len(sequences.rows), max(sequences.lengths, default=0) + width, dtype=torch.long)
        for b, (row, length) in enumerate(zip(sequences.rows, sequences.lengths, strict=True)):
            padding = length - len(sequences.tokens[b])
            if padding:
                ids[b, :padding] = self.prompt[row, :padding]
            ids[b, padding:length] = torch.tensor(sequences.tokens[b])
        return ids

    def _next_probs(self, tokens: list[int], drafted: list[int]) -> np.ndarray:
        return self.model.next_probs(tokens[-self.model.order :] + drafted)


@register_drafter
class NGramDrafter(Drafter):
    """Drafts from an n-gram model, trained by `hf-specdec train ngram` or `training.ngram.train_ngram`."""

    config_class = NGramConfig
    config: NGramConfig

    def __init__(
        self,
        model: NGramModel | None = None,
        *,
        num_draft_tokens: int = 3,
        vocab_size: int = 0,
        sizes: list[int] | None = None,
        tokenizer: dict | None = None,
    ) -> None:
        """
        Args:
            model: as trained; sets `vocab_size` and `sizes`.
            num_draft_tokens: γ, tokens per draft, from 1 to 512.
            vocab_size: of the stored model, from 0 to 2^24; written by training.
            sizes: stored n-grams of each order from 2 up: at most 15 orders, of 0 to 2^30 each; written by training.
            tokenizer: fingerprint of the tokenizer that made the ids (`hub.tokenizer.fingerprint`), by training;
                models without one are held against the target by the size of their vocabulary.

        Raises:
            SpeculationError: a bad option.
        """
        if model is not None:
            vocab_size, sizes = model.vocab_size, model.sizes
        super().__init__(
            num_draft_tokens=num_draft_tokens,
            vocab_size=vocab_size,
            sizes=[] if sizes is None else sizes,
            tokenizer=tokenizer,
        )
        self.model = model

    def weights(self) -> dict[str, Tensor]:
        return self.model.tensors() if self.model is not None else self._empty().tensors()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.model = NGramModel.from_tensors(weights)

    def _empty(self) -> NGramModel:
        """Tables of the stored shapes, to be filled by `load_weights`."""
        row = np.zeros(self.config.vocab_size, dtype=np.float32)
        levels = [
            Level(np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.float32), np.zeros(size, dtype=np.float32))
            for size in self.config.sizes
        ]
        return NGramModel(row, row.copy(), levels)

    def check_target(self, target: "PreTrainedModel") -> None:
        if self.model is None:
            raise SpeculationError(
                "speculation_type='ngram' has no trained model; train one with `hf-specdec train ngram` and pass it "
                "as assistant_model=Drafter.from_pretrained(folder) or speculation={'drafter': folder}"
            )
        vocab_size = target.config.get_text_config().vocab_size
        fix = "Train the drafter with the target's tokenizer: hf-specdec train ngram --tokenizer <the target>"
        if self.model.vocab_size > vocab_size:
            raise SpeculationError(
                f"the n-gram model has {self.model.vocab_size} token ids, more than the target's {vocab_size}. {fix}"
            )
        known = {"vocab_size": self.model.vocab_size} | (self.config.tokenizer or {})
        check_same_ids(known, target, "the n-gram model", fix)

    def start(self, context: DraftContext) -> NGramSession:
        if self.model is None:
            raise SpeculationError("NGramDrafter has no trained model; give it one as its first argument")
        return NGramSession(context, self.config, self.model)
