"""Targets with streams in them, for tests."""

from typing import Any

import models
import pytest
import torch

from hf_specdec import StreamingDrafter
from hf_specdec.drafters.streaming import Upper

GAMMA = 3
TARGETS = ["Llama", "Qwen2", "Qwen3", "Phi", "OPT", "Mistral", "Qwen2 sliding", "Gemma2", "Gemma3"]
BATCHES = {"one row": [9], "four uneven rows": [9, 5, 1, 7]}
WAYS: dict[str, dict[str, Any]] = {
    "by value": {"copies": False},
    "with copies": {},
    "pruned": {"prune_below": 0.02, "num_nodes": 20},
    "rotated": {"rotation": 0.05},
}


def target_of(name: str, layers: int = 3) -> Any:
    config = models.ARCHITECTURES[name]()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * layers)[:layers]
    return models.from_config(config, "eager" if name in ("Gemma2", "Gemma3") else "sdpa")


def never_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random streams would be given up."""
    start = StreamingDrafter.start

    def started(self: StreamingDrafter, context: Any) -> Any:
        session = start(self, context)
        session.weighs = True
        return session

    monkeypatch.setattr(StreamingDrafter, "start", started)


def join(patch: pytest.MonkeyPatch) -> None:
    """Let streams join the target's forwards, as they do on an accelerator."""
    patch.setattr("hf_specdec.drafters.streaming.drafter.waits", lambda _: True)


def streams_of(target: Any, layers: int = 2, seed: int = 0, **options: Any) -> StreamingDrafter:
    """Random ones, which matter: whatever they did to the main stream would show."""
    adapted = {
        name: [linear.in_features, linear.out_features]
        for name, linear in Upper(target, layers).layers[0].named_modules()
        if isinstance(linear, torch.nn.Linear)
    }
    sizes = {"num_streams": GAMMA, "num_candidates": 3, "adapter_rank": 2, "map_rank": 2, "prune_rank": 2}
    made = StreamingDrafter(
        num_layers=layers, hidden_size=target.config.hidden_size, adapted=adapted, **sizes | options
    )
    generator = torch.Generator().manual_seed(seed)
    for weight in made.streams.parameters():
        weight.normal_(0, 0.3, generator=generator)
    made.trained = True
    return made
