"""Packed layers: the same model to everybody, only faster."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from models import VOCAB, build, llama, prompts
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_specdec import DraftModelDrafter, SpeculationError, pack_linear, unpack_linear
from hf_specdec.cli import app
from hf_specdec.target.devices import cpu_capabilities, cpu_dtype
from hf_specdec.target.packing import PackedLinear
from hf_specdec.tools.loading.drafters import load_drafter, own_model
from hf_specdec.tools.loading.models import PairSettings, TargetSettings, load_model

LAYERS = 2 * 7 + 1


@torch.no_grad()
def logits(model: nn.Module, width: int = 5) -> torch.Tensor:
    return model(torch.arange(2, 2 + width)[None]).logits


@pytest.mark.parametrize("width", [1, 2, 5, 40])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "GPT-NeoX", "OPT", "Mixtral"])  # with biases and without
def test_outputs_are_the_same_within_rounding(name: str, width: int) -> None:
    model = build(name)
    plain = logits(model, width)
    assert pack_linear(model) > 1
    torch.testing.assert_close(logits(model, width), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(cpu_dtype(cpu_capabilities()) != "bfloat16", reason="the CPU multiplies no bfloat16")
@pytest.mark.parametrize("width", [1, 2, 5, 40])
def test_bfloat16_is_packed_where_the_cpu_multiplies_it(width: int) -> None:
    model = llama().to(torch.bfloat16)
    plain = logits(model, width)
    assert pack_linear(model) == LAYERS
    torch.testing.assert_close(logits(model, width), plain, rtol=0.05, atol=0.05)
    assert model.lm_head.packing.kept is not None


def test_layers_are_packed_once_and_back() -> None:
    model = llama()
    before, plain = {name: value.clone() for name, value in model.state_dict().items()}, logits(model)
    assert pack_linear(model) == LAYERS and pack_linear(model) == 0
    logits(model)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert type(model.lm_head) is PackedLinear and model.lm_head.packing.kept is not None
    assert unpack_linear(model) == LAYERS and unpack_linear(model) == 0
    assert type(model.lm_head) is nn.Linear and not hasattr(model.lm_head, "packing")
    assert torch.equal(logits(model), plain)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    pack_linear(model)
    packed = logits(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    torch.testing.assert_close(logits(loaded), packed, rtol=1e-4, atol=1e-4)


def test_new_weights_are_packed_anew() -> None:
    model, other = llama(), llama(seed=1)
    pack_linear(model)
    logits(model)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(logits(model), logits(other), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert not logits(model).any()
    model.lm_head.weight = nn.Parameter(torch.ones_like(model.lm_head.weight))
    assert logits(model).any()


def test_gradients_are_the_plain_layers() -> None:
    model, plain = llama(), llama()
    pack_linear(model)
    logits(model)
    ids = torch.arange(2, 9)[None]
    for each in (model, plain):
        each(ids, labels=ids).loss.backward()
    gradients = [dict(each.named_parameters())["model.layers.0.mlp.up_proj.weight"].grad for each in (model, plain)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_packs_for_itself(copied) -> None:
    model = llama()
    pack_linear(model)
    packed = logits(model)
    other = copied(model)
    assert type(other.lm_head) is PackedLinear and other.lm_head.packing.kept is None
    assert torch.equal(logits(other), packed)


def test_moved_models_and_autocast_go_the_plain_way() -> None:
    model, plain = llama(), llama()
    pack_linear(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert logits(model).dtype == logits(plain).dtype == torch.bfloat16
    logits(model)
    assert torch.equal(logits(model.to(torch.float64)), logits(plain.to(torch.float64)))


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (0, 8)])
def test_any_shape_goes_through(shape: tuple[int, ...]) -> None:
    layer = nn.Linear(8, 5)
    x = torch.randn(*shape)
    with torch.inference_mode():
        plain, strided = layer(x), layer(x.flip(-1).flip(-1))
        pack_linear(layer)
        torch.testing.assert_close(layer(x), plain)
        torch.testing.assert_close(layer(x.flip(-1).flip(-1)), strided)
        inner = nn.Linear(8, 5)  # made here, its weight counts no versions
        expected = inner(x)
        pack_linear(inner)
        torch.testing.assert_close(inner(x), expected)


def test_speculation_over_packed_models_writes_what_they_write_alone() -> None:
    target, draft = llama(), llama(num_hidden_layers=1)
    for model in (target, draft):
        pack_linear(model)
    inputs = prompts([4, 9], VOCAB)
    plain = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    drafter = DraftModelDrafter(draft, num_draft_tokens=3)
    assert torch.equal(plain, target.generate(**inputs, max_new_tokens=24, do_sample=False, assistant_model=drafter))


def test_what_cannot_be_packed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpeculationError, match=r"needs weights on the CPU in float32.*, got float16 on cpu; load"):
        pack_linear(llama().to(torch.float16))
    with pytest.raises(SpeculationError, match="got float32 on meta"):
        pack_linear(nn.Linear(2, 2, device="meta"))
    with pytest.raises(SpeculationError, match=r"finds no nn\.Linear in Embedding"):
        pack_linear(nn.Embedding(2, 2))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(SpeculationError, match="oneDNN"):
        pack_linear(llama())


def test_it_is_an_option_of_loading(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    assert (
        type(load_model(TargetSettings(target=str(tmp_path), dtype="fp32", pack_linear=True)).lm_head) is PackedLinear
    )
    assert type(load_model(TargetSettings(target=str(tmp_path), dtype="fp32")).lm_head) is nn.Linear
    arguments = ["generate", "--target", "tests/pair/target", "--prompt", "def", "--max-new-tokens", "4"]
    result = CliRunner().invoke(app, [*arguments, "--dtype", "fp16", "--pack-linear"])
    assert result.exit_code == 2 and "got float16" in result.stderr
    assert CliRunner().invoke(app, [*arguments, "--dtype", "fp32", "--pack-linear"]).exit_code == 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_drafters_own_draft_is_loaded_as_the_target_is(packed: bool) -> None:
    settings = PairSettings(target="tests/pair/target", device="cpu", dtype="float64", pack_linear=packed)
    loading = settings.of_drafts() | ({"dtype": "float32"} if packed else {})
    model = own_model(load_drafter("tests/pair/hybrid", None, **loading))
    assert model is not None and model.dtype is (torch.float32 if packed else torch.float64)
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {PackedLinear if packed else nn.Linear}
