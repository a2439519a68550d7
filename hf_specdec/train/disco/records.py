"""What a draft would do beside a target, recorded at every position of the target's own text (Mamou 2024, App. D.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...drafters.disco.classifier import NONE, Recurrence, features
from ...target.devices import input_device
from ...verify.verification import distribution, draw, drawable


@dataclass
class Record:
    """One text of N tokens that the target wrote."""

    features: Tensor
    """[N, k + 6] of the draft and its token x, given the target's text before each position"""
    chance: Tensor
    """[N] of x to be accepted: min(1, p(x) / q(x)), of which the mean over q is 1 − TV(p, q) (Leviathan 2023, Theorem
    3.5); greedy: 1 where the two agree, else 0"""
    accepted: Tensor
    """[N] bool: whether x is accepted"""

    def __len__(self) -> int:
        return len(self.chance)


@torch.no_grad()
def record_text(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    ids: Tensor,
    prompt: int,
    k: int,
    do_sample: bool,
    lookup: bool = True,
) -> Record:
    """Look at every position of one text, where the draft drafts one token: drawn from q where `do_sample`, else the
    likeliest one.

    Args:
        ids: [L] the prompt and the target's continuation, which was drawn from p itself where `do_sample`.
        prompt: tokens of the prompt.
        k: how many of the draft's top probabilities are features.
        lookup: whether features say what copying from earlier text would propose.
    """
    ids = ids.to(input_device(target))
    new = ids[prompt:]
    q_logits = draft(ids[None].to(input_device(draft))).logits[0, prompt - 1 : -1].to(ids.device)
    p_logits = target(ids[None]).logits[0, prompt - 1 : -1]
    vocab = min(q_logits.shape[-1], p_logits.shape[-1])
    q_logits, p_logits = q_logits[:, :vocab].float(), p_logits[:, :vocab].float()
    text, proposed = Recurrence(ids[:prompt].tolist()), []
    for token in new.tolist():
        proposed.append(text.proposal() if lookup else NONE)
        text.extend([token])
    if do_sample:
        p, q = drawable(distribution(p_logits)), drawable(distribution(q_logits))
        u, r = torch.rand(2, len(new), device=ids.device)
        x = draw(q, u)
        p_x, q_x = (probs.gather(1, x[:, None])[:, 0] for probs in (p, q))
        chance = (p_x / q_x).clamp(max=1.0)
        accepted = r < chance
    else:
        x = q_logits.argmax(-1)
        accepted = x == new
        chance = accepted.float()
    seen = features(q_logits, x, range(len(new)), proposed, k)
    return Record(seen.cpu(), chance.cpu(), accepted.cpu())
