"""Distillation: the draft learns the target's distribution at every place where the target wrote."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...drafters.draft_model.cut import CutLlamaForCausalLM
from ..learning import Examined, examining
from ..lessons import Lessons, batches
from ..teacher import Teacher

FIGURES = {"greedy_match": "first choice right in greedy text", "acceptance": "acceptance at temperature 1"}
"""what is measured on texts that were held out"""


class Learner(nn.Module):
    """A draft with its target's output head, which is not trained."""

    def __init__(self, draft: CutLlamaForCausalLM, target: PreTrainedModel) -> None:
        super().__init__()
        self.draft, self.teacher = draft, Teacher(target, draft.token_of)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Tied weights twice: safetensors would refuse to save them."""
        return {name: weight.clone() for name, weight in super().state_dict(*arguments, **options).items()}

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The draft's logits [N, K] at the places that count, over the tokens it knows."""
        hidden = self.draft.hidden(batch["input_ids"], use_cache=False).last_hidden_state
        return self.draft.lm_head(self.places(hidden, batch)).float()

    def places(self, states: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """[N, ...] those of the places that count, of states [B, T, ...]."""
        rows = torch.arange(len(states), device=states.device)[:, None]
        return states[rows, batch["at"]][batch["counts"]]


def acceptance(model: Any, lessons: Lessons, rows: int) -> dict[str, float]:
    """How often the draft is right on texts.

    Returns:
        `greedy_match`: share of places in greedy texts where its first choice is the target's;
        `acceptance`: mean of Σ min(p, q) at temperature 1 over the sampled texts (α, Leviathan 2023, Corollary 3.6).
        Each where there are such texts.
    """
    matches, overlaps = [torch.zeros(0)], [torch.zeros(0)]
    with examining(model):
        for batch in batches(lessons, rows, next(model.parameters()).device):
            logits, sampled = model(batch), batch["sampled"][:, None].expand_as(batch["at"])[batch["counts"]]
            p, tokens = model.teacher.all(model.places(batch["states"], batch)), model.teacher.tokens
            matches.append((tokens[logits.argmax(-1)] == p.argmax(-1))[~sampled].float().cpu())
            overlaps.append(torch.minimum(p[sampled][:, tokens], logits[sampled].softmax(-1)).sum(-1).cpu())
    values = {"greedy_match": torch.cat(matches), "acceptance": torch.cat(overlaps)}
    return {name: float(value.mean()) for name, value in values.items() if len(value)}


def said(found: dict[str, float]) -> str:
    """The figures of `acceptance` in words."""
    return ", ".join(f"{FIGURES[name]}: {found[name]:.1%}" for name in FIGURES if name in found)


def cross_entropy(p: Tensor, log_q: Tensor) -> Tensor:
    """-Σ p log q [N]."""
    return -(p * log_q).sum(-1)


def total_variation(p: Tensor, log_q: Tensor) -> Tensor:
    """1 - Σ min(p, q) [N]: how often a draw from q is rejected, D_LK (Leviathan 2023, Theorem 3.5)."""
    return 1 - torch.minimum(p, log_q.exp()).sum(-1)


class Distillation(Examined):
    """The draft learns the target's distribution over the tokens that it knows; evaluation says how often the draft
    would be right."""

    acceptance, said = staticmethod(acceptance), staticmethod(said)
    distance: Callable[[Tensor, Tensor], Tensor] = staticmethod(cross_entropy)
    """(p, log q) → the loss at each place"""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """The mean distance over the places."""
        with self.accelerator.autocast():
            logits = model(inputs)
            p = model.teacher.known(model.places(inputs["states"], inputs))
        loss = self.distance(p, logits.log_softmax(-1)).mean()
        return (loss, {"loss": loss}) if return_outputs else loss


class RejectionDistillation(Distillation):
    """The draft learns to be accepted: the paper's "optimizing M_q for α directly" (section 6)."""

    distance = staticmethod(total_variation)


TRAINERS: dict[str, type[Distillation]] = {"cross_entropy": Distillation, "tv": RejectionDistillation}
"""by the option `loss`"""
