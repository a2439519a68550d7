"""`Method`: one way of decoding prompts."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from ...drafters import Drafter


@dataclass
class Method:
    """One way of decoding prompts."""

    name: str
    """the SPEC as it was given"""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """what it adds to `generate`"""
    draft: PreTrainedModel | None = None
    """the model that drafts, if any"""
    drafter: Drafter | None = None
    draft_options: dict[str, Any] = field(default_factory=dict)
    """what transformers' loop reads from the draft's generation config"""
    single_row: bool = False
    """whether it takes a batch of 1 only"""
    rounds: list[tuple[int, int]] | None = None
    """tokens drafted and accepted in each verification of the last call; None where its forwards tell"""

    def generate(self, target: PreTrainedModel, inputs: Mapping[str, Any], **options: Any) -> list[list[int]]:
        """The new tokens of each row, padding included.

        Args:
            inputs: `input_ids` [B, P] and `attention_mask`.
            options: of `generate`; those of the method come before them.
        """
        with self.prepared():
            output: Any = target.generate(**inputs, **options | self.kwargs)
        return output[:, inputs["input_ids"].shape[1] :].tolist()

    def prepared(self) -> AbstractContextManager[None]:
        """Sets the options that live in the draft's generation config, and takes them back."""
        return _generation_options(self.draft, self.draft_options) if self.draft is not None else nullcontext()


@contextmanager
def _generation_options(draft: PreTrainedModel, options: dict[str, Any]) -> Iterator[None]:
    config = draft.generation_config
    before = {name: getattr(config, name) for name in options}
    for name, value in options.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
