"""Two packages that speculate for the same models, as baselines: economize and flashspec, each as its own pages say
that it is fastest. Neither is needed for anything else: `pip install "hf-specdec[rivals]"`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import SpeculationError
from ..instruments.ends import end_tokens
from ..loading.drafters import required_draft
from .method import Method

RIVALS: dict[str, dict[str, Any]] = {
    "economize-draft": {"cycle_length": 4},
    "economize-lookup": {"cycle_length": 8},
    "economize-hybrid": {"cycle_length": 6},
    "flashspec": {"drafter_strategy": "auto"},
}
"""with their options: tokens of a round, drafts and the target's own; and which of flashspec's arms draft"""
Run = Callable[[Mapping[str, Tensor], dict[str, Any]], tuple[list[list[int]], list[tuple[int, int]]]]
"""new tokens of each row, and tokens drafted and accepted in each verification, from a call's inputs and its options"""


@dataclass
class Rival(Method):
    """Another package's way of decoding, over the same target object."""

    made: Callable[[PreTrainedModel], Run] = field(kw_only=True)
    _runs: list[Run] = field(default_factory=list)

    def generate(self, target: PreTrainedModel, inputs: Mapping[str, Any], **options: Any) -> list[list[int]]:
        if not self._runs:
            self._runs.append(self.made(target))
        rows, self.rounds = self._runs[0](inputs, options)
        return rows


def rival(spec: str, name: str, options: dict[str, Any], draft: PreTrainedModel | None) -> Rival:
    """
    Raises:
        SpeculationError: the package is not installed, or its draft model is missing or none that it can load.
    """
    package = name.partition("-")[0]
    if find_spec(package) is None:
        raise SpeculationError(f"{name} needs the package {package}; pip install 'hf-specdec[rivals]'")
    if name != "economize-lookup":
        draft = required_draft(spec, draft)
        if draft.config.model_type == "cut_llama":
            raise SpeculationError(
                f"{name} loads plain models only, and the draft knows a part of the tokens; write a plain one with "
                "`hf-specdec export FOLDER --to vllm --output PLAIN`, and pass --draft PLAIN"
            )
    make = _flashspec if package == "flashspec" else _economize
    return Rival(
        spec, draft=draft, single_row=package == "flashspec", made=lambda target: make(target, draft, name, options)
    )


def _economize(target: PreTrainedModel, draft: PreTrainedModel | None, name: str, options: dict[str, Any]) -> Run:
    import economize
    from economize.techniques.draft_model import DraftModelConfig
    from economize.techniques.hybrid import HybridConfig
    from economize.techniques.lookup import LookupConfig

    folder = "" if draft is None else draft.config.name_or_path
    technique = {
        "economize-draft": lambda: DraftModelConfig(model=folder),
        "economize-lookup": LookupConfig,
        "economize-hybrid": lambda: HybridConfig(fallback=DraftModelConfig(model=folder)),
    }[name]()
    model = economize.apply(target, technique)

    def run(inputs: Mapping[str, Tensor], wanted: dict[str, Any]) -> tuple[list[list[int]], list[tuple[int, int]]]:
        draws = bool(wanted.get("do_sample"))
        decoding = economize.DecodeConfig(**options, **{"verifier": "rejection"} if draws else {})
        sampler = economize.TopPSampler(wanted["temperature"], seed=torch.initial_seed()) if draws else None
        rows = [ids[mask.bool()] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
        most = wanted["max_new_tokens"]
        made = model.decode_batch(rows, most, decoding=decoding, selector=sampler, stop=end_tokens(target))
        return [each.tokens.tolist() for each in made], [pair for each in made for pair in each.acceptance]

    return run


def _flashspec(target: PreTrainedModel, draft: PreTrainedModel | None, _: str, options: dict[str, Any]) -> Run:
    from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import HuggingFaceDrafter, TargetModel

    assert draft is not None, "it was asked for"
    device, dtype, ends = target.device, target.dtype, tuple(end_tokens(target))
    theirs = TargetModel(target.config.name_or_path, device, dtype, model=target)
    drafter = HuggingFaceDrafter(draft.config.name_or_path, device, dtype, model=draft)
    engines: dict[float, Any] = {}

    def run(inputs: Mapping[str, Tensor], wanted: dict[str, Any]) -> tuple[list[list[int]], list[tuple[int, int]]]:
        temperature = wanted.get("temperature", 1.0) if wanted.get("do_sample") else 0.0
        if temperature not in engines:
            sampling = SamplingConfig(temperature=temperature)
            config = FlashSpecConfig(device=str(device), sampling=sampling, eos_token_ids=ends, **options)
            engines[temperature] = SpeculativeEngine(config, [drafter], theirs)
        made = engines[temperature].generate(inputs["input_ids"], max_new_tokens=wanted["max_new_tokens"])
        rounds = [(step.proposed, step.accepted) for step in made.arm_steps]
        return [made.output_ids[0, : made.n_tokens_generated].tolist()], rounds

    return run
