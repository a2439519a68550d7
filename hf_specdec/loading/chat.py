"""Messages to prompts: the tokenizer's chat template where it has one."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
"""`role` (system, user or assistant) and `content`."""


def ask(tokenizer: PreTrainedTokenizerBase, question: str, system: str | None = None) -> list[int]:
    """Token ids of a first question, ready to be answered; of the bare text where there is no chat template."""
    messages = [{"role": "system", "content": system}] if system else []
    return conversation(tokenizer, [*messages, {"role": "user", "content": question}])


def conversation(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, ready for the assistant's next turn.

    Without a chat template the turns stand below each other, as text.
    """
    if tokenizer.chat_template is None:
        return tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
