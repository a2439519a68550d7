"""Load a target, a draft model and their tokenizer, with errors that say which of them cannot be loaded."""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from typer import Option

from ..errors import SpeculationError
from ..instruments.padding import pad_mlps


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies, and how it is to be loaded."""

    name: str
    """a folder or Hub repo"""
    dtype: str = "bfloat16"
    device: str = "cpu"
    pad_mlp: int | None = None
    """hidden units to widen every MLP to, so that it costs more; 0 or None leaves them"""


@dataclass
class Pair:
    """A target with its tokenizer, and the model that drafts for it, if there is one."""

    tokenizer: PreTrainedTokenizerBase
    target: PreTrainedModel
    draft: PreTrainedModel | None


@dataclass(kw_only=True)
class TargetSettings:
    """What every command that loads a model is told of it. The fields of settings are a command's options."""

    target: Annotated[str, Option(help="Folder or Hub repo of the model to speed up.")]
    dtype: Annotated[str, Option(help="Of the weights: bfloat16, float16 or float32.")] = "bfloat16"
    device: Annotated[str, Option(help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one.")] = "cpu"
    threads: Annotated[int | None, Option(help="CPU threads; all where not given.")] = None

    def load(self) -> Pair:
        """The models, with torch set to the number of threads.

        Raises:
            SpeculationError: one of them cannot be loaded as asked.
        """
        if self.threads:
            torch.set_num_threads(self.threads)
        source = self._target()
        return Pair(load_tokenizer(source), load_model(source), None)

    def _target(self) -> "ModelSource":
        return ModelSource(self.target, self.dtype, self.device)


@dataclass(kw_only=True)
class PairSettings(TargetSettings):
    """What every command that loads a target and may load a draft model is told of them."""

    draft: Annotated[str | None, Option(help="Folder or Hub repo of a draft model.")] = None
    pad_target_mlp: Annotated[int | None, Option(help="Widen the target's MLPs to cost more, outputs the same.")] = None
    pad_draft_mlp: Annotated[int | None, Option(help="Widen the draft's MLPs likewise.")] = None

    def load(self) -> Pair:
        pair = super().load()
        if self.draft:
            pair.draft = load_model(ModelSource(self.draft, self.dtype, self.device, self.pad_draft_mlp))
        return pair

    def _target(self) -> "ModelSource":
        return replace(super()._target(), pad_mlp=self.pad_target_mlp)


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The model's tokenizer, padding on the left."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.name, padding_side="left")
    except (OSError, ValueError) as error:
        raise SpeculationError(f"cannot load a tokenizer from {source.name!r}: {_first_line(error)}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(source: ModelSource) -> PreTrainedModel:
    """A decoder-only model, cost-padded where asked for."""
    try:
        model = AutoModelForCausalLM.from_pretrained(source.name, dtype=torch_dtype(source.dtype))
    except (OSError, ValueError) as error:
        raise SpeculationError(f"cannot load a model from {source.name!r}: {_first_line(error)}") from error
    if source.pad_mlp:
        pad_mlps(model, source.pad_mlp)
    return model.to(source.device).eval()


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of that name.

    Raises:
        SpeculationError: there is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SpeculationError(f"dtype must be a torch dtype such as bfloat16 or float32, got {name!r}")
    return dtype


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
