"""Where a text that a model wrote ends: behind it is padding."""

from collections.abc import Sequence

from transformers import PreTrainedModel


def until_end(model: PreTrainedModel, tokens: Sequence[int]) -> list[int]:
    """New tokens of a row of `generate`, up to and with the first that ends a text."""
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    last = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[: last + 1])
