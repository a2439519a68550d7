"""Small Gemma 4 targets and assistants with random weights, and transformers' own drafts over a text."""

import functools
from pathlib import Path
from typing import Any

import models
import torch
import transformers as tf
from processes import folder_of_the_session
from torch import Tensor
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from hf_specdec import Gemma4Drafter

GROUPS, CHOSEN = 14, 3
VOCAB = 98
"""a multiple of the groups"""
SCORED = CHOSEN * VOCAB // GROUPS
"""tokens that have logits of their own"""
SIZES: dict[str, Any] = models.SIZES | {
    "vocab_size": VOCAB,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "global_head_dim": 16,
    "sliding_window": models.WINDOW,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
OF_TARGETS: dict[str, dict[str, Any]] = {
    "E2B": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
    "31B": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "12B": {},
}
"""by the published models that are built alike, the first of the class for text and images"""
DRAFTED = 3


def _config(kind: str, **changes: Any) -> Any:
    family = tf.Gemma4UnifiedTextConfig if kind == "12B" else tf.Gemma4TextConfig
    return family(**SIZES | OF_TARGETS[kind] | changes)


def target(kind: str = "31B", **changes: Any) -> Any:
    text = _config(kind, **changes)
    alone = {"vision_config": None, "audio_config": None, "tie_word_embeddings": False}
    return models.from_config(tf.Gemma4Config(text_config=text, **alone) if kind == "E2B" else text, seed=2)


def _assistant(kind: str, target: Any, **more: Any) -> Any:
    """Of three layers, and of another width than the target's."""
    changes = {"hidden_size": 24, "num_hidden_layers": 3, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 0}
    changes |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    changes |= {"vocab_size_per_layer_input": 0} | more
    family, config = tf.Gemma4AssistantForCausalLM, tf.Gemma4AssistantConfig
    if kind == "12B":
        family, config = tf.Gemma4UnifiedAssistantForCausalLM, tf.Gemma4UnifiedAssistantConfig
    grouped = {"use_ordered_embeddings": True, "num_centroids": GROUPS, "centroid_intermediate_top_k": CHOSEN}
    model = family(
        config(
            text_config=_config(kind, **changes),
            backbone_hidden_size=target.config.get_text_config().hidden_size,
            **grouped if kind == "E2B" else {},
        )
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 2.0 / weight.shape[-1] ** 0.5)
        if model.masked_embedding is not None:
            model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB, generator=generator))
    return model.eval()


@functools.cache
def pair(kind: str) -> tuple[Any, Any]:
    """A target and its assistant."""
    made = target(kind)
    return made, _assistant(kind, made)


@functools.cache
def folder_of(kind: str) -> Path:
    """An assistant as they are published."""
    folder = folder_of_the_session()
    pair(kind)[1].save_pretrained(folder)
    return folder


def small(vocab: int) -> tuple[Any, Any]:
    """A pair whose tokens all have their chance, for tests that sample many texts."""
    size = {"vocab_size": vocab, "num_attention_heads": 1, "num_key_value_heads": 1, "num_global_key_value_heads": 1}
    size |= {"head_dim": 8, "global_head_dim": 8, "intermediate_size": 8, "bos_token_id": None, "pad_token_id": None}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "hidden_size": 8}
    made = target("31B", **size, **layers)
    made.get_output_embeddings().weight.data *= 0.5
    return made, _assistant("31B", made, **size, hidden_size=16)


@functools.cache
def gemma4(kind: str) -> tuple[Any, Gemma4Drafter]:
    target, assistant = pair(kind)
    return target, Gemma4Drafter(assistant, num_draft_tokens=DRAFTED)


PAIRS = {f"Gemma 4, {kind}": functools.partial(gemma4, kind) for kind in OF_TARGETS}
SMALL: dict[str, Any] = {}
"""it drafts for Gemma 4 alone (`test_gemma4.py`)"""


def drafter() -> Gemma4Drafter:
    return Gemma4Drafter(pair("31B")[1])


def alone(target: Any, drafter: Any, text: Tensor) -> list[int]:
    return drafted_by_transformers(target, drafter.draft_model, text, drafter.most)[0]


@torch.no_grad()
def drafted_by_transformers(target: Any, assistant: Any, text: Tensor, count: int) -> tuple[list[int], Tensor]:
    """What transformers' own loop would draft behind a text [1, n] whose last token the target has not read: tokens,
    and logits [count, V]."""
    read = text[:, :-1]
    outputs = target(read, output_hidden_states=True, return_shared_kv_states=True)
    generator: Any = object.__new__(SinglePositionMultiTokenCandidateGenerator)  # it is made in other ways in 5.17
    generator.assistant_model, generator.target_model_input_embeddings = assistant, target.get_input_embeddings()
    generator.num_assistant_tokens, generator.main_model_max_length = count, 10_000
    generator.is_main_model_prefill, generator.eos_token_id = True, None
    ids, logits = generator.get_candidates(
        text,
        model_kwargs={"attention_mask": torch.ones_like(text)},
        model_outputs=outputs,
        is_first_iteration=False,
        n_last_matches=read.shape[1] - 1,  # of transformers 5.17, which does not tell a prompt from a draft
    )
    return ids[0, text.shape[1] :].tolist(), logits[0]
