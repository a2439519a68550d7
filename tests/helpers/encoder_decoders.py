"""Tiny encoder-decoders with random weights, drafts that are mostly right, and what they read."""

import copy
from collections.abc import Callable
from typing import Any

import models
import torch
import transformers as tf
from torch import Tensor

VOCAB = 60
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
BART: dict[str, Any] = SMALL | {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 96, "bos_token_id": 2,
    "decoder_start_token_id": 2, "forced_eos_token_id": None, "init_std": 0.5,
}  # fmt: skip
WHISPER: dict[str, Any] = BART | {
    "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64, "suppress_tokens": [],
    "begin_suppress_tokens": [5, 7], "scale_embedding": False,
}  # fmt: skip
MOONSHINE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "tie_word_embeddings": False, "partial_rotary_factor": 0.5,
}  # fmt: skip
MAKES: dict[str, Callable[[], Any]] = {
    "T5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(**SMALL, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0)
    ),
    "BART": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**BART)),
    "Marian": lambda: tf.MarianMTModel(tf.MarianConfig(**BART, decoder_vocab_size=VOCAB)),
    "Pegasus": lambda: tf.PegasusForConditionalGeneration(tf.PegasusConfig(**BART)),
    "Whisper": lambda: tf.WhisperForConditionalGeneration(tf.WhisperConfig(**WHISPER)),
    "Moonshine": lambda: tf.MoonshineForConditionalGeneration(tf.MoonshineConfig(**MOONSHINE)),
}


def build(name: str, seed: int = 1) -> Any:
    """Weights of which every token takes notice."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = MAKES[name]().eval()
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0.0, 2.0 / weight.shape[-1] ** 0.5)
        for table in (model.get_input_embeddings(), model.get_decoder().get_input_embeddings()):
            table.weight.normal_()
        for name, weight in model.named_parameters():
            if "encoder_attn" in name:
                weight *= 0.2
            if "position" in name or "attention_bias" in name:  # texts that go on where they would loop
                weight.normal_(0.0, 2.0)
        model.get_output_embeddings().weight = torch.nn.Parameter(torch.randn(VOCAB, 32))
    model.generation_config.forced_eos_token_id = None
    return model


def near(model: Any, noise: float) -> Any:
    """A draft that is mostly right."""
    other = copy.deepcopy(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for weight in other.parameters():
            weight += noise * weight.std(unbiased=False) * torch.randn_like(weight)
    return other


def inputs(name: str, rows: int) -> dict[str, Tensor]:
    if name == "Whisper":
        generator = torch.Generator().manual_seed(0)
        return {"input_features": torch.randn(rows, 8, 40, generator=generator)}
    if name == "Moonshine":
        sound = torch.randn(rows, 6000, generator=torch.Generator().manual_seed(0))
        heard = (torch.arange(6000) < torch.tensor([[6000], [3500], [5000]][:rows])).long()
        return {"input_values": sound * heard, "attention_mask": heard}
    batch = models.prompts([9, 5, 7][:rows], VOCAB)
    batch["input_ids"], batch["attention_mask"] = batch["input_ids"].flip(1), batch["attention_mask"].flip(1)
    return batch  # sources are padded on the right
