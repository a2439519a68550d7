"""Distillation: the draft learns the target's distribution at every place where the target wrote."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ...drafters.draft_model.cut import CutLlamaForCausalLM
from ...target.devices import input_device
from ..learning import Examined, batches, examining

FIGURES = {"greedy_match": "first choice right in greedy text", "acceptance": "acceptance at temperature 1"}
"""what is measured on texts that were held out"""


def collate(lessons: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Texts padded on the right; their places one after the other."""
    ids = pad_sequence([lesson["input_ids"] for lesson in lessons], batch_first=True)
    ends = torch.tensor([len(lesson["input_ids"]) for lesson in lessons])[:, None]
    places, starts = torch.arange(ids.shape[1]), torch.stack([lesson["start"] for lesson in lessons])[:, None]
    wanted = (places >= starts) & (places < ends)
    sampled = torch.cat([lesson["temperature"].expand(len(lesson["greedy"])) for lesson in lessons]) > 0
    joined = {name: torch.cat([lesson[name] for lesson in lessons]) for name in ("rows", "chances", "greedy")}
    return {"input_ids": ids, "wanted": wanted, "sampled": sampled} | joined


def known_logits(draft: CutLlamaForCausalLM, batch: dict[str, Tensor]) -> Tensor:
    """The draft's logits [N, K] at the places that count, over the tokens it knows."""
    hidden = draft.hidden(batch["input_ids"], use_cache=False).last_hidden_state
    return draft.lm_head(hidden[batch["wanted"]]).float()


def acceptance(draft: Any, lessons: Dataset[dict[str, Tensor]], rows: int) -> dict[str, float]:
    """How often the draft is right on texts.

    Returns:
        `greedy_match`: share of places in greedy texts where its first choice is the target's;
        `acceptance`: mean of Σ min(p, q) at temperature 1 over the sampled texts (α, Leviathan 2023, Corollary 3.6), of
        the target's likeliest tokens only, so a little low. Each where there are such texts.
    """
    matches, overlaps = [torch.zeros(0)], [torch.zeros(0)]
    with examining(draft):
        for batch in batches(lessons, rows, collate, input_device(draft)):
            logits, sampled = known_logits(draft, batch), batch["sampled"]
            matches.append((logits.argmax(-1) == batch["greedy"])[~sampled].float().cpu())
            q = logits[sampled].softmax(-1).gather(1, batch["rows"][sampled].long())
            overlaps.append(torch.minimum(q, batch["chances"][sampled].float()).sum(-1).cpu())
    values = {"greedy_match": torch.cat(matches), "acceptance": torch.cat(overlaps)}
    return {name: float(value.mean()) for name, value in values.items() if len(value)}


def said(found: dict[str, float]) -> str:
    """The figures of `acceptance` in words."""
    return ", ".join(f"{FIGURES[name]}: {found[name]:.1%}" for name in FIGURES if name in found)


def cross_entropy(p: Tensor, log_q: Tensor) -> Tensor:
    """-Σ p log q [N] of the target's likeliest tokens, with their chances p [N, n] made to sum to 1."""
    return -(p / p.sum(-1, keepdim=True).clamp_min(1e-6) * log_q).sum(-1)


def total_variation(p: Tensor, log_q: Tensor) -> Tensor:
    """1 - Σ min(p, q) [N] over the target's likeliest tokens: how often a draw from q is rejected, D_LK (Leviathan
    2023, Theorem 3.5); a little high, as the target's other tokens count as rejected."""
    return 1 - torch.minimum(p, log_q.exp()).sum(-1)


class Distillation(Examined):
    """The draft learns the target's distribution; evaluation says how often the draft would be right."""

    acceptance, said = staticmethod(acceptance), staticmethod(said)
    distance: Callable[[Tensor, Tensor], Tensor] = staticmethod(cross_entropy)
    """(p, log q) → the loss at each place"""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """The mean distance over the places."""
        with self.accelerator.autocast():  # which accelerate puts around `forward` only
            logits = known_logits(model, inputs)
        log_q = logits.gather(1, inputs["rows"].long()) - logits.logsumexp(-1, keepdim=True)
        loss = self.distance(inputs["chances"].float(), log_q).mean()
        return (loss, {"loss": loss}) if return_outputs else loss


class RejectionDistillation(Distillation):
    """The draft learns to be accepted: the paper's "optimizing M_q for α directly" (section 6)."""

    distance = staticmethod(total_variation)


TRAINERS: dict[str, type[Distillation]] = {"cross_entropy": Distillation, "tv": RejectionDistillation}
"""by the option `loss`"""
