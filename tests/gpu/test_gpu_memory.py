"""Memory: of a call that stays which is said to be kept, until it is let go of; none takes more than the one before."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from place import DEVICE, synchronize
from transformers import AutoModelForCausalLM

import hf_specdec
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


def release_both(pair: tuple[Any, Any]) -> None:
    for model in pair:
        hf_specdec.release(model)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_memory_of_a_call(pair: tuple[Any, Any], kind: str, rows: int) -> None:
    target, draft = pair
    drafter = DRAFTERS[kind](draft)
    peak(target, None, rows)  # kernels bring workspaces of their own
    release_both(pair)
    before = held()
    ours = [peak(target, drafter, rows) for _ in range(5)]
    left, kept = held() - before, drafter.last_stats.held_bytes
    release_both(pair)
    stays = held() - before
    if DEVICE.type == "cuda":
        assert left < kept + (1 << 20), f"{left} bytes stay on the device after five calls"
        assert stays < 1 << 20, f"{stays} bytes stay though the models were released"
        assert ours[4] < 1.05 * ours[2] + (1 << 20), f"each call takes more: {ours}"
