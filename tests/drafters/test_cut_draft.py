"""A Llama with a cut vocabulary: a draft like any other, with the target's token ids."""

import json
import pickle
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from disco_models import STOPS, classifier
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_specdec import DiscoDrafter, DraftModelDrafter, SpeculationError
from hf_specdec.drafters.disco import features
from hf_specdec.drafters.draft_model.cut import CutLlamaForCausalLM
from hf_specdec.target.inputs import CACHE
from hf_specdec.target.probe import Support, support
from hf_specdec.train.draft.cutting import cut

KNOWN = torch.tensor([0, 1, *range(2, 97, 2)])
UNKNOWN = torch.tensor([token for token in range(models.VOCAB) if token not in KNOWN.tolist()])
IDS = models.prompts([9, 9])["input_ids"]


@pytest.fixture(scope="module")
def target() -> Any:
    return models.llama(num_hidden_layers=3)


@pytest.fixture(scope="module")
def draft(target: Any) -> CutLlamaForCausalLM:
    return cut(target, [0, 2], KNOWN).eval()


def logits(model: Any, ids: Tensor = IDS, **options: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **options).logits


@pytest.mark.parametrize("tied", [False, True])
def test_all_layers_and_all_tokens_are_the_target_itself(tied: bool) -> None:
    target = models.from_config(LlamaConfig(**models.SIZES | {"tie_word_embeddings": tied}))
    whole = cut(target, [0, 1], torch.arange(models.VOCAB)).eval()
    assert torch.equal(logits(whole), logits(target))
    assert whole.num_parameters() == target.num_parameters()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unknown_tokens_have_the_lowest_logit_there_is(target: Any, dtype: torch.dtype) -> None:
    draft = cut(target, [0], KNOWN).to(dtype).eval()
    found = logits(draft)
    assert found.shape == (*IDS.shape, models.VOCAB) and found.dtype == dtype
    assert (found[..., UNKNOWN] == torch.finfo(dtype).min).all()
    assert (found[..., KNOWN].abs() < 1e4).all()


def test_an_unknown_token_is_read_as_the_nearest_that_is_known(target: Any, draft: CutLlamaForCausalLM) -> None:
    rows = target.get_input_embeddings().weight
    for token in range(models.VOCAB):
        near = int(draft.token_of[draft.row_of[token]])
        expected = int(KNOWN[cosine_similarity(rows[token][None], rows[KNOWN]).argmax()])
        assert near == (token if token in KNOWN.tolist() else expected)
    assert torch.equal(logits(draft), logits(draft, draft.token_of[draft.row_of[IDS]]))


@pytest.mark.parametrize("keep", [0, 1, 4, torch.tensor([2, 5])])
def test_logits_to_keep(draft: CutLlamaForCausalLM, keep: int | Tensor) -> None:
    whole = logits(draft)
    wanted = whole[:, keep] if isinstance(keep, Tensor) else whole[:, -keep:]
    assert torch.allclose(logits(draft, logits_to_keep=keep), wanted, atol=1e-5)


def test_a_forward_keeps_a_cache_or_none(draft: CutLlamaForCausalLM) -> None:
    kept, free = (draft(input_ids=IDS, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(kept.logits, free.logits)
    assert kept[CACHE].get_seq_length() == IDS.shape[1] and free.get(CACHE) is None


def test_labels_give_a_loss_over_the_known_tokens(draft: CutLlamaForCausalLM) -> None:
    labels = IDS.clone()
    labels[:, :3] = -100
    assert any(token in UNKNOWN for token in labels[:, 3:].flatten())
    loss = draft(input_ids=IDS, labels=labels).loss
    expected = labels[:, 1:].masked_fill(torch.isin(labels[:, 1:], UNKNOWN), -100)
    assert torch.allclose(loss, cross_entropy(logits(draft)[:, :-1].transpose(1, 2), expected))
    assert draft(input_ids=IDS).loss is None
    assert isinstance(draft(input_ids=IDS, return_dict=False), tuple)
    loss.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in draft.parameters())
    draft.zero_grad()


def test_a_saved_one_is_loaded_by_the_auto_class(draft: CutLlamaForCausalLM, tmp_path: Path) -> None:
    draft.save_pretrained(tmp_path)
    for attention in ("sdpa", "eager"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention)
        assert type(loaded) is CutLlamaForCausalLM and loaded.model.config._attn_implementation == attention
        assert torch.allclose(logits(loaded), logits(draft), atol=1e-5)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and half.row_of.dtype == torch.long
    copied = pickle.loads(pickle.dumps(loaded))  # PEARL sends it to a process
    assert torch.equal(logits(copied), logits(loaded))


@pytest.mark.parametrize(("name", "bad"), [("row_of", len(KNOWN)), ("token_of", models.VOCAB), ("row_of", -1)])
def test_tables_that_lead_nowhere_are_refused(
    target: Any, draft: CutLlamaForCausalLM, tmp_path: Path, name: str, bad: int
) -> None:
    DraftModelDrafter(draft).save_pretrained(tmp_path)
    file = tmp_path / "draft_model" / "model.safetensors"
    tensors = load_file(file)
    tensors[name][3] = bad
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(SpeculationError, match=name):
        AutoModelForCausalLM.from_pretrained(file.parent)
    with pytest.raises(SpeculationError, match=f"draft_model.*{name}"):
        DraftModelDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("change", [{"known_tokens": 60}, {"known_tokens": 0}, {"vocab_size": 10**9}])
def test_a_config_that_does_not_fit_its_weights_is_refused(
    draft: CutLlamaForCausalLM, tmp_path: Path, change: dict
) -> None:
    DraftModelDrafter(draft).save_pretrained(tmp_path)
    file = tmp_path / "draft_model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(SpeculationError, match="draft_model"):
        DraftModelDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("lengths", [[7], [9, 4, 7, 2]])
def test_it_drafts_and_the_text_is_the_targets(
    target: Any, draft: CutLlamaForCausalLM, tmp_path: Path, lengths: list[int]
) -> None:
    DraftModelDrafter(draft, num_draft_tokens=4).save_pretrained(tmp_path)
    drafter = DraftModelDrafter.from_pretrained(tmp_path)
    settings: dict[str, Any] = {**models.prompts(lengths), "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**settings)
    assert torch.equal(target.generate(**settings, assistant_model=drafter), plain)
    assert support(drafter.draft_model) is Support.RAGGED
    assert drafter.last_stats is not None and drafter.last_stats.drafted_tokens > 0


def test_the_target_itself_as_a_draft_is_always_right(target: Any) -> None:
    drafter = DraftModelDrafter(cut(target, [0, 1, 2], torch.arange(models.VOCAB)).eval(), num_draft_tokens=4)
    target.generate(**models.prompts([7]), max_new_tokens=24, do_sample=False, assistant_model=drafter)
    assert drafter.last_stats is not None and drafter.last_stats.draft_acceptance_rate == 1


@pytest.mark.parametrize("lengths", [[7], [9, 4]])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "top_k": 5}, {"top_p": 0.8}])
def test_sampling(target: Any, draft: CutLlamaForCausalLM, lengths: list[int], settings: dict) -> None:
    drafter = DraftModelDrafter(draft, num_draft_tokens=3)
    torch.manual_seed(0)
    prompts = models.prompts(lengths)
    text = target.generate(**prompts, max_new_tokens=20, do_sample=True, assistant_model=drafter, **settings)
    new = text[:, prompts["input_ids"].shape[1] :]
    assert new.shape == (len(lengths), 20) and (new < models.VOCAB).all()
    assert drafter.last_stats is not None and drafter.last_stats.drafted_tokens > 0


@pytest.mark.parametrize("do_sample", [False, True])
def test_transformers_own_assisted_decoding(target: Any, draft: CutLlamaForCausalLM, do_sample: bool) -> None:
    settings: dict[str, Any] = {**models.prompts([7]), "max_new_tokens": 24, "do_sample": do_sample}
    text = target.generate(**settings, assistant_model=draft)
    assert text.shape == (1, 31)
    if not do_sample:
        assert torch.equal(text, target.generate(**settings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_discos_features_are_finite(target: Any, dtype: torch.dtype) -> None:
    found = logits(cut(target, [0], KNOWN).to(dtype).eval())[0]
    read = features(found, torch.zeros(len(found), dtype=torch.long), range(len(found)), [-1] * len(found), 4)
    known = found[:, KNOWN].float().softmax(-1)
    assert read.isfinite().all()
    assert torch.allclose(read[:, 4], -(known * known.log()).sum(-1), atol=1e-3)


def test_disco_stops_it(target: Any, draft: CutLlamaForCausalLM) -> None:
    drafter = DiscoDrafter(draft, classifier(STOPS), rule="token", tau=0.3)
    settings: dict[str, Any] = {**models.prompts([7, 4]), "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(target.generate(**settings, assistant_model=drafter), target.generate(**settings))
