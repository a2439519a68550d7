"""Calls whose forwards are captured: drafters for them, one call, and rows that come and go."""

from collections.abc import Callable
from typing import Any

import models
from traced import Traced, traced

import hf_specdec
from hf_specdec import DraftModelDrafter, HybridDrafter, PromptLookupDrafter, SuffixDrafter
from hf_specdec.target.shelf import shelf_of

CAPTURED = {"forwards": "captured"}
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "lookup": lambda draft: PromptLookupDrafter(),
    "lookup, branches": lambda draft: PromptLookupDrafter(num_branches=3),
    "suffix": lambda draft: SuffixDrafter(),
    "fixed": lambda draft: DraftModelDrafter(draft, num_draft_tokens=4),
    "auto": lambda draft: DraftModelDrafter(draft),
    "candidates": lambda draft: DraftModelDrafter(draft, num_draft_tokens=3, num_candidates=3),
    "hybrid": lambda draft: HybridDrafter(draft),
    "hybrid, fixed": lambda draft: HybridDrafter(draft, num_draft_tokens=3),
}


def decode(model: Any, drafter: Any, lengths: list[int], **more: Any) -> Any:
    settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0} | more
    return model.generate(**models.prompts(lengths), **settings, assistant_model=drafter)


def come_and_go(model: Any, drafter: Any) -> None:
    """More rows than there is room for at once, of uneven lengths: buffers grow and shrink."""
    prompts = [models.prompts([length], seed=length)["input_ids"] for length in (9, 4, 7, 12, 3)]
    news = (30, 5, 20, 12, 25)
    plain = [
        model.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :].tolist()
        for ids, new in zip(prompts, news, strict=True)
    ]
    for _ in range(2):  # the second one replays what the first has recorded
        with traced(), hf_specdec.BatchDecoder(model, drafter, max_rows=3, forwards="captured") as decoder:
            answers = [
                decoder.submit(ids, max_new_tokens=new, do_sample=False) for ids, new in zip(prompts, news, strict=True)
            ]
            assert [answer.result() for answer in answers] == plain
            assert Traced.played and not any("dropped" in note for note in decoder.stats.notes)
    assert {kept.rows for kept in shelf_of(model).kept} >= {1, 2, 4}
    assert all(kept.free for kept in shelf_of(model).kept)
