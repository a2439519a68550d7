"""Memory: nothing of a call stays, and none takes more than the one before."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from place import DEVICE, synchronize
from transformers import AutoModelForCausalLM

from hf_specdec import DraftModelDrafter, HybridDrafter, PearlDrafter, PromptLookupDrafter
from hf_specdec.tools.instruments.provenance import peak_memory_bytes, reset_peak_memory

PAIR = Path(__file__).parent.parent / "pair"
NEW, PROMPT = (256, 512) if DEVICE.type == "cuda" else (16, 64)
DRAFTERS: dict[str, Any] = {
    "prompt_lookup": lambda draft: PromptLookupDrafter(),
    "draft_model": lambda draft: DraftModelDrafter(draft),
    "hybrid": lambda draft: HybridDrafter(draft),
    "pearl": lambda draft: PearlDrafter(draft, worker="thread"),
}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    target, draft = (
        AutoModelForCausalLM.from_pretrained(PAIR / name, dtype=torch.bfloat16).to(DEVICE).eval()
        for name in ("target", "draft")
    )
    target.generation_config.eos_token_id = draft.generation_config.eos_token_id = None
    return target, draft


def held() -> int:
    """Bytes on the device that somebody refers to."""
    gc.collect()
    synchronize()
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


def peak(target: Any, drafter: Any, rows: int) -> int:
    """Bytes beyond what was there before the call."""
    ids = torch.randint(2, 8000, (rows, PROMPT), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    before = held()
    reset_peak_memory(DEVICE)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 1}
    target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, **options)
    return peak_memory_bytes(DEVICE) - before


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_memory_of_a_call(pair: tuple[Any, Any], kind: str, rows: int) -> None:
    target, draft = pair
    drafter = DRAFTERS[kind](draft)
    for _ in range(2):  # kernels bring workspaces of their own
        peak(target, drafter, rows)
    before = held()
    ours = [peak(target, drafter, rows) for _ in range(3)]
    left = held() - before
    if DEVICE.type == "cuda":
        assert left < 1 << 20, f"{left} bytes stay on the device after three calls"
        assert ours[2] < 1.05 * ours[0] + (1 << 20), f"each call takes more: {ours}"
