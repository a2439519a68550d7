"""DFlash and DSpark heads fill blocks of masks behind places drawn at random, all of a batch in one forward.

A block begins with its root's token i + 1, which the target has not read. It sees the target's states up to its root,
and itself both ways, but no other block.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from transformers import PreTrainedConfig, PreTrainedModel

from ...drafters.heads.dflash_format import FORMAT, SEEN, SIZES
from ...drafters.heads.dflash_model import BlockDiffusionModel
from ...drafters.heads.fields import of_speculators
from ...drafters.heads.parts import embedded
from ...hub.registry import SPECULATORS_TYPE
from ...hub.tokenizer import public_name
from ..writing import Text
from .beginning import begin_output, begin_states, begun, states_read
from .learner import Learner, Step

DFLASH: dict[str, Any] = {
    SPECULATORS_TYPE: "dflash",
    "architectures": ["DFlashDraftModel"],
    "sample_from_anchor": False,
}
DSPARK: dict[str, Any] = {
    SPECULATORS_TYPE: "dspark",
    "architectures": ["DSparkDraftModel"],
    "sample_from_anchor": True,
    "markov_rank": 64,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
"""what a config says of either kind"""
SAID = ("model_type", "vocab_size", *SIZES, *SEEN)
"""what it says of the layers"""


class DFlashLearner(Learner):
    """The places of a batch that lie `at` are roots."""

    decay = math.exp(-1 / 4)  # DFlash, Section 4, of blocks of eight

    def __init__(self, head: BlockDiffusionModel, target: PreTrainedModel, tokens: Tensor) -> None:
        steps = head.config.block_size - (not head.config.sample_from_anchor)
        super().__init__(head, target, tokens, head.encoder.fc, steps)

    def forward(self, batch: dict[str, Tensor]) -> list[Step]:
        ids, at, found = batch["input_ids"], batch["at"], []
        filled, state = self.filled(batch), None
        behind = pad(ids, (0, self.steps))  # what is padded is behind the text's end
        for j in range(self.steps):
            known = linear(filled[:, j], self.teacher.rows if self.head.lm_head is None else self.head.lm_head.weight)
            place = self.head.place(known, filled[:, j], behind.gather(1, at + 1 + j).flatten(), state)
            state = place.state
            fits = batch["counts"] & (at + 2 + j < batch["lengths"][:, None])
            places = torch.zeros_like(ids).scatter_add(1, at, fits.long())[:, :-1] > 0
            chosen = fits.flatten()
            found.append(Step(place.logits[chosen].float(), places, None if place.said is None else place.said[chosen]))
        return found

    def filled(self, batch: dict[str, Tensor]) -> Tensor:
        """[B c, γ, H] states of the blocks behind the roots, at the places that foretell."""
        config, at = self.head.config, batch["at"]
        context = torch.arange(batch["states"].shape[1], device=at.device)
        offsets = torch.arange(config.block_size, device=at.device)
        tokens = torch.where(offsets == 0, batch["input_ids"].gather(1, at + 1)[..., None], config.mask_token_id)
        places = at[..., None] + 1 + offsets  # [B, c, L], as the tokens
        dtype = self.head.encoder.fc.weight.dtype
        states = self.head(
            noise_embeds=embedded(self._embeddings[0], tokens.flatten(1)).to(dtype),
            context_hidden_states=self.states(batch, dtype),
            position_ids=torch.cat([context.expand(len(at), -1), places.flatten(1)], dim=1),
            attention_mask={"full_attention": _mask(at, context, len(offsets))},
        ).last_hidden_state
        return states.view(-1, len(offsets), states.shape[-1])[:, len(offsets) - self.steps :]


def _mask(at: Tensor, context: Tensor, length: int) -> Tensor:
    """[B, 1, c L, T + c L] what blocks of a length see: the context up to their roots [B, c], and themselves."""
    block = torch.arange(at.shape[1], device=at.device).repeat_interleave(length)
    before, own = context <= at[:, block, None], block[:, None] == block
    return torch.cat([before, own.expand(len(at), -1, -1)], dim=-1)[:, None]


class DSparkLearner(DFlashLearner):
    """Each place knows the text's token before it."""

    def loss(self, step: Step, p: Tensor, said: Tensor) -> Tensor:
        """With the cross entropy of the confidence in what came out: whether the likeliest token was right."""
        assert step.sure is not None, "it has a confidence head"
        came_true = torch.where(self.right(step.logits, said), step.sure, 1 - step.sure)
        return super().loss(step, p, said) - came_true.clamp_min(1e-6).log().mean()


def published(
    kind: dict[str, Any], layers: PreTrainedConfig, target: PreTrainedModel, tokens: Tensor, mask: int, steps: int
) -> dict[str, Any]:
    """The config of a head in `speculators`' format.

    Args:
        tokens: [K] that the head knows.
        mask: token that stands for those that nobody knows.
    """
    return {
        **of_speculators(kind[SPECULATORS_TYPE], steps, public_name(target.config.name_or_path)),
        **kind,
        "aux_hidden_state_layer_ids": states_read(target),
        "block_size": steps if kind["sample_from_anchor"] else steps + 1,
        "draft_vocab_size": len(tokens),
        "mask_token_id": mask,
        "tie_word_embeddings": False,
        "transformer_layer_config": {name: one for name, one in layers.to_dict().items() if name in SAID},
    }


def beginning(content: dict[str, Any], target: PreTrainedModel, tokens: Tensor, seed: int) -> BlockDiffusionModel:
    """A head that knows these tokens [K], which are sorted."""
    head: Any = begun(lambda: FORMAT.model(FORMAT.config(content), ()), seed)
    if head.d2t is not None:
        head.d2t.copy_(tokens - torch.arange(len(tokens)))
    if head.markov_head is not None:
        torch.nn.init.zeros_(head.markov_head.markov_w1.weight)  # of tokens that no text has nothing is said
    begin_states(head.encoder.fc, head.encoder.output_norm_enc, head.layers, target)
    begin_output(head, target, tokens)
    return head.to(target.device)  # type: ignore[no-any-return]


def weights(head: BlockDiffusionModel) -> dict[str, Tensor]:
    """Those that are published: `speculators` asks of each token of the target whether the head knows it."""
    found: dict[str, Tensor] = head.state_dict()
    if head.d2t is not None:
        found["t2d"] = torch.isin(torch.arange(head.config.vocab_size), head.tokens.cpu())
    return found


def rarest(texts: Sequence[Text], tokens: Sequence[int]) -> int:
    """Of these tokens the one that texts hold least."""
    counts = torch.bincount(torch.tensor([token for text in texts for token in text.ids]), minlength=max(tokens) + 1)
    return min(tokens, key=lambda token: (int(counts[token]), -token))
