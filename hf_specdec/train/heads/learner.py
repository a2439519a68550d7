"""A head learns as it will draft: whole chains, whose steps have a loss each.

Place i of a text is the root of a chain: the target's states are known up to there, and token i + 1, which it chose.
Step j foretells token i + 2 + j, where those before it were drafted as the text has them.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..learning import Examined, examining
from ..lessons import Lessons, batches
from ..teacher import Teacher


class Step(NamedTuple):
    """What a step of all chains says."""

    logits: Tensor
    """[N, K] over the tokens that the draft knows"""
    places: Tensor
    """[B, T] the N places whose chains are so long: roots that the target has written, with a text behind them"""
    sure: Tensor | None = None
    """[N] how likely the likeliest token is right, where the head has an idea of that"""


class Learner(nn.Module, ABC):
    """A head with its target's embeddings and head, which are not trained. A kind of heads says how it steps."""

    decay: float
    """weight of a step's loss, by that of the step before"""

    def __init__(self, head: Any, target: PreTrainedModel, tokens: Tensor, fc: nn.Linear, steps: int) -> None:
        """
        Args:
            tokens: [K] sorted, those that the head knows.
            fc: its layer that fuses the target's states.
            steps: γ, of each chain.
        """
        super().__init__()
        self.head, self.steps, self.width = head, steps, fc.in_features
        self.teacher = Teacher(target, tokens)
        self._embeddings = (target.get_input_embeddings(),)  # in a tuple, where torch does not look for modules

    @abstractmethod
    def forward(self, batch: dict[str, Tensor]) -> list[Step]:
        """One step after the other. A batch's states are those that the head reads, and the target's last ones."""

    def loss(self, step: Step, p: Tensor, said: Tensor) -> Tensor:
        """The cross entropy -Σ p log q, in the mean over a step's places.

        Args:
            p: [N, K] what the target says, of the tokens that the draft knows.
            said: [N] the text's tokens.
        """
        return -(p * step.logits.log_softmax(-1)).sum(-1).mean()

    def states(self, batch: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """[B, T, ...] of the target, that the head reads."""
        return batch["states"][..., : self.width].to(dtype)

    def last(self, batch: dict[str, Tensor], j: int, places: Tensor) -> Tensor:
        """[N, H] states from which the target says what step j foretells."""
        return _later(batch["states"][..., self.width :], 1 + j, places)

    def said(self, batch: dict[str, Tensor], j: int, places: Tensor) -> Tensor:
        """[N] the tokens that step j foretells."""
        return _later(batch["input_ids"], 2 + j, places)

    def right(self, logits: Tensor, said: Tensor) -> Tensor:
        """[N] whether the likeliest token is the text's."""
        return self.teacher.tokens[logits.argmax(-1)] == said


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
            for j, (logits, places, _) in enumerate(model(batch)):
                hit = torch.zeros_like(places)
                hit[places] = model.right(logits, model.said(batch, j, places))
                hits.append(hit)
                whole = places & ~batch["sampled"][:, None]  # of the last step: where a chain is whole
                if j == 0:
                    drawn = batch["sampled"][:, None] & places
                    q = logits[batch["sampled"][:, None].expand_as(places)[places]].softmax(-1)
                    p = model.teacher.all(model.last(batch, 0, drawn))[:, model.teacher.tokens]
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


class HeadTrainer(Examined):
    """The losses of all steps, each by its weight."""

    acceptance, said = staticmethod(acceptance), staticmethod(said)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Σ decay^j times the loss of step j."""
        with self.accelerator.autocast():
            steps = model(inputs)
            loss = steps[0].logits.sum() * 0.0
            for j, step in enumerate(steps):
                if len(step.logits):
                    p = model.teacher.known(model.last(inputs, j, step.places))
                    loss = loss + model.decay**j * model.loss(step, p, model.said(inputs, j, step.places))
        return (loss, {"loss": loss}) if return_outputs else loss
