"""Drafts that are a model's own weights, disturbed."""

import copy
from typing import Any

import torch


def close_to(model, noise, seed=3):
    """A draft that agrees with the model now and then: its weights, disturbed."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * noise)
    return draft


def nearly(model: Any) -> Any:
    """A draft that is right most of the time: the target with a little noise."""
    draft = type(model)(model.config).eval()
    draft.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.03 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
    return draft
