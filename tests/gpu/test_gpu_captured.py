"""Recorded forwards: they are made, they are replayed, and the text is plain decoding's; in bfloat16 one text."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from every_drafter import PAIRS, drafting_goes_on
from place import DEVICE, placed
from stream_models import streams_of, target_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attention

import hf_specdec
from hf_specdec import DraftModelDrafter, HybridDrafter, PromptLookupDrafter
from hf_specdec.target import capturable, grouped, splits
from hf_specdec.target.capturable import why_not_captured
from hf_specdec.target.recorded import recordings
from hf_specdec.target.shelf import shelf_of

FAMILIES = ["Llama", "Qwen2 sliding", "Gemma3", "Phi-3", "GPT-2"]
NEW = 40
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "prompt_lookup": lambda draft: PromptLookupDrafter(),
    "draft_model, 4": lambda draft: DraftModelDrafter(draft, num_draft_tokens=4),
    "draft_model, 3 candidates": lambda draft: DraftModelDrafter(draft, num_draft_tokens=3, num_candidates=3),
    "hybrid": lambda draft: HybridDrafter(draft),
}
RECORDED = DEVICE.type == "cuda"


def decode(model: Any, drafter: Any, lengths: list[int], **more: Any) -> Tensor:
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | more
    prompts = {name: ids.to(DEVICE) for name, ids in models.prompts(lengths).items()}
    return model.generate(**prompts, **settings, assistant_model=drafter)


@pytest.mark.parametrize("lengths", [[9], [9, 5, 1, 7]], ids=["one row", "four rows"])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_of_recorded_forwards_is_plains(family: str, kind: str, lengths: list[int]) -> None:
    model, draft = models.build(family).to(DEVICE), models.llama(seed=1).to(DEVICE)
    assert not why_not_captured(model)
    drafter, plain = DRAFTERS[kind](draft), decode(model, None, lengths)
    before = len(recordings)
    for _ in range(2):  # what the first call records the second replays
        ours = decode(model, drafter, lengths, speculation={"forwards": "captured"})
        assert torch.equal(ours, plain), drafter.last_stats
    assert len(recordings) > before or not RECORDED, drafter.last_stats


@pytest.mark.parametrize("lengths", [[9], [9, 5, 1, 7]], ids=["one row", "four rows"])
@pytest.mark.parametrize("kind", ["mtp", "block_diffusion", "eagle3", "gemma4"])
def test_greedy_text_of_recorded_heads_is_plains(kind: str, lengths: list[int]) -> None:
    target, drafter = PAIRS[kind]()
    heads, plain = getattr(drafter, "draft_model", None) or drafter.model, decode(target, None, lengths)
    before = len(recordings)
    with drafting_goes_on():
        for _ in range(2):
            ours = decode(target, drafter, lengths, speculation={"forwards": "captured"})
            assert torch.equal(ours, plain), drafter.last_stats
    assert shelf_of(heads).kept and (len(recordings) > before or not RECORDED), drafter.last_stats


@pytest.mark.parametrize("lengths", [[9], [9, 5, 1, 7]], ids=["one row", "four rows"])
def test_greedy_text_of_recorded_streams_is_plains(lengths: list[int]) -> None:
    target = target_of("Llama").to(DEVICE)
    drafter = placed(streams_of(target, num_nodes=8))
    plain, before = decode(target, None, lengths), len(recordings)
    with drafting_goes_on():
        for _ in range(2):
            ours = decode(target, drafter, lengths, speculation={"forwards": "captured"})
            assert torch.equal(ours, plain), drafter.last_stats
    assert not any("not captured" in note for note in drafter.last_stats.notes)
    assert drafter.last_stats.drafted_tokens > 0 and (len(recordings) > before or not RECORDED), drafter.last_stats


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 20}, {"top_p": 0.8}])
def test_recorded_draws_are_those_of_eager_forwards(settings: dict[str, Any]) -> None:
    model, draft, texts = models.llama().to(DEVICE), models.llama(seed=1).to(DEVICE), []
    for forwards in ("eager", "captured", "captured"):
        torch.manual_seed(7)
        drafter = DraftModelDrafter(draft, num_draft_tokens=4)
        speculation = {"forwards": forwards}
        texts.append(decode(model, drafter, [9, 4], do_sample=True, **settings, speculation=speculation))
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[1], texts[2])


@pytest.mark.parametrize("lengths", [[9], [9, 5, 1, 7]], ids=["one row", "four rows"])
def test_in_bfloat16_one_text_whatever_drafts(lengths: list[int]) -> None:
    size = {"hidden_size": 256, "intermediate_size": 688, "head_dim": 32}
    model, draft = (models.llama(seed=seed, **size).to(DEVICE, torch.bfloat16) for seed in (0, 1))
    bitwise = {"forwards": "bitwise"}
    alone = decode(model, None, lengths, speculation=bitwise)
    for kind, make in DRAFTERS.items():
        assert torch.equal(decode(model, make(draft), lengths, speculation=bitwise), alone), kind


def test_after_a_warm_up_nothing_is_recorded() -> None:
    model, drafter = models.llama().to(DEVICE), PromptLookupDrafter()
    prompts = {name: ids.to(DEVICE) for name, ids in models.prompts([9]).items()}
    call = {"max_new_tokens": 100, "do_sample": False, "speculation": {"forwards": "captured"}}
    said = hf_specdec.warm_up(model, drafter, **prompts, **call)
    before = len(recordings)
    assert ("recorded" in said) == RECORDED or "only a GPU records" in said
    decode(model, drafter, [9], **call)
    assert len(recordings) == before


def test_rows_that_come_and_go_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturable, "BY_ITSELF", ("cpu", "cuda"))
    model = models.llama().to(DEVICE)
    prompts = [models.prompts([length], seed=length)["input_ids"] for length in (9, 4, 7, 12, 3)]
    plain = [model.generate(ids.to(DEVICE), max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :] for ids in prompts]
    before = len(recordings)
    with hf_specdec.BatchDecoder(model, PromptLookupDrafter(), max_rows=3) as decoder:
        answers = [decoder.submit(ids, max_new_tokens=NEW, do_sample=False) for ids in prompts]
        texts = [answer.result() for answer in answers]
    assert texts == [text.tolist() for text in plain]
    assert len(recordings) > before or not RECORDED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2])
def test_keys_in_splits_are_attended_as_whole_ones(rows: int, dtype: torch.dtype) -> None:
    """As near to what float64 gives; the last row sees nothing of most splits."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(rows, 2, n, 128, device=DEVICE).to(dtype) for n in (64, 4096 + 64, 4096 + 64))
    key, value, mask = key[:, :, :4096], value[:, :, :4096], torch.zeros(rows, 1, 64, 4096, device=DEVICE, dtype=dtype)
    mask[-1, ..., 300:] = torch.finfo(dtype).min
    exact = attention(*(each.double() for each in (query, key, value)), attn_mask=mask.double())
    whole = (attention(query, key, value, attn_mask=mask) - exact).abs().amax()
    for number in (2, 8):
        split = splits.attend_in_splits(query, key, value, splits.split_mask(mask, rows, 2, number))
        assert (split - exact).abs().amax() <= 2 * whole + torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", DRAFTERS)
def test_logits_of_a_long_context_are_those_without_splits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft, met = models.llama().to(DEVICE), models.llama(seed=1).to(DEVICE), []
    for each in (model, draft):
        each.config.max_position_embeddings = 4096
    attend, call = splits.attend_in_splits, {"output_logits": True, "return_dict_in_generate": True}
    monkeypatch.setattr(grouped, "attend_in_splits", lambda *given: met.append(given[3].shape[1]) or attend(*given))

    def logits() -> Tensor:
        made = decode(
            model, DRAFTERS[kind](draft), [1500], max_new_tokens=8, speculation={"forwards": "captured"}, **call
        )
        return torch.stack(made.logits)

    with monkeypatch.context() as patch:
        patch.setattr(splits, "MULTIPROCESSORS", {})
        whole = logits()
    assert not met
    for each in (model, draft):
        shelf_of(each).kept.clear()
    monkeypatch.setitem(splits.MULTIPROCESSORS, "cpu", lambda device: 132)
    torch.testing.assert_close(logits(), whole, atol=1e-3, rtol=1e-3)
    assert met and min(met) > 1


@pytest.mark.skipif(not RECORDED, reason="only a GPU records")
def test_recordings_outlive_others_and_compiled_models() -> None:
    """Workspaces of matrix products are by stream: neither the end of other recordings nor those of a compiled model
    take them away from what is replayed. Tensors that are made afterwards would lie where they were."""
    size = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 64}
    stays, goes, other = (models.llama(seed=seed, **size).to(DEVICE, torch.bfloat16) for seed in range(3))
    compiled = torch.compile(other, mode="reduce-overhead")
    ids, texts = models.prompts([9])["input_ids"].to(DEVICE), []

    def logits() -> Tensor:
        call = {"output_logits": True, "return_dict_in_generate": True, "speculation": {"forwards": "captured"}}
        return torch.stack(decode(stays, DraftModelDrafter(stays, num_draft_tokens=4), [9], **call).logits)

    before = logits(), logits()  # what the first call records the second replays
    decode(goes, DraftModelDrafter(goes, num_draft_tokens=4), [9], speculation={"forwards": "captured"})
    shelf_of(goes).kept.clear()
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            texts.append(compiled(ids).logits.clone())
    torch.cuda.empty_cache()
    spoilt = [torch.full((1 << 20,), float("nan"), device=DEVICE) for _ in range(64)]
    after = logits()
    assert torch.equal(before[0], before[1]) and torch.equal(before[1], after)
    assert torch.equal(texts[0], texts[-1]) and len(spoilt) == 64
