"""Small models and classifiers for DISCO, and what a session of it drafts."""

from typing import Any

import torch
from close_drafts import nearly
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec.drafters.chains import ChainSession
from hf_specdec.drafters.disco import DiscoDrafter, StopClassifier
from hf_specdec.protocol import Draft, DraftContext, Sequences
from hf_specdec.stats import SpeculationStats

STOPS = 16
"""seed of a classifier that stops rows at different places"""
NO_END = {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1}


def tiny(seed: int, vocab: int = 97, scale: float = 1.0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **sizes, **NO_END, max_position_embeddings=256)).eval()
    model.lm_head.weight.data *= scale
    return model


def close_to(model: LlamaForCausalLM, seed: int, noise: float) -> LlamaForCausalLM:
    """A draft that often agrees with the model."""
    draft = tiny(seed, model.config.vocab_size)
    draft.load_state_dict(model.state_dict())
    torch.manual_seed(seed)
    for weight in draft.parameters():
        weight.data += noise * torch.randn_like(weight) * weight.std().nan_to_num(0.1)
    return draft


def classifier(seed: int = 0, k: int = 4, sees_token: bool = False) -> StopClassifier:
    """Random, with chances all over the place."""
    torch.manual_seed(seed)
    made = StopClassifier(k, 8, sees_token)
    made.outer.weight.data *= 6
    return made


def context(rows: int, do_sample: bool, lockstep: bool) -> DraftContext:
    def pick(ids, lengths, some, logits):
        return logits.argmax(-1), logits.float().softmax(-1) if do_sample else None

    prompt = torch.arange(2, 2 + 5 * rows).view(rows, 5)
    return DraftContext(
        prompt_ids=prompt,
        prompt_mask=torch.ones_like(prompt),
        max_length=200,
        vocab_size=97,
        eos_token_ids=frozenset(),
        do_sample=do_sample,
        lockstep=lockstep,
        trees=False,
        pick=pick,
        device=torch.device("cpu"),
        stats=SpeculationStats(),
    )


def propose(drafter: DiscoDrafter, rows: int, lockstep: bool, do_sample: bool = False) -> tuple[Draft, ChainSession]:
    opened = context(rows, do_sample, lockstep)
    ids = torch.nn.functional.pad(torch.cat([opened.prompt_ids, torch.full((rows, 1), 7)], 1), (0, 16))
    with torch.no_grad():
        session = drafter.start(opened)
        return session.propose(Sequences(ids, [6] * rows, list(range(rows)), ids[:, :6].tolist()), [8] * rows), session


def disco(target: Any) -> DiscoDrafter:
    torch.manual_seed(0)
    return DiscoDrafter(
        nearly(target), StopClassifier(4, 8), rule="token", tau=0.05, tau_sampled=0.05, max_draft_tokens=6
    )
