"""Tiny decoder-only models of many architectures, with random weights that give varied text."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers as tf
from torch import Tensor

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
ENDS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
WINDOW = 6
"""tokens of the sliding windows: short, so that every test goes past it"""


def _mixed_layers(sliding: str = "sliding_attention") -> dict[str, Any]:
    return {"layer_types": [sliding, "full_attention"]}


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "Llama": lambda: tf.LlamaConfig(**SIZES),
    "Mistral": lambda: tf.MistralConfig(**SIZES, sliding_window=WINDOW),
    "Qwen2": lambda: tf.Qwen2Config(**SIZES),
    "Qwen2 sliding": lambda: tf.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "Qwen3": lambda: tf.Qwen3Config(**SIZES),
    "Qwen3-MoE": lambda: tf.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "Gemma": lambda: tf.GemmaConfig(**SIZES),
    "Gemma2": lambda: tf.Gemma2Config(**SIZES, sliding_window=WINDOW, query_pre_attn_scalar=8),
    "Gemma3": lambda: tf.Gemma3TextConfig(**SIZES, sliding_window=WINDOW, **_mixed_layers()),
    "Gemma4": lambda: tf.Gemma4TextConfig(  # whose upper half reads the keys of the lower one
        **SIZES | {"num_hidden_layers": 4},
        sliding_window=WINDOW,
        global_head_dim=16,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "Phi": lambda: tf.PhiConfig(**SIZES, partial_rotary_factor=0.5),
    "Phi-3": lambda: tf.Phi3Config(**SIZES, sliding_window=WINDOW),
    "GPT-2": lambda: tf.GPT2Config(**GPT2, **ENDS, tie_word_embeddings=False),
    "GPT-J": lambda: tf.GPTJConfig(**GPT2, **ENDS, rotary_dim=8, tie_word_embeddings=False),
    "GPT-BigCode": lambda: tf.GPTBigCodeConfig(**GPT2, **ENDS, tie_word_embeddings=False),
    "GPT-Neo": lambda: tf.GPTNeoConfig(
        **ENDS,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        intermediate_size=48,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    ),
    "GPT-NeoX": lambda: tf.GPTNeoXConfig(**SIZES),
    "GPT-OSS": lambda: tf.GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, **_mixed_layers()
    ),
    "OPT": lambda: tf.OPTConfig(
        **ENDS,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    ),
    "Bloom": lambda: tf.BloomConfig(**ENDS, hidden_size=32, n_layer=2, n_head=4, tie_word_embeddings=False),
    "Falcon": lambda: tf.FalconConfig(
        **ENDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=False
    ),
    "Falcon ALiBi": lambda: tf.FalconConfig(
        **ENDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        tie_word_embeddings=False,
    ),
    "MPT": lambda: tf.MptConfig(
        **ENDS, d_model=32, n_layers=2, n_heads=4, max_seq_len=512, use_cache=True, tie_word_embeddings=False
    ),
    "OLMo2": lambda: tf.Olmo2Config(**SIZES),
    "StarCoder2": lambda: tf.Starcoder2Config(**SIZES, sliding_window=WINDOW),
    "StableLM": lambda: tf.StableLmConfig(**SIZES),
    "Cohere": lambda: tf.CohereConfig(**SIZES),
    "Granite": lambda: tf.GraniteConfig(**SIZES),
    "SmolLM3": lambda: tf.SmolLM3Config(**SIZES),
    "GLM-4": lambda: tf.Glm4Config(**SIZES, partial_rotary_factor=0.5),
    "Mixtral": lambda: tf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "DeepSeek-V3": lambda: tf.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4, "head_dim": 4},
        moe_intermediate_size=24,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "Qwen3-Next": lambda: tf.Qwen3NextConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        **_mixed_layers("linear_attention"),
    ),
    "LFM2": lambda: tf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
    "Mamba": lambda: tf.MambaConfig(**ENDS, hidden_size=32, num_hidden_layers=2, state_size=8),
}
REQUIRED = [
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Gemma2",
    "Gemma3",
    "Phi-3",
    "GPT-2",
    "GPT-NeoX",
    "OPT",
    "Bloom",
    "Falcon",
    "MPT",
    "OLMo2",
    "GPT-BigCode",
    "StarCoder2",
    "Mixtral",
    "DeepSeek-V3",
]


def build(name: str, attention: str = "sdpa", seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model of this architecture.

    Raises:
        ValueError: the architecture does not know this attention implementation.
    """
    return from_config(ARCHITECTURES[name](), attention, seed).to(dtype)


def from_config(config: Any, attention: str = "sdpa", seed: int = 0) -> Any:
    """Weights large enough that every token matters: transformers' own initial ones give text that loops."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0.0, 3.0 / weight.shape[-1] ** 0.5)
        for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            table.normal_()
    return model.eval()


def llama(vocab: int = VOCAB, seed: int = 0, attention: str = "sdpa", **changes: Any) -> Any:
    """The model of most tests."""
    return from_config(tf.LlamaConfig(**SIZES | {"vocab_size": vocab} | changes), attention, seed)


def probed(*several: Any) -> None:
    """What is found out by trying is found now: what a test counts, or breaks, are the rounds of its own calls."""
    from hf_specdec.target.capturable import why_not_captured
    from hf_specdec.target.probe import ability

    for model in several:
        ability(model), why_not_captured(model)


def spy(look: Any) -> Any:
    """A hook that says of itself that it may see any forward."""

    def hook(*args: Any, **kwargs: Any) -> Any:
        return look(*args, **kwargs)

    hook.sees_any_forward = True  # type: ignore[attr-defined]
    return hook


@contextmanager
def hooked(model: Any, look: Any, module: Any = None, before: bool = False) -> Iterator[None]:
    """Within the block `look` is a hook of a module, which sees, and may spoil, a test's own calls; not the trials by
    which is found out what the model can do."""
    on = [False]
    module = model if module is None else module
    register = module.register_forward_pre_hook if before else module.register_forward_hook
    handle = register(spy(lambda *args: look(*args) if on[0] else None), with_kwargs=True)
    try:
        probed(model)
        on[0] = True
        yield
    finally:
        handle.remove()


def small(vocab: int, layers: int = 1) -> Any:
    """One whose tokens all have their chance, for tests that sample many texts."""
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": layers, "head_dim": 8}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    model = llama(vocab, **size, **heads, pad_token_id=None, bos_token_id=None)
    model.get_output_embeddings().weight.data *= 0.5
    return model


@contextmanager
def slow(model: Any, seconds: float) -> Iterator[None]:
    """Within the block the model's forwards take so much longer."""
    forward = model.forward

    @functools.wraps(forward)
    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return forward(*args, **kwargs)

    model.forward = slowly
    try:
        yield
    finally:
        del model.forward


def counting(layers: int) -> Any:
    """A Llama that counts, mostly: what comes after its next token can be learned."""
    target = llama(num_hidden_layers=layers)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.05)
            layer.mlp.down_proj.weight.mul_(0.05)
        target.lm_head.weight.copy_(target.model.embed_tokens.weight.roll(1, 0) / 2)
    return target


def prompts(lengths: list[int], vocab: int = VOCAB, seed: int = 0) -> dict[str, Tensor]:
    """Random prompts of these lengths, left-padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(2, vocab, (len(lengths), width), generator=generator)
    mask = torch.stack([(torch.arange(width) >= width - n).long() for n in lengths])
    return {"input_ids": ids * mask, "attention_mask": mask}


def tokenizer() -> Any:
    """Letters a to i and all their pairs: text in which a stop string may begin and end within a token."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    letters = "abcdefghi"
    pairs = [(x, y) for x in letters for y in letters]
    names = ["<pad>", "<s>", *letters, *(x + y for x, y in pairs)]
    names += [f"<{i}>" for i in range(len(names), VOCAB)]
    backend = Tokenizer(BPE({name: i for i, name in enumerate(names)}, pairs))
    backend.decoder = decoders.Fuse()
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", padding_side="left")


def build_gpt2(positions: int) -> Any:
    """A draft that knows so many positions and fails at the next."""
    config = tf.GPT2Config(**GPT2 | {"n_layer": 1, "n_positions": positions}, **ENDS, tie_word_embeddings=False)
    return from_config(config)


def loud(model: Any, seed: int) -> Any:
    """Weights large enough that every token matters, but those of its target."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and not name.startswith(("embed_tokens", "shared_head")):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 2.0 / weight.shape[-1] ** 0.5)
    return model.eval()
