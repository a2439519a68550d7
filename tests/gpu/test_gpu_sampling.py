"""Sampled text has the target's distribution, also where a GPU computes it: three tokens in a row, 5 token ids."""

from typing import Any

import models
import pytest
import torch
from chi_square import chi_square
from every_drafter import drafting_goes_on
from place import DEVICE
from sampled_triples import LEVEL, NEW, PROMPT, SETTINGS, VOCAB, joint, p_value

from hf_specdec import DraftModelDrafter, HybridDrafter, PearlDrafter, PromptLookupDrafter
from hf_specdec.verify.randomness import Purpose, Randomness

CHUNK = 2_500


def drafter_of(kind: str) -> Any:
    draft = models.llama(VOCAB, seed=1).to(DEVICE)
    if kind == "draft_model":
        return DraftModelDrafter(draft, num_draft_tokens=3)
    if kind == "hybrid":
        return HybridDrafter(draft, num_draft_tokens=2)
    return PromptLookupDrafter(num_branches=2)


@pytest.mark.parametrize(
    ("kind", "setting", "rows"),
    [("draft_model", "temperature", 10_000), ("prompt_lookup", "penalties", 5_000), ("hybrid", "top-k", 2_500)],
)
def test_the_joint_distribution_of_three_tokens(kind: str, setting: str, rows: int) -> None:
    target, drafter = models.small(VOCAB), drafter_of(kind)
    told, processors = SETTINGS[setting]
    wanted = joint(target, processors)
    target.to(DEVICE)
    counts = torch.zeros(VOCAB**3, dtype=torch.long)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0} | told
    prompt = PROMPT.expand(CHUNK, -1).to(DEVICE)
    for seed in range(rows // CHUNK):
        torch.manual_seed(seed)
        with drafting_goes_on():
            text = target.generate(
                prompt, attention_mask=torch.ones_like(prompt), assistant_model=drafter, pad_token_id=0, **options
            )
        a, b, c = text[:, -3:].T.cpu()
        counts += torch.bincount((a * VOCAB + b) * VOCAB + c, minlength=VOCAB**3)
    assert p_value(counts, wanted) > LEVEL


def test_pearls_distribution() -> None:
    """Its worker answers row by row, so it is given fewer rows, and the last token only is looked at."""
    target, rows = models.small(VOCAB), 512
    drafter = PearlDrafter(models.llama(VOCAB, seed=1).to(DEVICE), window=2, worker="thread")
    wanted = joint(target, []).view(-1, VOCAB).sum(0)
    target.to(DEVICE)
    prompt = PROMPT.expand(rows, -1).to(DEVICE)
    torch.manual_seed(0)
    text = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=drafter,
        pad_token_id=0,
        max_new_tokens=NEW,
        do_sample=True,
        top_k=0,
    )
    counts = torch.bincount(text[:, -1].cpu(), minlength=VOCAB)
    assert chi_square(counts, wanted * rows) > LEVEL


def test_the_numbers_of_a_decision_are_the_hosts() -> None:
    """What is drawn depends on the seed alone, not on where it is drawn."""
    there, here = (
        Randomness(9).tensor(range(64), list(range(64)), Purpose.ACCEPT, torch.device(kind)) for kind in (DEVICE, "cpu")
    )
    assert torch.equal(there.cpu(), here)
