"""Where a text that a model wrote ends: behind it is padding."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from ...stats import text_length


def end_tokens(model: PreTrainedModel) -> set[int]:
    """The tokens that end its texts."""
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends} - {None}


def until_end(model: PreTrainedModel, tokens: Sequence[int]) -> list[int]:
    """New tokens of a row of `generate`, up to and with the first that ends a text."""
    return list(tokens[: text_length(tokens, end_tokens(model))])
