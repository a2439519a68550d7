"""What a draft would do beside a target, recorded at every position of the target's own text (Mamou 2024, App. D.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ...drafters.disco.classifier import NONE, Recurrence, features
from ...drafters.disco.drafter import fingerprint
from ...errors import SpeculationError
from ...target.devices import input_device
from ...tools.loading.chat import prompt_ids
from ...tools.loading.models import Pair
from ...tools.loading.prompts import Prompt
from ...verify.verification import distribution, draw, drawable
from ..folder import hold_to
from ..writing import Asked, Text, write_texts

ROWS = 16
"""prompts that the target answers at once"""


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


def answers(
    pair: Pair, prompts: Sequence[Prompt], folder: Path, do_sample: bool, max_new_tokens: int, seed: int = 0
) -> list[Text]:
    """The target's answers, greedy or at temperature 1. Those that the folder holds are not written again.

    Raises:
        SpeculationError: no prompt, or a folder with the answers of another target, length or seed.
    """
    if not prompts:
        raise SpeculationError("there are no prompts to answer; give at least one")
    folder.mkdir(parents=True, exist_ok=True)
    told = {"target": fingerprint(pair.target), "max_new_tokens": max_new_tokens, "seed": seed}
    hold_to(folder / "made_for.json", told)
    rows = [prompt_ids(pair.tokenizer, prompt) for prompt in prompts]
    asked = [Asked(ids, float(do_sample), number) for number, ids in enumerate(rows)]
    file = folder / "texts.jsonl"
    return write_texts(pair.target, pair.tokenizer, asked, file, max_new_tokens, ROWS, seed * 100_003)


def records_of(pair: Pair, texts: Sequence[Text], k: int, lookup: bool = True, seed: int = 0) -> list[Record]:
    """A record of each text of two tokens or more, see `record_text`.

    Raises:
        SpeculationError: there is none.
    """
    assert pair.draft is not None
    torch.manual_seed(seed)
    long = [text for text in texts if len(text.ids) > text.start + 1]
    if not long:
        raise SpeculationError(
            "the target ended every text within two tokens, so there is nothing to learn from; give prompts that it "
            "continues"
        )
    return [
        record_text(pair.target, pair.draft, torch.tensor(text.ids), text.start, k, text.temperature > 0, lookup)
        for text in tqdm(long, desc="records", unit="text")
    ]


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
