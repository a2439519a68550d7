"""A head learns as it will draft: several steps over its own states (training-time test, Li et al. 2025, Section 3.2).

Place i of a text is the root of a chain: step 0 reads the target's states there and token i + 1, step j what step j - 1
has passed on and token i + 1 + j, and each foretells the token behind. It sees step 0 of all places up to i, and of the
later steps those of its own chain.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ...drafters.heads.eagle_model import LlamaForCausalLMEagle3
from ...drafters.heads.parts import embedded
from ..learning import Examined, examining
from ..lessons import Lessons, batches
from ..teacher import Teacher

DECAY = 0.8
"""weight of a step's loss, by that of the step before, as in SafeAILab's training"""


class Step(NamedTuple):
    """What a step of all chains says."""

    logits: Tensor
    """[N, K] over the tokens that the draft knows"""
    places: Tensor
    """[B, T] the N places whose chains are so long: roots that the target has written, with a text behind them"""


class Learner(nn.Module):
    """A head with its target's embeddings and head, which are not trained."""

    def __init__(self, head: LlamaForCausalLMEagle3, target: PreTrainedModel, steps: int) -> None:
        """
        Args:
            steps: γ, of each chain.
        """
        super().__init__()
        self.head, self.steps = head, steps
        self.teacher = Teacher(target, head.tokens)
        self._embeddings = (target.get_input_embeddings(),)  # in a tuple, where torch does not look for modules

    def forward(self, batch: dict[str, Tensor]) -> list[Step]:
        """One step after the other. A batch's states are those that the head reads, and the target's last ones."""
        ids, cache, found = batch["input_ids"], DynamicCache(), []
        states = batch["states"][..., : self.head.fc.in_features]
        g = self.head.fused(states.to(self.head.fc.weight.dtype))
        starts = batch["at"][:, :1]  # each text's first place
        at = torch.arange(g.shape[1], device=ids.device)
        seen = at[:, None] >= at
        for j in range(self.steps):
            tokens = nn.functional.pad(ids, (0, j))[:, 1 + j :]  # what is padded is behind the text's end
            e = embedded(self._embeddings[0], tokens).to(g.dtype)
            g, normed = self.head(g, e, at[None] + j, seen[None, None], cache)
            places = (at >= starts) & (at < batch["lengths"][:, None] - 2 - j)
            found.append(Step(self.head.lm_head(normed[places]).float(), places))
            seen = torch.cat([seen, at[:, None] == at], dim=-1)
        return found

    def last(self, batch: dict[str, Tensor], j: int, places: Tensor) -> Tensor:
        """[N, H] states from which the target says what step j foretells."""
        return _later(batch["states"][..., self.head.fc.in_features :], 1 + j, places)


def _later(values: Tensor, further: int, places: Tensor) -> Tensor:
    """[N, ...] of values [B, T or more, ...] those so much further on than these places [B, T]."""
    return torch.roll(values, -further, dims=1)[:, : places.shape[1]][places]


def acceptance(model: Any, lessons: Lessons, rows: int) -> dict[str, Any]:
    """How often a head is right on texts.

    Returns:
        `step_1` … `step_γ`: of the places in greedy texts where all steps before are right, the share where this step's
        first choice is; `promised`: tokens per call that the chain promises there; `acceptance`: mean of Σ min(p, q) of
        the first step at temperature 1, over the sampled texts (α, Leviathan 2023, Corollary 3.6). Each where there are
        such texts.
    """
    right: list[Tensor] = []
    overlaps: list[Tensor] = []
    device, dtype = next(model.parameters()).device, model.teacher.rows.dtype
    with examining(model), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        for batch in batches(lessons, rows, device):
            hits, whole = [], None
            for j, (logits, places) in enumerate(model(batch)):
                hit = torch.zeros_like(places)
                hit[places] = model.head.tokens[logits.argmax(-1)] == _later(batch["input_ids"], 2 + j, places)
                hits.append(hit)
                whole = places & ~batch["sampled"][:, None]  # of the last step: where a chain is whole
                if j == 0:
                    drawn = batch["sampled"][:, None] & places
                    q = logits[batch["sampled"][:, None].expand_as(places)[places]].softmax(-1)
                    p = model.teacher.all(model.last(batch, 0, drawn))[:, model.head.tokens]
                    overlaps.append(torch.minimum(p, q).sum(-1).cpu())
            right.append(torch.stack(hits, -1)[whole].cpu())
    chains = torch.cat(right).long().cumprod(1).float().mean(0) if sum(map(len, right)) else torch.zeros(0)
    before = torch.cat([torch.ones(1), chains[:-1]])[: len(chains)].clamp_min(1e-9)
    found = {f"step_{j}": float(share) for j, share in enumerate(chains / before, 1)}
    found["promised"] = 1 + float(chains.sum())
    overlap = torch.cat(overlaps)
    return found | ({"acceptance": float(overlap.mean())} if len(overlap) else {})


def said(found: dict[str, Any]) -> str:
    """The figures of `acceptance` in words."""
    steps = ", ".join(f"{value:.0%}" for name, value in found.items() if name.startswith("step_"))
    sampled = f"; acceptance at temperature 1: {found['acceptance']:.1%}" if "acceptance" in found else ""
    return (
        f"each step right, given those before: {steps or 'no greedy texts'}; the chain would give "
        f"{found['promised']:.2f} tokens per call{sampled}"
    )


class EagleTrainer(Examined):
    """Cross entropy between what the target says, of the tokens that the draft knows, and each step."""

    acceptance, said = staticmethod(acceptance), staticmethod(said)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Σ 0.8^j times the mean over places of -Σ p log q of step j."""
        with self.accelerator.autocast():
            steps = model(inputs)
            loss = steps[0].logits.sum() * 0.0
            for j, (logits, places) in enumerate(steps):
                if len(logits):
                    p = model.teacher.known(model.last(inputs, j, places))
                    loss = loss - DECAY**j * (p * logits.log_softmax(-1)).sum(-1).mean()
        return (loss, {"loss": loss}) if return_outputs else loss
