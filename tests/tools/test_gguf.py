"""GGUF files are converted once and whole; a short name is the file of a package, or a repo of the Hub."""

import os
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from models import SIZES, llama
from transformers import AutoModelForCausalLM, GgufConfig
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.errors import SpeculationError
from hf_specdec.tools.loading import gguf, names
from hf_specdec.tools.loading.models import TargetSettings, load_model, load_tokenizer
from hf_specdec.tools.loading.names import NAMES, whole_name

writer = pytest.importorskip("gguf")

TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write(path: Path, model: Any) -> Path:
    """A GGUF file of a tiny Llama, its tokens letters and pairs of them."""
    out = writer.GGUFWriter(path, "llama")
    out.add_context_length(512)
    out.add_embedding_length(SIZES["hidden_size"])
    out.add_block_count(SIZES["num_hidden_layers"])
    out.add_feed_forward_length(SIZES["intermediate_size"])
    out.add_head_count(SIZES["num_attention_heads"])
    out.add_head_count_kv(SIZES["num_key_value_heads"])
    out.add_rope_dimension_count(SIZES["head_dim"])
    out.add_layer_norm_rms_eps(1e-6)
    letters = "abcdefghi"
    tokens = ["<s>", "</s>", *letters, *(x + y for x in letters for y in letters)]
    tokens += [f"<{i}>" for i in range(len(tokens), SIZES["vocab_size"])]
    out.add_vocab_size(len(tokens))
    out.add_tokenizer_model("gpt2")
    out.add_token_list(tokens)
    out.add_token_types([1] * len(tokens))
    out.add_token_merges([f"{x} {y}" for x in letters for y in letters])
    out.add_bos_token_id(0)
    out.add_eos_token_id(1)
    weights = model.state_dict()
    pairs = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for i in range(SIZES["num_hidden_layers"]):
        pairs |= {f"blk.{i}.{theirs}": f"model.layers.{i}.{ours}" for theirs, ours in TENSORS.items()}
    for theirs, ours in pairs.items():
        out.add_tensor(f"{theirs}.weight", weights[f"{ours}.weight"].numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache of its own."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "hf_specdec" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", llama())


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dtypes that files were converted to."""
    made: list[str] = []
    convert = gguf._convert

    def counted(file: Path, dtype: str, folder: Path) -> None:
        made.append(dtype)
        convert(file, dtype, folder)

    monkeypatch.setattr(gguf, "_convert", counted)
    return made


def test_a_file_is_converted_once(file: Path, conversions: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sources = [
        TargetSettings(target=str(file), dtype="fp32"),
        TargetSettings(target=str(file.parent), dtype="fp32", gguf_file="tiny.gguf"),
    ]
    models = [load_model(source) for source in sources]
    tokenizer = load_tokenizer(sources[0])
    said = capsys.readouterr().err
    assert conversions == ["float32"] and said.count("converting tiny.gguf to float32, once") == 1
    plain = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    ids = torch.tensor([tokenizer("abcde")["input_ids"]])
    for model in models:
        assert model.dtype == torch.float32 and torch.equal(model(ids).logits, plain(ids).logits)
    assert torch.equal(models[0].lm_head.weight, llama().lm_head.weight)
    assert tokenizer.decode(ids[0]) == "abcde" and tokenizer.padding_side == "left"
    assert tokenizer.pad_token in ("<s>", "</s>")  # releases of transformers differ in which


def test_each_dtype_and_each_content_is_converted_by_itself(file: Path, conversions: list[str]) -> None:
    assert load_model(TargetSettings(target=str(file), dtype="fp32")).dtype == torch.float32
    assert load_model(TargetSettings(target=str(file), dtype="bf16")).dtype == torch.bfloat16
    before = file.stat()
    write(file, llama(seed=1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size  # told by what it holds alone
    again = load_model(TargetSettings(target=str(file), dtype="fp32"))
    assert torch.equal(again.lm_head.weight, llama(seed=1).lm_head.weight)
    assert conversions == ["float32", "bfloat16", "float32"]


def test_one_content_is_converted_once_wherever_it_lies(file: Path, cache: Path, conversions: list[str]) -> None:
    other = file.parent / "elsewhere" / "another_name.gguf"
    other.parent.mkdir()
    shutil.copy(file, other)
    os.utime(other, ns=(1, 1))
    assert (
        load_model(TargetSettings(target=str(file), dtype="fp32")).name_or_path
        == load_model(TargetSettings(target=str(other), dtype="fp32")).name_or_path
    )
    assert conversions == ["float32"] and len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("No space left on device")])
def test_an_interruption_leaves_nothing(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    convert = gguf._convert

    def interrupted(file: Path, dtype: str, folder: Path) -> None:
        convert(file, dtype, folder)
        raise error

    monkeypatch.setattr(gguf, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else SpeculationError):
        load_model(TargetSettings(target=str(file), dtype="fp32"))
    assert not list(cache.iterdir())
    monkeypatch.setattr(gguf, "_convert", convert)
    load_model(TargetSettings(target=str(file), dtype="fp32"))
    assert [path.name.endswith("-float32") for path in cache.iterdir()] == [True]


def test_two_at_once_are_one(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = gguf._convert

    def overtaken(file: Path, dtype: str, folder: Path) -> None:
        convert(file, dtype, folder)
        monkeypatch.setattr(gguf, "_convert", convert)
        gguf.converted(file, dtype)

    monkeypatch.setattr(gguf, "_convert", overtaken)
    assert gguf.converted(file, "float32").is_dir() and len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target", "FOLDER/none.gguf"], "there is no GGUF file"),
        (["--target", "FOLDER", "--gguf-file", "none.gguf"], "cannot find gguf_file 'none.gguf'"),
        (["--target", "FOLDER/tiny.gguf", "--gguf-file", "tiny.gguf"], "is a GGUF file already"),
        (["--target", "FOLDER/torn.gguf"], "cannot convert"),
        (["--target", "FOLDER/empty.gguf"], "cannot convert"),
    ],
)
def test_bad_files_are_one_line(file: Path, cache: Path, more: list[str], message: str) -> None:
    (file.parent / "torn.gguf").write_bytes(file.read_bytes()[:2000])
    (file.parent / "empty.gguf").write_bytes(b"")
    arguments = [word.replace("FOLDER", str(file.parent)) for word in more]
    result = CliRunner().invoke(app, ["generate", "--prompt", "abc", "--dtype", "fp32", *arguments])
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert message in result.stderr.splitlines()[-1] and not (cache.exists() and list(cache.iterdir()))


def test_it_says_which_package_is_missing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(*args: Any) -> None:
        raise ImportError("Please install torch and gguf>=0.10.0")

    monkeypatch.setattr(gguf, "_convert", convert)
    with pytest.raises(SpeculationError, match=r"needs the package gguf; pip install 'hf-specdec\[gguf\]'"):
        load_model(TargetSettings(target=str(file), dtype="fp32"))


def test_a_short_name_is_an_installed_file_or_a_repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = NAMES["smollm2"]
    spec = ModuleSpec(known.package, None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(names, "find_spec", {known.package: spec}.get)
    assert whole_name("smollm2") == known.repo  # the package is there, its file is not
    (tmp_path / known.file).touch()
    assert whole_name("smollm2") == str(tmp_path / known.file)
    monkeypatch.setattr(names, "find_spec", lambda name: None)
    assert whole_name("smollm2") == known.repo
    assert whole_name("org/model") == "org/model"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert whole_name("smollm2") == "smollm2"  # a folder of one's own


def test_a_short_name_loads_without_importing_its_package(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = NAMES["smollm2"]
    package = file.parent / known.package
    package.mkdir()
    (package / "__init__.py").write_text("import a_package_that_is_not_installed")
    file.rename(package / known.file)
    monkeypatch.syspath_prepend(file.parent)
    assert known.package not in sys.modules
    pair = TargetSettings(target="smollm2", dtype="fp32").load()
    assert pair.target.config.name_or_path == pair.tokenizer.name_or_path == known.repo
    assert torch.equal(pair.target.lm_head.weight, llama().lm_head.weight) and known.package not in sys.modules
