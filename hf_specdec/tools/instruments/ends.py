"""Where a text that a model wrote ends and its padding begins."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from ...stats import text_length


def end_tokens(model: PreTrainedModel) -> set[int]:
    """The tokens that end the model's texts."""
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends} - {None}


def until_end(model: PreTrainedModel, tokens: Sequence[int]) -> list[int]:
    """New tokens of a row of `generate`, up to and including the first that ends a text."""
    return list(tokens[: text_length(tokens, end_tokens(model))])
