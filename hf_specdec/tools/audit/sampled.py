"""Sampled calls, with a method and plainly."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..bench.method import Method
from ..bench.methods import PLAIN
from ..loading.sampling import sampling_at
from .findings import Finding
from .samples import PLACES, Sample, of_samples

CHUNK = 100
"""rows of a call"""


@dataclass
class Sampled:
    """The draws of one target."""

    target: PreTrainedModel
    inputs: list[dict[str, Tensor]]
    samples: int
    temperature: float
    seed: int
    pad: int | None
    plainly: Method = field(default_factory=lambda: Method(PLAIN))

    def __post_init__(self) -> None:
        self.plain = [self.draw(self.plainly, inputs) for inputs in self.inputs]

    def draw(self, method: Method, inputs: dict[str, Tensor]) -> Sample:
        """New tokens 2 to `PLACES + 1` of each sampled text; the first comes from the prompt's forward, undrafted."""
        options: dict[str, Any] = {"max_new_tokens": PLACES + 1, "min_new_tokens": PLACES + 1}
        options |= {"pad_token_id": self.pad} | sampling_at(self.temperature)
        chunk = 1 if method.single_row else min(CHUNK, self.samples)
        rows: Sample = []
        torch.manual_seed(self.seed + (method.name != PLAIN))  # two samples, not one twice
        while len(rows) < self.samples:
            many = {name: value.expand(chunk, -1) for name, value in inputs.items()}
            rows += (tuple(tokens[1:]) for tokens in method.generate(self.target, many, **options))
        return rows[: self.samples]

    def finding(self, method: Method) -> Finding:
        """A method's samples beside the plain ones."""
        return of_samples([(plain, self.draw(method, x)) for plain, x in zip(self.plain, self.inputs, strict=True)])
