"""`sampling_at`: what `generate` is told, so that it draws from the model's own distribution."""

from typing import Any


def sampling_at(temperature: float, top_k: int = 0) -> dict[str, Any]:
    """Options of `generate`: the likeliest tokens at temperature 0, else draws from the `top_k` likeliest, 0 for all.
    The model's own `GenerationConfig` cuts off nothing."""
    if temperature <= 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": 1.0}
