"""`StreamingDrafter`: the target drafts for itself, by streams in its upper layers (Bhendawade 2024)."""

import hashlib
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...budget import MOST_NODES, Acceptance, Controller
from ...errors import SpeculationError
from ...hub.registry import register_drafter
from ...protocol import DraftContext
from ...target.capturable import is_captured
from ...target.devices import input_device
from ...target.remembered import Copied, Remembered
from ...transfer import waits
from ..base import Drafter
from ..prompt_lookup import PromptLookupConfig
from ..sources import Copies, Recycled, Source
from ..trees import TreeSession
from .config import StreamingConfig
from .late import OwnLayers, own_layers
from .steps import StreamSteps
from .streams import Streams, write_lora
from .upper import Upper

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MARK = "tuned_with_streams"
"""field of a tuned target's config: which streams it was trained with"""
BRANCHES = 3
"""copies of earlier text that join the streams' tree"""
SUCCESSORS = 4
"""recycled candidates that are remembered behind each token"""


@register_drafter
class StreamingDrafter(Drafter):
    """Streams for one target, made by `hf-specdec train streaming`."""

    config_class = StreamingConfig
    config: StreamingConfig
    proposes_trees = brings_runner = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        prune_below = self.config.prune_below
        if prune_below and self.config.prune_rank == 0:
            raise SpeculationError(
                f"prune_below must be 0 for streams without a pruning map (prune_rank=0), got {prune_below}"
            )
        self.streams = Streams(self.config).to(torch.bfloat16).requires_grad_(False)
        self.trained = False
        """whether its weights have been loaded or learned"""
        self._fitted: Remembered[Copied[Streams]] = Remembered(numbers=False, most=1)
        self._owned: Remembered[Copied[OwnLayers]] = Remembered(numbers=False, most=1)
        self.recordable = not prune_below  # which nodes are pruned is asked in mid-forward

    def weights(self) -> dict[str, Tensor]:
        return dict(self.streams.state_dict())

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.streams.load_state_dict(weights)
        self.trained = True

    def check_target(self, target: "PreTrainedModel") -> None:
        if not self.trained:
            raise SpeculationError(
                "speculation_type='streaming' needs trained streams; train them with `hf-specdec train "
                "streaming` and pass them as assistant_model=Drafter.from_pretrained(folder) or "
                "speculation={'drafter': folder}"
            )
        self._check_fit(target)
        self._check_tuned(target)

    def _check_fit(self, target: "PreTrainedModel") -> None:
        size = target.config.get_text_config(decoder=True).hidden_size
        if size != self.config.hidden_size:
            raise SpeculationError(
                f"these streams were trained for hidden states of size {self.config.hidden_size}, and the "
                f"target's have size {size}; use the target they were trained for, or train others with "
                "`hf-specdec train streaming`"
            )
        upper = Upper(target, self.config.num_layers)
        for name, (size, out) in self.config.adapted.items():
            for layer in upper.layers:
                try:
                    linear: Any = layer.get_submodule(name)
                    found = [linear.in_features, linear.out_features]
                except AttributeError:
                    found = []
                if found != [size, out]:
                    raise SpeculationError(
                        f"these streams adapt a linear layer {name} of sizes {[size, out]}, and the target's upper "
                        f"layers have {found or 'none of this name'}; use the target they were trained for"
                    )
        if upper.head.weight.is_meta:
            raise SpeculationError(
                "streams need the target's output head in memory, and it is offloaded; place it on a device"
            )
        vocab = upper.head.out_features
        if (
            len(known := self.streams.known)
            and not known.is_meta
            and not 0 <= int(known.min()) <= int(known.max()) < vocab
        ):
            raise SpeculationError(
                f"these streams know token ids up to {int(known.max())}, and the target has {vocab} tokens; use "
                "the target they were trained for"
            )

    def _check_tuned(self, target: "PreTrainedModel") -> None:
        if self.config.mode == "tuned" and getattr(target.config, MARK, None) != self.mark():
            raise SpeculationError(
                "these streams were trained together with the target's upper layers, and this target has not "
                "been tuned; call drafter.tune(target) first, or train streams with --mode untouched"
            )

    def tune(self, target: "PreTrainedModel") -> None:
        """Make the target the one that these streams were trained with (mode "tuned"), for good: what was learned is
        added to its upper layers, in place. From then on its text, with the drafter and without, is the tuned model's.

        A target that was tuned before is left as it is; one that is saved and loaded stays tuned.

        Raises:
            SpeculationError: the streams leave their target untouched, the target was tuned by others, or does not fit.
        """
        if self.config.mode != "tuned":
            raise SpeculationError("these streams leave their target untouched; use them as they are, without tune()")
        found, mark = getattr(target.config, MARK, None), self.mark()
        if found not in (None, mark):
            raise SpeculationError("the target was tuned together with other streams; load the target again")
        self._check_fit(target)
        upper = Upper(target, self.config.num_layers)
        weights: list[Any] = [
            layer.get_submodule(name).weight.data for layer in upper.layers for name in self.config.adapted
        ]
        if not all(type(weight) is Tensor and weight.is_floating_point() and not weight.is_meta for weight in weights):
            raise SpeculationError(
                "tune() needs the target's weights in memory and not quantized; load it without quantization "
                "and offloading, tune it, and save it"
            )
        if found is None:
            self.streams.merge(upper)
            setattr(target.config, MARK, mark)

    def save_lora(self, folder: str | Path, target: "PreTrainedModel") -> None:
        """Write what `tune` adds as a PEFT adapter, for other libraries: `PeftModel.from_pretrained(target, folder)` is
        the tuned target. For these streams tune the plain target itself.

        Args:
            target: the model that it is for, tuned or not: its layers' names are wanted.

        Raises:
            SpeculationError: the streams leave their target untouched, or do not fit it; a folder that cannot be
                written.
        """
        if self.config.mode != "tuned":
            raise SpeculationError("these streams leave their target untouched; there is no LoRA to save")
        self._check_fit(target)
        write_lora(self.streams, target, folder)

    def mark(self) -> str:
        """Tells tuned targets apart: a hash of what was added to them."""
        parts = hashlib.sha256()
        for name, weight in sorted(self.streams.adapters.state_dict().items()):
            parts.update(name.encode() + weight.to(torch.bfloat16).view(torch.uint8).cpu().numpy().tobytes())
        return parts.hexdigest()[:16]

    def start(self, context: DraftContext) -> TreeSession:
        target, config = context.target, self.config
        if target is None:
            raise SpeculationError("streams run inside the target, which is in another process; use another drafter")
        upper = Upper(target, config.num_layers)
        experience = self._experience.of(target, (context.rows, context.do_sample))
        streams = self.fitted(target, upper)
        # Elsewhere width costs little, and a recorded forward cannot be looked into.
        late = not waits(context.device) and config.prune_below == 0 and not is_captured(target, context.forwards)
        own = self._own_layers(target, streams, upper) if late else None
        steps = StreamSteps(context, config, streams, upper, experience.cost, own)
        fixed = None if config.num_nodes == "auto" else streams.gamma
        control = Controller(context, experience, fixed, steps.candidates, longest=streams.gamma, who="the streams")
        most = MOST_NODES if config.num_nodes == "auto" else int(config.num_nodes)
        seen = context.trees and not waits(context.device)
        acceptance = experience.acceptance
        session = TreeSession(context, acceptance, self._sources(context, acceptance), steps, control, seen, most)
        session.weighs = late and fixed is None and context.trees  # nobody weighs what streams add to a forward
        return session

    def _sources(self, context: DraftContext, acceptance: Acceptance) -> list[Source]:
        """What joins the streams' tokens. On accelerators nothing is recycled: each round would wait for what the
        streams say."""
        if not (self.config.copies and context.trees):
            return []
        copies = Copies(context, PromptLookupConfig(num_branches=BRANCHES), acceptance)
        return [copies] if waits(context.device) else [copies, Recycled(context, acceptance, SUCCESSORS)]

    def _own_layers(self, target: "PreTrainedModel", streams: Streams, upper: Upper) -> OwnLayers:
        """Made once per target, until that or the streams have other weights."""
        weights = [*upper.layers.parameters(), *streams.parameters()]
        return self._owned.of(target, Copied).of(weights, lambda: own_layers(streams, upper))

    def fitted(self, target: "PreTrainedModel", upper: Upper) -> Streams:
        """The streams in the target's dtype, each part beside what it belongs to; made once per target, until they
        have other weights."""

        def make() -> Streams:
            streams = deepcopy(self.streams)
            if self.config.mode == "tuned":
                streams.adapters = nn.ModuleList()  # they have gone into the target
            return _beside(streams, upper, target)

        fitted = self._fitted.of(target, Copied).of([*self.streams.parameters(), self.streams.known], make)
        fitted.notice(upper.head)
        return fitted


def _beside(streams: Streams, upper: Upper, target: "PreTrainedModel") -> Streams:
    devices = [input_device(layer) for layer in upper.layers]
    streams.to(device=devices[0], dtype=target.dtype)
    for adapters, device in zip(streams.adapters, devices, strict=False):
        adapters.to(device)
    streams.known = streams.known.to(upper.head.weight.device)
    return streams
