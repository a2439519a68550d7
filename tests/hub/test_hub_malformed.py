"""Whatever is wrong with a repo: one `SpeculationError` that names the file and the fix; nothing is run or written."""

import importlib.util
import json
import math
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hub_tools import tiny_ngram
from huggingface_hub.dataclasses import strict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_specdec import Drafter, DraftModelDrafter, SpeculationError
from hf_specdec.config import DrafterConfig
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.hub import registry
from hf_specdec.hub.files import MAX_JSON_BYTES
from hf_specdec.protocol import DraftContext
from hf_specdec.session import DraftSession

torch.set_num_threads(1)

Spoil = Callable[[Path], Any]
Cases = dict[str, tuple[Spoil, str, str]]


@strict
@dataclass(kw_only=True)
class WeightedConfig(DrafterConfig):
    drafter_type: ClassVar[str] = "weighted"
    size: int = 4


class WeightedDrafter(Drafter):
    """A drafter with one weight."""

    config_class = WeightedConfig
    config: WeightedConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.table = torch.zeros(self.config.size)

    def weights(self) -> dict[str, Tensor]:
        return {"table": self.table}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.table = weights["table"]

    def start(self, context: DraftContext) -> DraftSession:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def weighted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._drafters, "weighted", WeightedDrafter)


def tiny_model(seed: int = 0, **sizes: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1} | sizes
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=1, num_key_value_heads=1, **shape)).eval()


def edit(path: Path, **changes: Any) -> None:
    """Change entries of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "ran")


def edited(name: str = "config.json", **changes: Any) -> Spoil:
    return lambda folder: edit(folder / name, **changes)


def holding(name: str, content: bytes | str) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def pickled(name: str) -> Spoil:
    return lambda folder: (folder / name).write_bytes(pickle.dumps(Trap(folder / "ran")))


def stored(name: str = "model.safetensors", **tensors: Tensor) -> Spoil:
    return lambda folder: save_file(tensors, folder / name)


def spoilt(name: str, value: float) -> Spoil:
    """One value of a floating weight."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / name)
        next(t for t in tensors.values() if t.is_floating_point()).view(-1)[0] = value
        save_file(tensors, folder / name, metadata={"format": "pt"})

    return spoil


def gone(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def cut(name: str) -> Spoil:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-3])


def linked(name: str) -> Spoil:
    """Move the file or folder out, and leave a link."""

    def spoil(folder: Path) -> None:
        outside = folder.parent / "outside"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)

    return spoil


def replaced(name: str, by: Callable[[Path], Any]) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        by(folder / name)

    return spoil


def beside(folder: Path) -> Path:
    """Move the draft model out, to a folder beside, and name it."""
    (folder / "draft_model").rename(folder.parent / "beside")
    edit(folder / "config.json", draft_model={"path": "../beside"})
    return folder.parent / "beside"


def beside_links_out(folder: Path) -> None:
    outside = folder.parent.parent / f"{folder.parent.name}-outside"
    (named := beside(folder)).rename(outside)
    named.symlink_to(outside)


def beside_weights_link_out(folder: Path) -> None:
    (weights := beside(folder) / "model.safetensors").rename(folder.parent / "weights")
    weights.symlink_to(folder.parent / "weights")


def beside_pickled(folder: Path) -> None:
    pickled("pytorch_model.bin")(beside(folder))


HUGE = json.dumps({"table": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 16]}}).encode()
HUGE = struct.pack("<Q", len(HUGE)) + HUGE + bytes(16)

NAN = torch.tensor([0, math.nan, 0, 0])
INF = torch.tensor([0, 0, math.inf, 0])

# What is done to a good folder, the file that the message must name, and what it must say.
PLAIN: Cases = {
    "no config": (gone("config.json"), "config.json", "missing"),
    "not JSON": (holding("config.json", "{'a': 1}"), "config.json", "not plain JSON"),
    "not text": (holding("config.json", b"\xff\xfe\x00"), "config.json", "not plain JSON"),
    "JSON too deep": (holding("config.json", "[" * 100_000), "config.json", "not plain JSON"),
    "JSON list": (holding("config.json", "[]"), "config.json", "object"),
    "NaN": (holding("config.json", '{"max_match": NaN}'), "config.json", "NaN"),
    "key twice": (holding("config.json", '{"a": 1, "a": 2}'), "config.json", "twice"),
    "config too large": (holding("config.json", b" " * (MAX_JSON_BYTES + 1)), "config.json", "bytes"),
    "no type": (edited(drafter_type=None), "config.json", "drafter_type"),
    "a model's config": (edited(drafter_type=None, model_type="llama"), "config.json", "assistant_model"),
    "unknown type": (edited(drafter_type="oracle"), "config.json", "prompt_lookup"),
    "python path as type": (edited(drafter_type="os.system"), "config.json", "import path"),
    "type is a list": (edited(drafter_type=["weighted"]), "config.json", "known: "),
    "unknown key": (edited(gamma=3), "config.json", "gamma"),
    "auto_map": (edited(auto_map={"Drafter": "x.Y"}), "config.json", "auto_map"),
    "wrong type of option": (edited(max_match="many"), "config.json", "max_match"),
    "option out of range": (edited(max_draft_tokens=0), "config.json", "max_draft_tokens must be from 1 to 512, got 0"),
    "endless option": (edited(max_match=10**30), "config.json", "max_match must be from 1 to 256"),
    "no format version": (edited(format_version=None), "config.json", "format_version"),
    "newer format version": (edited(format_version=2), "config.json", "upgrade"),
    "format version is a text": (edited(format_version="1"), "config.json", "must be 1"),
    "library version is a number": (edited(hf_specdec_version=1), "config.json", "string"),
    "target is a text": (edited(target="llama"), "config.json", "target"),
    "unknown entry in target": (edited(target={"size": 1}), "config.json", "vocab_size"),
    "wrong type in target": (edited(target={"vocab_size": "1"}), "config.json", "int"),
    "draft model not wanted": (edited(draft_model={"subfolder": "d"}), "config.json", "without a model"),
    "weights not wanted": (stored(a=torch.zeros(1)), "model.safetensors", "no weights"),
    "pickle beside": (pickled("pytorch_model.bin"), "pytorch_model.bin", "pickle"),
    "config links out": (linked("config.json"), "config.json", "symbolic link"),
    "config links nowhere": (replaced("config.json", lambda path: path.symlink_to("/nowhere")), "config.json", "link"),
    "config links to itself": (
        replaced("config.json", lambda path: path.symlink_to("config.json")),
        "config.json",
        "leads nowhere",
    ),
    "config is a folder": (replaced("config.json", Path.mkdir), "config.json", "regular file"),
    "config is a pipe": (replaced("config.json", os.mkfifo), "config.json", "regular file"),
}

WEIGHTED: Cases = {
    "no weights": (gone("model.safetensors"), "model.safetensors", "missing"),
    "missing weight": (stored(), "model.safetensors", "lacks"),
    "unexpected weight": (stored(table=torch.zeros(4), more=torch.zeros(1)), "model.safetensors", "more"),
    "wrong shape": (stored(table=torch.zeros(5)), "model.safetensors", "[4]"),
    "wrong dtype": (stored(table=torch.zeros(4, dtype=torch.int64)), "model.safetensors", "F32"),
    "truncated": (cut("model.safetensors"), "model.safetensors", "not a whole"),
    "empty file": (holding("model.safetensors", b""), "model.safetensors", "not a whole"),
    "huge declared shape": (holding("model.safetensors", HUGE), "model.safetensors", "not a whole"),
    "huge header": (holding("model.safetensors", struct.pack("<Q", 1 << 60)), "model.safetensors", "not a whole"),
    "huge option": (edited(size=1 << 45), "model.safetensors", str(1 << 45)),
    "negative option": (edited(size=-1), "config.json", "sizes"),
    "a pickle by another name": (pickled("model.safetensors"), "model.safetensors", "not a whole"),
    "weights hold NaN": (stored(table=NAN), "model.safetensors", "table holds NaN"),
    "weights hold infinity": (stored(table=-INF), "model.safetensors", "table holds NaN or infinite"),
    "weights link out": (linked("model.safetensors"), "model.safetensors", "symbolic link"),
}

DRAFT, DRAFT_WEIGHTS = "draft_model/config.json", "draft_model/model.safetensors"
OTHER = {"repo_id": "org/x", "revision": "main"}
GENERATION = "draft_model/generation_config.json"
WINDOWED = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
CODE = {"model_type": "oracle", "auto_map": {"AutoConfig": "trap.Config"}}
DRAFTED: Cases = {
    "draft model not named": (edited(draft_model=None), "config.json", "draft_model"),
    "path upwards": (edited(draft_model={"subfolder": "../other"}), "config.json", "inside the repo"),
    "absolute path": (edited(draft_model={"subfolder": "/etc"}), "config.json", "inside the repo"),
    "backslashes": (edited(draft_model={"subfolder": "..\\up"}), "config.json", "inside the repo"),
    "draft model from a branch": (edited(draft_model=OTHER), "config.json", "commit hash"),
    "two places": (edited(draft_model={"path": "../x", "subfolder": "d"}), "config.json", "subfolder"),
    "a branch, and a folder in it": (edited(draft_model=OTHER | {"subfolder": "d"}), "config.json", "commit hash"),
    "a folder out of a repo": (
        edited(draft_model={"repo_id": "org/x", "revision": "0" * 40, "subfolder": "../d"}),
        "config.json",
        "inside the repo",
    ),
    "beside: two up": (edited(draft_model={"path": "../../drafter/draft_model"}), "config.json", "inside the repo"),
    "beside: up and up again": (edited(draft_model={"path": "../x/../../etc"}), "config.json", "inside the repo"),
    "beside: absolute": (edited(draft_model={"path": "/etc"}), "config.json", "beside this one"),
    "beside: absolute, further down": (edited(draft_model={"path": "..//etc"}), "config.json", "inside the repo"),
    "beside: not up": (edited(draft_model={"path": "draft_model"}), "config.json", "beside this one"),
    "beside: the parent itself": (edited(draft_model={"path": "../"}), "config.json", "inside the repo"),
    "beside: no text": (edited(draft_model={"path": ["..", "x"]}), "config.json", "beside this one"),
    "beside: backslashes": (edited(draft_model={"path": "..\\x"}), "config.json", "beside this one"),
    "beside: nothing there": (edited(draft_model={"path": "../elsewhere"}), "elsewhere", "missing"),
    "beside: links out": (beside_links_out, "beside", "link"),
    "beside: its weights link out": (beside_weights_link_out, "model.safetensors", "symbolic link"),
    "beside: a pickle": (beside_pickled, "pytorch_model.bin", "pickle"),
    "no such folder": (edited(draft_model={"subfolder": "elsewhere"}), "elsewhere", "missing"),
    "folder links out": (linked("draft_model"), "draft_model", "link"),
    "draft weights link out": (linked(DRAFT_WEIGHTS), DRAFT_WEIGHTS, "symbolic link"),
    "pickled draft": (pickled("draft_model/pytorch_model.bin"), "pytorch_model.bin", "pickle"),
    "draft without weights": (gone(DRAFT_WEIGHTS), DRAFT_WEIGHTS, "missing"),
    "truncated draft": (cut(DRAFT_WEIGHTS), DRAFT_WEIGHTS, "not a whole"),
    "draft lacks weights": (stored(DRAFT_WEIGHTS, extra=torch.zeros(9999, 1)), "draft_model", "missing"),
    "draft of integers": (stored(DRAFT_WEIGHTS, a=torch.zeros(9).long()), "draft_model", "floating"),
    "huge draft vocabulary": (edited(DRAFT, vocab_size=1 << 45), DRAFT, "parameters"),
    "huge quantized draft": (
        edited(DRAFT, vocab_size=1 << 45, quantization_config={"quant_method": "fp8"}),
        DRAFT,
        "parameters",
    ),
    "endless draft layers": (edited(DRAFT, num_hidden_layers=1 << 45), DRAFT, "layers"),
    "draft of unknown type": (edited(DRAFT, model_type="oracle"), DRAFT, "oracle"),
    "draft with its own code": (edited(DRAFT, **CODE), DRAFT, "trust_remote_code"),
    "draft weights hold NaN": (spoilt(DRAFT_WEIGHTS, math.nan), "draft_model", "holds NaN"),
    "draft weights hold infinity": (spoilt(DRAFT_WEIGHTS, math.inf), "draft_model", "NaN or infinite"),
    "generation config is a list": (holding(GENERATION, "[]"), GENERATION, "object"),
    "generation config is not JSON": (holding(GENERATION, "{"), GENERATION, "not plain JSON"),
    "generation config too large": (holding(GENERATION, b" " * (MAX_JSON_BYTES + 1)), GENERATION, "bytes"),
    "generation config links to itself": (
        replaced(GENERATION, lambda path: path.symlink_to(path.name)),
        GENERATION,
        "leads nowhere",
    ),
    "draft with a window of one token": (edited(DRAFT, **WINDOWED, sliding_window=1), DRAFT, "sliding_window is 1"),
    "draft with a window of none": (edited(DRAFT, **WINDOWED, sliding_window=0), DRAFT, "sliding_window is 0"),
    "draft with an endless window": (edited(DRAFT, **WINDOWED, sliding_window=10**30), DRAFT, "sliding_window is"),
    "an adapter": (holding("draft_model/adapter_config.json", "{}"), "adapter_config.json", "merge"),
    "shards elsewhere": (
        holding(f"{DRAFT_WEIGHTS}.index.json", '{"weight_map": {"a": "../../model.safetensors"}}'),
        "index.json",
        "same folder",
    ),
}

QUANTIZED: dict[str, dict[str, Any]] = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "gptqmodel": {"quant_method": "awq", "bits": 4},
    "torchao": {"quant_method": "torchao"},
}
for library, quantization in QUANTIZED.items():
    if importlib.util.find_spec(library) is None:
        spoil = edited(DRAFT, quantization_config=quantization)
        DRAFTED[f"draft quantized by {library}, which is not there"] = (spoil, DRAFT, "not installed")
DRAFTED["quantization by a list"] = (
    edited(DRAFT, quantization_config={"quant_method": ["a"]}),
    DRAFT,
    "could not be loaded",
)

GROUPS: dict[str, tuple[Callable[[], Drafter], Cases]] = {
    "plain": (PromptLookupDrafter, PLAIN),
    "weighted": (WeightedDrafter, WEIGHTED),
    "drafted": (lambda: DraftModelDrafter(tiny_model()), DRAFTED),
}
CASES = [(group, case) for group, (_, cases) in GROUPS.items() for case in cases]


def everything_below(folder: Path) -> dict[str, bytes | None]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.parametrize("group", GROUPS)
def test_the_good_folder_loads(group: str, tmp_path: Path) -> None:
    make, _ = GROUPS[group]
    drafter = make()
    drafter.save_pretrained(tmp_path)
    assert type(Drafter.from_pretrained(tmp_path)) is type(drafter)


@pytest.mark.parametrize(("group", "case"), CASES, ids=[f"{g}: {c}" for g, c in CASES])
def test_a_malformed_folder_is_refused(group: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, cases = GROUPS[group]
    spoil, file, reason = cases[case]
    folder = tmp_path / "drafter"
    make().save_pretrained(folder)
    spoil(folder)
    monkeypatch.chdir(tmp_path)
    before = everything_below(tmp_path)
    with pytest.raises(SpeculationError) as refusal:
        Drafter.from_pretrained(folder)
    message = str(refusal.value)
    assert file in message
    assert reason in message
    assert everything_below(tmp_path) == before


@pytest.mark.parametrize("name", ["", 3, None, "no/such/folder/here", "../no-such-folder", "a b"])
def test_a_name_that_is_neither_folder_nor_repo(name: Any, tmp_path: Path) -> None:
    with pytest.raises(SpeculationError, match=r"folder|repo"):
        Drafter.from_pretrained(name, cache_dir=tmp_path, local_files_only=True)


@pytest.mark.parametrize("subfolder", ["..", "/etc", "a/../../b", "*"])
def test_a_subfolder_outside(subfolder: str, tmp_path: Path) -> None:
    PromptLookupDrafter().save_pretrained(tmp_path / "drafter")
    with pytest.raises(SpeculationError, match="inside the repo"):
        Drafter.from_pretrained(tmp_path / "drafter", subfolder=subfolder)


@pytest.mark.parametrize("return_dict", [False, None])
def test_a_draft_that_returns_tuples_by_its_config_drafts(return_dict: bool | None, tmp_path: Path) -> None:
    DraftModelDrafter(tiny_model()).save_pretrained(tmp_path)
    content = json.loads((tmp_path / DRAFT).read_text())
    (tmp_path / DRAFT).write_text(json.dumps(content | {"return_dict": return_dict}))
    Drafter.from_pretrained(tmp_path).check_target(tiny_model(1))


def test_damaged_tables_name_the_file(tmp_path: Path) -> None:
    tiny_ngram().save_pretrained(tmp_path)
    spoilt("model.safetensors", -0.5)(tmp_path)
    with pytest.raises(SpeculationError, match=r"model\.safetensors: n-gram weights are damaged"):
        Drafter.from_pretrained(tmp_path)


def test_there_are_enough() -> None:
    assert len(CASES) >= 25
