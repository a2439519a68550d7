"""What a target and a draft would do to each other, recorded once, so that any stop rule can be judged from records.

On the target's own text every position is looked at once (Mamou 2024, Appendix D.1). What the draft would say *after*
a rejection is recorded, too: a stop rule does not know of the rejection and goes on to read the draft's features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ...drafters.disco.classifier import EXTRA, features
from ...drafters.disco.lookup import NONE, Branch, Recurrence
from ...target.devices import input_device
from ...target.inputs import CACHE
from ...verify.verification import distribution, draw, drawable, residual

ROLLOUT_ROWS = 64
"""texts after a rejection that the draft continues at once"""


@dataclass
class Record:
    """One text of N tokens that the target wrote."""

    features: Tensor
    """[N, k + 4] of the draft, given the target's text before each position"""
    beta: Tensor
    """[N] Σ min(p, q) = 1 − TV(p, q) (Leviathan 2023, Theorem 3.5); greedy: 1 where the two agree, else 0"""
    accepted: Tensor
    """[N] bool: whether a draft token at this position is accepted"""
    after: Tensor
    """[N, R, k + 4] features of the draft's next R positions once its token here was rejected; zeros where accepted"""

    def __len__(self) -> int:
        return len(self.beta)


@torch.no_grad()
def record_text(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    ids: Tensor,
    prompt: int,
    k: int,
    do_sample: bool,
    rollout: int = 0,
    lookup: bool = True,
) -> Record:
    """Look at every position of one text.

    Args:
        ids: [L] the prompt and the target's continuation, which was drawn from p itself where `do_sample`.
        prompt: tokens of the prompt.
        rollout: R, how far to follow the draft after a rejection.
        lookup: whether features say what copying from earlier text would propose.
    """
    ids = ids.to(input_device(target))
    new = ids[prompt:]
    cache = DynamicCache(config=draft.config) if rollout else None
    options = {} if cache is None else {CACHE: cache, "use_cache": True}
    q_logits = draft(ids[None].to(input_device(draft)), **options).logits[0, prompt - 1 : -1].to(ids.device)
    p_logits = target(ids[None]).logits[0, prompt - 1 : -1]
    vocab = min(q_logits.shape[-1], p_logits.shape[-1])
    q_logits, p_logits = q_logits[:, :vocab].float(), p_logits[:, :vocab].float()
    text, proposed = Recurrence(ids[:prompt].tolist()), []
    for token in new.tolist():
        proposed.append(text.proposal() if lookup else NONE)
        text.extend([token])
    read = features(q_logits, range(len(new)), proposed, k)
    if do_sample:
        p, q = drawable(distribution(p_logits)), drawable(distribution(q_logits))
        beta = torch.minimum(p, q).sum(-1).clamp(max=1.0)
        # The text's token x came from p, so it came out of an acceptance with probability min(p, q)(x) / p(x).
        p_x, q_x = (probs.gather(1, new[:, None])[:, 0] for probs in (p, q))
        accepted = torch.rand(len(new), device=ids.device) * p_x < q_x
        rejected = draw(residual(q, p), torch.rand(len(new), device=ids.device))
    else:
        rejected = q_logits.argmax(-1)
        accepted = rejected == new
        beta = accepted.float()
    after = read.new_zeros(len(new), rollout, k + EXTRA)
    at = (~accepted).nonzero()[:, 0]
    for some in at.split(ROLLOUT_ROWS) if rollout and len(at) else ():
        known = [Recurrence(ids[: prompt + j].tolist()) for j in some.tolist()] if lookup else None
        after[some] = _continue(draft, cache, prompt + some, rejected[some], known, prompt, rollout, k, do_sample).to(
            after
        )
    return Record(read.cpu(), beta.cpu(), accepted.cpu(), after.cpu())


def _continue(
    draft: PreTrainedModel,
    cache: DynamicCache | None,
    columns: Tensor,
    tokens: Tensor,
    texts: list[Recurrence] | None,
    prompt: int,
    steps: int,
    k: int,
    do_sample: bool,
) -> Tensor:
    """Features [J, steps, k + 4] of the draft's continuations of `tokens` [J], put at `columns` [J] of one text.

    Args:
        texts: what copying knows of the text before each of the columns; None where it is not to be asked.
    """
    assert cache is not None
    device = input_device(draft)
    own = DynamicCache(config=draft.config)
    for i, layer in enumerate(cache.layers):
        own.update(*(state.expand(len(columns), -1, -1, -1) for state in (layer.keys, layer.values)), i)
    columns, tokens = columns.to(device), tokens.to(device)
    mask = (torch.arange(own.get_seq_length(), device=device) < columns[:, None]).long()
    branches = None if texts is None else [Branch(text) for text in texts]
    proposed = [NONE] * len(columns)
    read = []
    for step in range(steps):
        mask = torch.cat([mask, mask.new_ones(len(columns), 1)], dim=1)
        position = columns + step
        inputs = {"attention_mask": mask, "position_ids": position[:, None], CACHE: own}
        logits = draft(tokens[:, None], **inputs).logits
        logits = logits[:, -1].float()
        if branches is not None:
            for branch, token in zip(branches, tokens.tolist(), strict=True):
                branch.append(token)
            proposed = [branch.proposal() for branch in branches]
        read.append(features(logits, (position + 1 - prompt).tolist(), proposed, k))
        drawn = torch.rand(len(columns), device=device)
        tokens = draw(drawable(distribution(logits)), drawn) if do_sample else logits.argmax(-1)
    return torch.stack(read, 1).cpu()
