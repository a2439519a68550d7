"""What the repository carries is light: files have limits, and weights are stored as float8, to be read as bfloat16."""

import subprocess
from pathlib import Path

import pytest
import torch
from hub_tools import ROOT, drafter_of, generate, tiny_model
from laboratory import script
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_specdec import Drafter, DraftModelDrafter, SpeculationError

lighten = script("lighten")
WEIGHTS = "model.safetensors"
CHECKOUT, FILE = 40 << 20, 13_000_000
"""bytes of all files that git knows, and of the largest"""


def test_a_checkout_is_light() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    files = [ROOT / name for name in listed.stdout.decode().split("\0")[:-1]]
    sizes = {str(file): file.lstat().st_size for file in files if file.exists()}
    assert max(sizes.values()) < FILE, max(sizes, key=lambda file: sizes[file])
    assert sum(sizes.values()) < CHECKOUT


def light(folder: Path) -> dict[str, Tensor]:
    """Lighten what is stored there; the tensors of the file afterwards."""
    lighten.main(folder)
    return load_file(folder / WEIGHTS)


def test_matrices_are_rounded_and_all_else_is_kept(tmp_path: Path) -> None:
    matrix = torch.randn(6, 5).bfloat16()
    kept = {"norm": torch.randn(5).bfloat16(), "table": torch.arange(6)[None], "float32": torch.randn(6, 5)}
    save_file({"matrix": matrix, **kept}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    stored = light(tmp_path)
    assert torch.equal(stored.pop("matrix").float(), matrix.to(torch.float8_e4m3fn).float())
    assert stored.keys() == kept.keys()
    assert all(stored[name].dtype == kept[name].dtype and torch.equal(stored[name], kept[name]) for name in kept)


@pytest.mark.parametrize("dtype", ["auto", torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device_map", [None, "cpu"])
def test_a_light_draft_is_read_as_what_was_asked_for(dtype: object, device_map: str | None, tmp_path: Path) -> None:
    DraftModelDrafter(tiny_model(seed=1).bfloat16()).save_pretrained(tmp_path)
    stored = light(tmp_path / "draft_model")
    assert stored["lm_head.weight"].dtype == torch.float8_e4m3fn
    drafter = Drafter.from_pretrained(tmp_path, dtype=dtype, device_map=device_map)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "draft_model", dtype=dtype, device_map=device_map)
    for model in (drafter.draft_model, plain):  # type: ignore[attr-defined]
        assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16 if dtype == "auto" else dtype}
        assert all(torch.equal(weight.float(), stored[name].float()) for name, weight in model.named_parameters())
    target = tiny_model()
    assert generate(target, assistant_model=drafter) == generate(target)


def test_light_streams_are_read_as_bfloat16(tmp_path: Path) -> None:
    drafter_of("streaming").save_pretrained(tmp_path)
    stored = light(tmp_path)
    assert stored["embeddings"].dtype == torch.float8_e4m3fn
    for name, weight in Drafter.from_pretrained(tmp_path).weights().items():
        assert weight.dtype == (torch.bfloat16 if weight.is_floating_point() else torch.long)
        assert torch.equal(weight.float(), stored[name].float())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda weight: weight.to(torch.float8_e5m2), r"embeddings is F8_E5M2\[2, 8\].*must be BF16\[2, 8\]"),
        (lambda weight: weight.to(torch.float8_e4m3fn)[:1], r"embeddings is F8_E4M3\[1, 8\].*must be BF16\[2, 8\]"),
        (lambda weight: (weight + torch.nan).to(torch.float8_e4m3fn), "embeddings holds NaN"),
    ],
)
def test_no_other_float8_is_taken_for_it(changed: object, said: str, tmp_path: Path) -> None:
    drafter_of("streaming").save_pretrained(tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    save_file(weights | {"embeddings": changed(weights["embeddings"])}, tmp_path / WEIGHTS)  # type: ignore[operator]
    with pytest.raises(SpeculationError, match=said):
        Drafter.from_pretrained(tmp_path)


def test_float32_weights_are_stored_as_they_are(tmp_path: Path) -> None:
    drafter_of("disco").save_pretrained(tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    save_file({name: weight.to(torch.float8_e4m3fn) for name, weight in weights.items()}, tmp_path / WEIGHTS)
    with pytest.raises(SpeculationError, match=r"is F8_E4M3.*must be F32"):
        Drafter.from_pretrained(tmp_path)
