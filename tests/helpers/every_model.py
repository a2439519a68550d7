"""Every causal language model of transformers, built tiny from its own config class, and its text with and without us.

A model type is built from its config's defaults with all sizes made small; the kinds of layers it mixes are kept, one
of each. What cannot be built so, or what plain `generate` itself cannot run, is left out with the reason.
"""

import dataclasses
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import models
import torch
import toy_drafters as drafters
import transformers as tf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_specdec
from hf_specdec.target.probe import Support, support

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
NEW_TOKENS = 20
SECONDS = 8
"""a model type may take in all"""
WINDOW = 12
"""tokens of the sliding windows: more than the probe feeds, fewer than the texts have"""
MOST_PARAMETERS = 3_000_000
BATCHES = {"one row": [7], "four rows": [9, 5, 1, 7]}
DRAFTERS: dict[str, Callable[[drafters.Future], drafters.Toy]] = {
    "noisy": lambda future: drafters.noisy(future, 5, models.VOCAB),
    "tree": lambda future: drafters.bushy(future, 5, models.VOCAB),
}

_NAMES: dict[Any, str] = {
    models.VOCAB: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    32: "hidden_size d_model n_embd embed_dim embedding_size embedding_dim word_embed_proj_dim emb_dim dim_model "
    "attention_hidden_size lru_width hidden_size_per_layer_input mamba_d_ssm attn_hidden_size backbone_hidden_size",
    48: "intermediate_size ffn_dim n_inner ffn_hidden_size dim_ff d_inner decoder_ffn_dim encoder_ffn_dim dff "
    "feed_forward_size block_ff_dim intermediate_size_mlp",
    24: "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size "
    "moe_shared_expert_intermediate_size",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "swa_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts index_n_heads "
    "linear_num_value_heads linear_num_heads lightning_nope lightning_num_heads attention_heads",
    2: "num_key_value_heads n_kv_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok moe_k moe_topk "
    "linear_num_key_heads num_encoder_layers encoder_layers n_group num_ln_in_parallel_attn moe_num_experts_per_tok",
    8: "head_dim v_head_dim qk_nope_head_dim global_head_dim swa_head_dim linear_key_head_dim linear_value_head_dim "
    "mamba_d_head mamba_head_dim mamba_d_state state_size ssm_state_size mamba_n_heads mamba_num_heads d_kv "
    "linear_head_dim kv_channels swa_v_head_dim attention_head_dim index_head_dim mamba_headdim n_mamba_heads "
    "query_pre_attn_scalar hc_lowrank d_rel gated_norm_rank mamba_ngroups_head_dim o_lora_rank o_groups_rank",
    16: "kv_lora_rank q_lora_rank mamba_chunk_size chunk_size adapter_rank router_hidden_size",
    1: "mamba_n_groups n_groups mamba_ngroups topk_group num_zero_experts first_k_dense_replace zero_expert_num",
    512: "max_position_embeddings n_positions n_ctx max_seq_len context_length max_sequence_length",
    WINDOW: "sliding_window sliding_window_size attention_window_size window_size",
}
SMALL: dict[str, Any] = {name: size for size, names in _NAMES.items() for name in names.split()} | {
    "qk_rope_head_dim": 4,
    "rotary_dim": 4,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    "index_topk": 512,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_indices": [1],
    "layerdrop": 0.0,
    "use_cache": True,
}
_LAYERS = "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks max_window_layers"
LAYERS = set(_LAYERS.split())
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "block_types")
"""lists with an entry per layer"""
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
OWN: dict[str, dict[str, Any]] = {  # what the names above do not say
    "mamba2": {"num_heads": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {name: _ROPE for name in ("sliding_attention", "full_attention")},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": {"head_dim": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [48] * 4,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_shape": [16, 32], "axial_pos_embds_dim": [8, 24], "attention_head_size": 8},
    "roc_bert": {"pronunciation_vocab_size": models.VOCAB, "shape_vocab_size": models.VOCAB},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"n_mamba_heads": 2, "attention_head_dim": 16, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
FALLBACKS: list[dict[str, Any]] = [
    {},
    {"layers": 4},
    {"num_key_value_heads": 4, "num_kv_heads": 4},
    {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "head_dim": 8, "n_group": 1},
    {"hidden_size": 64, "head_dim": 16, "num_key_value_heads": 4},
    {"eos_token_id": models.VOCAB - 1},
]


class Reason(Exception):
    """Why a model type is not among those compared."""


class TooSlow(BaseException):
    """No `except Exception` in between shall keep it."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _kinds(default: Any, fields: set[str], layers: int) -> dict[str, list[str]]:
    """Of every list of layers, one of each kind, in the order of the real model."""
    found: dict[str, list[str]] = {}
    for name in KINDS:
        kinds = getattr(default, name, None) if name in fields else None
        if isinstance(kinds, (list, tuple)) and kinds and isinstance(kinds[0], str):
            found[name] = list(dict.fromkeys(kinds))
    most = max([layers, *map(len, found.values())])
    return {name: (kinds * most)[:most] for name, kinds in found.items()}


def config_of(kind: str, changes: dict[str, Any]) -> Any:
    """A small config.

    Raises:
        Reason: it is no text model by itself.
    """
    config_class = tf.AutoConfig.for_model(kind).__class__
    default = config_class()
    text = default.get_text_config(decoder=True)
    if text is not default and text.model_type != default.model_type:
        raise Reason(f"has parts beside text: see {text.model_type}")
    fields = {field.name for field in dataclasses.fields(config_class)}
    names = {name for name in fields if not name.startswith("_")}
    changes = dict(changes)
    layers = changes.pop("layers", 2)
    lists = _kinds(default, names, layers)
    layers = max([layers, *map(len, lists.values())])
    settings = {name: SMALL[name] for name in names & set(SMALL) if _settable(name, default)}
    settings |= {name: layers for name in names & LAYERS if getattr(default, name, None) is not None} | lists
    settings |= {name: value for name, value in changes.items() if name in names}
    return config_class(**settings | OWN.get(kind, {}))


def _settable(name: str, default: Any) -> bool:
    """A size that a model leaves out by default stays so, a list stays a list."""
    if name.endswith("_token_id") or name in ("head_dim", "is_decoder"):
        return True
    value = getattr(default, name, None)
    return value is not None and (isinstance(value, list) == isinstance(SMALL[name], list))


def build(kind: str, changes: dict[str, Any]) -> Any:
    config = config_of(kind, changes)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in tf.AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise Reason(f"not small: {size / 1e6:.0f} M parameters")
    try:
        return models.from_config(config_of(kind, changes), "sdpa")
    except ValueError:
        return models.from_config(config_of(kind, changes), "eager")


def generate(model: Any, batch: str, **more: Any) -> torch.Tensor:
    prompts = models.prompts(BATCHES[batch])
    return model.generate(**prompts, max_new_tokens=NEW_TOKENS, do_sample=False, **more)


def plain(model: Any) -> dict[str, torch.Tensor]:
    """Plain decoding's texts.

    Raises:
        Reason: they are not the same twice, or not of finite numbers.
    """
    texts = {}
    for batch in BATCHES:
        texts[batch] = generate(model, batch)
        if not torch.equal(texts[batch], generate(model, batch)):
            raise Reason("plain decoding gives two texts")
    one = models.prompts(BATCHES["one row"])
    with torch.no_grad():
        if not model(**one).logits.isfinite().all():
            raise Reason("its logits are not finite")
    return texts


@dataclasses.dataclass
class Outcome:
    kind: str
    reason: str = ""
    """why it is left out"""
    modes: dict[str, str] = dataclasses.field(default_factory=dict)
    """by batch"""
    faults: list[str] = dataclasses.field(default_factory=list)
    """cells with another text"""
    varied: float = 0.0
    """distinct new tokens in a row, on average"""
    model: Any = None


def few_words(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if isinstance(error, Reason) else f"{type(error).__name__}: {lines[0]}"
    return text.replace("|", "/")[:110]


@cache
def outcome(kind: str) -> Outcome:
    """What became of a model type."""
    result = Outcome(kind)
    try:
        with at_most(SECONDS), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            made = _first_that_runs(kind, result)
            if made is not None:
                result.reason = ""
                _compare(*made, result)
    except TooSlow:
        result.reason = result.reason or f"takes more than {SECONDS} s"
    return result


def _first_that_runs(kind: str, result: Outcome) -> tuple[Any, dict[str, torch.Tensor]] | None:
    for changes in FALLBACKS:
        try:
            model = build(kind, changes)
            return model, plain(model)
        except Reason as reason:
            result.reason = few_words(reason)
            if result.reason.startswith("has parts"):
                return None
        except Exception as error:  # whatever a model raises here, it is left out
            result.reason = result.reason or few_words(error)
    return None


def _compare(model: Any, texts: dict[str, torch.Tensor], result: Outcome) -> None:
    new = texts["four rows"][:, -NEW_TOKENS:].tolist()
    result.varied = sum(len(set(row)) for row in new) / len(new)
    result.model = model
    for batch, text in texts.items():
        for name, drafter_of in DRAFTERS.items():
            drafter = drafter_of(drafters.Future(text))
            try:
                with mock.patch("hf_specdec.budget.account.GIVEN", 1 << 30):  # drafting never pauses
                    ours = generate(model, batch, assistant_model=drafter)
                mode = _mode(model, drafter.last_stats)
                fault = "" if torch.equal(ours, text) else "another text"
            except Exception as error:
                mode, fault = "raises", few_words(error)
            result.modes.setdefault(batch, mode)
            if fault:
                result.faults.append(f"{name}, {batch}, {mode}: {fault}")


def _mode(model: Any, stats: hf_specdec.SpeculationStats | None) -> str:
    if stats is None:
        return "plain"
    return "state" if support(model) is Support.STATE else str(stats.mode)
