"""A tokenizer with a chat template, and a pair of tiny models that talk by it."""

from pathlib import Path
from typing import Any

from models import llama
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
SPECIAL = ["<pad>", "<s>", "<|end|>", *ROLES]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB = len(SPECIAL) + len(ALPHABET)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def talking_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Bytes and special tokens. Like Llama's, it writes a first token before any text, and the template does, too."""
    backend = Tokenizer(BPE({name: i for i, name in enumerate([*SPECIAL, *ALPHABET])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))])
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "<|end|>", "additional_special_tokens": ROLES}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)
    tokenizer.chat_template = template
    return tokenizer


def save_pair(folder: Path, template: str | None = TEMPLATE, **config: Any) -> dict[str, str]:
    """Target and draft in folders of their own, by the names that settings know them by."""
    for seed, name in enumerate(("target", "draft")):
        llama(VOCAB, seed, **config).save_pretrained(folder / name)
        talking_tokenizer(template).save_pretrained(folder / name)
    return {name: str(folder / name) for name in ("target", "draft")}
