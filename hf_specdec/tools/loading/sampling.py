"""`sampling_at`: what `generate` is told, so that it draws from the model's own distribution."""

from typing import Any


def sampling_at(temperature: float) -> dict[str, Any]:
    """Options of `generate`: the likeliest tokens at temperature 0, else draws, of which the model's own
    `GenerationConfig` cuts off no top-k and no top-p."""
    if temperature <= 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
