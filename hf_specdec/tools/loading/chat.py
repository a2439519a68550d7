"""Prompts to token ids: chats through the tokenizer's chat template where it has one."""

from collections.abc import Sequence

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...errors import SpeculationError, shortened
from .prompts import Prompt

Message = dict[str, str]
"""`role` (system, user or assistant) and `content`."""


def ask(tokenizer: PreTrainedTokenizerBase, question: str, system: str | None = None, raw: bool = False) -> list[int]:
    """Token ids of a first question, ready to be answered. Without a chat template, or with `raw`, of the bare text."""
    return prompt_ids(tokenizer, Prompt((question,), chat=True), raw, system)


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, raw: bool = False, system: str | None = None
) -> list[int]:
    """Token ids of a prompt, ready to be continued: of a conversation its history and the next turn.

    Args:
        raw: whether chats go without the chat template, too.
        system: a system message for chats that have none.
    """
    messages = prompt.messages
    if prompt.chat and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return conversation(tokenizer, messages, raw or not prompt.chat)


def conversation(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], raw: bool = False) -> list[int]:
    """Token ids of a conversation, ready for the assistant's next turn.

    Without a chat template, or where it is not wanted (`raw`), the turns stand below each other, as text.

    Raises:
        SpeculationError: the template refuses the messages.
    """
    if raw or tokenizer.chat_template is None:
        return tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        roles = shortened(", ".join(message["role"] for message in messages))
        raise SpeculationError(
            f"the tokenizer's chat template does not accept messages of {roles}: {error}; change their order, "
            "or leave out the system message or the template (raw)"
        ) from error
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has written the special tokens


def batch(rows: Sequence[list[int]], pad: int | None, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Token ids of several prompts as one batch, padded on the left: `input_ids` and `attention_mask`."""
    width = max(map(len, rows))
    filler = 0 if pad is None else pad  # any token will do, for nothing looks at it
    ids = [[filler] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}
