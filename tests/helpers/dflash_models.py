"""Small DFlash, DFlash 2, DSpark and XPress models with random weights, transformers' own and as others publish them,
and a slow reference of their drafts."""

import functools
import json
from pathlib import Path
from typing import Any

import models
import torch
import transformers as tf
from processes import folder_of_the_session
from published import written
from safetensors.torch import load_file
from sampled_triples import VOCAB
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DFlashCache

from hf_specdec import DFlashDrafter, Drafter

HIDDEN, HEADS, SHARED, SIZE, INNER, BLOCK, MASK = 32, 4, 2, 8, 48, 5, 95
LAYERS = 4
"""of the target"""
FULL: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": BLOCK,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1, 3]},
    "dtype": "float32",
    "eos_token_id": 2,
    "head_dim": SIZE,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "num_key_value_heads": SHARED,
    "num_target_layers": LAYERS,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": models.VOCAB,
}
SLIDING = FULL | {"use_sliding_window": True, "sliding_window": 5}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [1, 2, 3],
    "block_size": BLOCK,
    "draft_vocab_size": 40,
    "mask_token_id": MASK,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "transformer_layer_config": {n: v for n, v in SLIDING.items() if n != "dflash_config"}
    | {"layer_types": ["sliding_attention", "full_attention"]},
}
MARKOV: dict[str, Any] = {"markov_rank": 6, "markov_head_type": "vanilla"}
MARKOV |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
DEEPSPEC = {name: value for name, value in FULL.items() if name not in ("dflash_config", "auto_map")} | MARKOV
DEEPSPEC |= {"architectures": ["Qwen3DSparkModel"], "mask_token_id": MASK, "target_layer_ids": [0, 1, 2]}
SECOND = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "full": FULL,
    "windows, causal": SLIDING | {"layer_types": ["sliding_attention", "full_attention"]},
    "windows both ways, scales": SLIDING
    | {
        "layer_types": ["sliding_attention"] * 2,
        "is_causal": False,
        "block_size": 9,
        "dflash_config": {
            "block_size": BLOCK,
            "mask_token_id": MASK,
            "target_layer_ids": [2],
            "input_embedding_scale": 3.0,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 2.0,
        },
    },
    "speculators": SPECULATORS,
    "DFlash 2 of z-lab": FULL
    | {"architectures": ["DFlash2DraftModel"], "dflash_config": FULL["dflash_config"] | SECOND, "is_causal": False},
    "XPress": SPECULATORS | {"speculators_model_type": "xpress", "xpress_rank": 6, "xpress_mlp_ratio": 3},
    "DSpark of DeepSpec": DEEPSPEC,
    "DSpark of speculators, recurrent": SPECULATORS
    | MARKOV
    | {"speculators_model_type": "dspark", "markov_head_type": "rnn", "sample_from_anchor": True},
}


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """What a config says, wherever it says it."""
    return config.get("transformer_layer_config", {}) | config | config.get("dflash_config", {})


def read_by(said: dict[str, Any]) -> list[int]:
    """Hidden states, 0 the embeddings."""
    return said.get("aux_hidden_state_layer_ids") or [layer + 1 for layer in said["target_layer_ids"]]


def weights(config: dict[str, Any], seed: int = 3) -> dict[str, Tensor]:
    """Named as in the files of others."""
    config = flat(config)
    generator, hidden, size = torch.Generator().manual_seed(seed), config["hidden_size"], config["head_dim"]
    heads, shared, inner = config["num_attention_heads"], config["num_key_value_heads"], config["intermediate_size"]
    found: dict[str, Tensor] = {}

    def linear(name: str, out: int, into: int) -> None:
        found[f"{name}.weight"] = torch.randn(out, into, generator=generator) * 1.5 / into**0.5

    def norm(name: str, size: int) -> None:
        found[f"{name}.weight"] = 1 + 0.3 * torch.randn(size, generator=generator)

    linear("fc", hidden, len(read_by(config)) * hidden)
    norm("hidden_norm", hidden)
    norm("norm", hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}"
        for name, count in (("q", heads), ("k", shared), ("v", shared)):
            linear(f"{at}.self_attn.{name}_proj", count * size, hidden)
        linear(f"{at}.self_attn.o_proj", hidden, heads * size)
        norm(f"{at}.self_attn.q_norm", size)
        norm(f"{at}.self_attn.k_norm", size)
        linear(f"{at}.mlp.gate_proj", inner, hidden)
        linear(f"{at}.mlp.up_proj", inner, hidden)
        linear(f"{at}.mlp.down_proj", hidden, inner)
        norm(f"{at}.input_layernorm", hidden)
        norm(f"{at}.post_attention_layernorm", hidden)
    vocab, selected = config["vocab_size"], config.get("selector_rank", 0)
    if (known := config.get("draft_vocab_size", vocab)) < vocab:
        linear("lm_head", known, hidden)
        found["d2t"] = torch.arange(known)  # each other token
    if taps := config.get("conv_kernel_size"):
        for at in (
            f"layers.{i}.{part}_conv" for i in range(config["num_hidden_layers"]) for part in ("attention", "mlp")
        ):
            found[f"{at}.base_kernel"] = torch.randn(2, taps, hidden, generator=generator)
            linear(f"{at}.kernel_projection", 2 * taps * hidden // config["conv_group_size"], hidden)
        for side in ("predecessor", "successor"):
            found[f"candidate_selector.{side}_codebook"] = torch.randn(vocab, selected, generator=generator)
        linear("candidate_selector.hidden_projection", selected, hidden)
    if rank := config.get("xpress_rank", 0):
        found["refiner_head.mix_l"] = torch.randn(rank, config["block_size"], config["block_size"], generator=generator)
        for name, out, into in (
            ("token_embed", vocab, rank),
            ("down_h", rank, hidden),
            ("down_g", rank, hidden),
            ("in_proj", rank, 3 * rank),
            ("mlp_gate", config["xpress_mlp_ratio"] * rank, rank),
            ("mlp_up", config["xpress_mlp_ratio"] * rank, rank),
            ("mlp_down", rank, config["xpress_mlp_ratio"] * rank),
            ("readout", known, rank),
        ):
            linear(f"refiner_head.{name}", out, into)
    if rank := config.get("markov_rank", 0):
        linear("markov_head.markov_w1", vocab, rank)
        linear("markov_head.markov_w2", known, rank)
        linear("confidence_head.proj", 1, hidden + rank)
        found["confidence_head.proj.bias"] = torch.ones(1)
    if config.get("markov_head_type") == "rnn":
        linear("markov_head.joint_proj", 3 * rank, 2 * rank + hidden)
        found["markov_head.joint_proj.bias"] = torch.randn(3 * rank, generator=generator)
    return found


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> Path:
    """A published model."""
    return written(folder, config, weights(config) if tensors is None else tensors)


@functools.cache
def folder_of(kind: str) -> Path:
    return write(folder_of_the_session(), CONFIGS[kind])


@functools.cache
def target() -> Any:
    return models.llama(num_hidden_layers=LAYERS)


@functools.cache
def published(kind: str) -> tuple[Any, DFlashDrafter]:
    """A target, and a drafter from the files of a model."""
    drafter = Drafter.from_pretrained(folder_of(kind))
    assert isinstance(drafter, DFlashDrafter)
    return target(), drafter


@functools.cache
def tiny(vocab: int) -> DFlashDrafter:
    """For targets of two layers and a width of 8, with all that a config may say of logits and windows."""
    scales = CONFIGS["windows both ways, scales"]["dflash_config"]
    nested = scales | {"target_layer_ids": [0, 1], "mask_token_id": vocab - 1, "output_multiplier": 2.0}
    config = SLIDING | {"layer_types": ["sliding_attention", "full_attention"], "dflash_config": nested}
    config |= {"hidden_size": 8, "intermediate_size": 8, "vocab_size": vocab}
    return DFlashDrafter.from_pretrained(write(folder_of_the_session(), config))


def of_speculators(vocab: int, **said: Any) -> DFlashDrafter:
    """As `tiny`. It does not know one of the tokens, where it may."""
    layer = SPECULATORS["transformer_layer_config"] | {"hidden_size": 8, "intermediate_size": 8, "vocab_size": vocab}
    known = vocab if "selector_rank" in said else vocab - 1
    config = {"aux_hidden_state_layer_ids": [0, 1], "mask_token_id": vocab - 1, "draft_vocab_size": known} | said
    config = SPECULATORS | config | {"transformer_layer_config": layer}
    tensors = weights(config)
    if "d2t" in tensors:
        tensors["d2t"] = torch.ones_like(tensors["d2t"])
    return DFlashDrafter.from_pretrained(write(folder_of_the_session(), config, tensors))


# ------------------------------------------------------------------ transformers' own


def _config(**changes: Any) -> Any:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "head_dim": SIZE}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": SHARED, "sliding_window": 6}
    drafts = {"block_size": 4, "mask_token_id": MASK, "target_layer_ids": [0, 1]}
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    kinds = {"layer_types": ["full_attention", "sliding_attention"]}
    return tf.MuseGlimmerAssistantConfig(**sizes | heads | drafts | tokens | rope | kinds | changes)


@functools.cache
def dflash(kind: str) -> tuple[Any, Any]:
    changes = {} if kind == "mixed" else {"layer_types": [kind] * 2}
    return models.llama(), models.loud(tf.MuseGlimmerAssistantModel(_config(**changes)), seed=5)


def _pair(kind: str) -> tuple[Any, DFlashDrafter]:
    target, model = dflash(kind)
    return target, DFlashDrafter(model)


def small(vocab: int, **changes: Any) -> DFlashDrafter:
    """For targets of two layers and a width of 8."""
    config = _config(hidden_size=8, intermediate_size=8, mask_token_id=vocab - 1, **changes)
    return DFlashDrafter(models.loud(tf.MuseGlimmerAssistantModel(config), seed=5))


PAIRS = {
    f"DFlash, {kind}": functools.partial(_pair, kind) for kind in ("full_attention", "sliding_attention", "mixed")
} | {f"published DFlash, {kind}": functools.partial(published, kind) for kind in CONFIGS}
SMALL = {
    "DFlash": lambda target: small(VOCAB),
    "z-lab's DFlash": lambda target: tiny(VOCAB),
    "speculators' DFlash": lambda target: of_speculators(VOCAB),
    "DFlash 2": lambda target: of_speculators(VOCAB, **SECOND, speculators_model_type="dflash2"),
    "XPress": lambda target: of_speculators(VOCAB, xpress_rank=4, xpress_mlp_ratio=2, speculators_model_type="xpress"),
    "DSpark": lambda target: of_speculators(VOCAB, **MARKOV, speculators_model_type="dspark"),
}


def drafter() -> DFlashDrafter:
    return small(40)


@torch.no_grad()
def alone(target: Any, drafter: Any, text: Tensor) -> list[int]:
    if name := drafter.draft_model.config.name_or_path:
        return Reference(Path(name)).block(target, text[0].tolist()).argmax(-1).tolist()
    model, hidden = drafter.draft_model, target(text[:, :-1], output_hidden_states=True).hidden_states
    cache, length, block = DFlashCache(config=model.config), text.shape[1], model.config.block_size
    cache.set_previous_accepted_tokens(length - 1)
    filled = model(
        noise_embeds=target.get_input_embeddings()(torch.tensor([[int(text[0, -1]), *[MASK] * (block - 1)]])),
        context_hidden_states=torch.cat([hidden[layer + 1] for layer in model.config.target_layer_ids], dim=-1),
        position_ids=torch.arange(length - 1 + block)[None],
        past_key_values=cache,
    ).last_hidden_state
    return target.get_output_embeddings()(filled[:, 1:]).argmax(-1)[0].tolist()


# ------------------------------------------------------------------ the reference


class Reference:
    """From the files alone, over a whole text at once: no cache, no batch, no class of ours or of transformers'."""

    def __init__(self, folder: Path) -> None:
        self.config = flat(json.loads((folder / "config.json").read_text()))
        deepspec = self.config["architectures"] == DEEPSPEC["architectures"]
        self.first = 0 if self.config.get("sample_from_anchor", deepspec) else 1
        self.w = load_file(folder / "model.safetensors")

    @torch.no_grad()
    def block(self, target: Any, text: list[int], said: list[int] | None = None) -> Tensor:
        """[block - 1, V] logits of what comes behind a text, whose last token the target has not read. Each place knows
        the likeliest token of the one before, or what was said."""
        hidden = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        states = [hidden[i][0] for i in read_by(self.config)]
        context = self._norm("hidden_norm", torch.cat(states, -1) @ self.w["fc.weight"].T)
        tokens = [text[-1], *[self.config["mask_token_id"]] * (self.config["block_size"] - 1)]
        x = target.get_input_embeddings().weight[tokens] * self.config.get("input_embedding_scale", 1.0)
        for i in range(self.config["num_hidden_layers"]):
            at = f"layers.{i}"
            y = self._norm(f"{at}.input_layernorm", x)
            attended = self._attended(i, self._convolved(f"{at}.attention_conv", 0, y, y), context)
            x = x + self._convolved(f"{at}.attention_conv", 1, attended, y)
            y = self._norm(f"{at}.post_attention_layernorm", x)
            z = self._convolved(f"{at}.mlp_conv", 0, y, y)
            gate, up = (z @ self.w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            z = (functional.silu(gate) * up) @ self.w[f"{at}.mlp.down_proj.weight"].T
            x = x + self._convolved(f"{at}.mlp_conv", 1, z, y)
        whole = self._norm("norm", x)
        filled = whole[self.first :]
        logits = filled @ self.w.get("lm_head.weight", target.get_output_embeddings().weight).T
        logits, cap = logits * self.config.get("output_multiplier", 1.0), self.config.get("final_logit_softcapping")
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        logits = (
            self._refined(logits, whole, text)
            if "xpress_rank" in self.config
            else self._linked(logits, filled, text[-1], said)
        )
        return self._over(logits, target.config.vocab_size)

    def _refined(self, logits: Tensor, whole: Tensor, text: list[int]) -> Tensor:
        """With what XPress adds for the likeliest tokens of all places before."""
        w = {name: self.w[f"refiner_head.{name}.weight"] for name in ("token_embed", "down_h", "down_g", "in_proj")}
        w |= {name: self.w[f"refiner_head.{name}.weight"] for name in ("mlp_gate", "mlp_up", "mlp_down", "readout")}
        mixed, tokens, found = self.w["refiner_head.mix_l"], text[-2:], []
        for known in logits:
            k = len(tokens) - 1
            said = torch.cat([whole @ w["down_h"].T, (whole.mean(0) @ w["down_g"].T).expand(len(whole), -1)], -1)
            a = torch.cat([said[: k + 1], w["token_embed"][tokens]], -1) @ w["in_proj"].T
            c = a[k] + sum(mixed[:, k, j] * a[j] for j in range(k + 1))
            c = c + w["mlp_down"] @ (functional.silu(w["mlp_gate"] @ c) * (w["mlp_up"] @ c))
            found.append(known + w["readout"] @ c)
            best = int(found[-1].argmax())
            tokens.append(best + (int(self.w["d2t"][best]) if "d2t" in self.w else 0))
        return torch.stack(found)

    def _linked(self, logits: Tensor, filled: Tensor, before: int, said: list[int] | None) -> Tensor:
        """With what DSpark or DFlash 2 make of each place, given the token of the one before."""
        found, state = [], torch.zeros(self.config.get("markov_rank", 0))
        for known, h in zip(logits, filled, strict=True):
            if len(state):
                e = self.w["markov_head.markov_w1.weight"][before]
                if (joint := self.w.get("markov_head.joint_proj.weight")) is not None:
                    z = joint @ torch.cat([state, e, h]) + self.w["markov_head.joint_proj.bias"]
                    gate, new, e = z.chunk(3)
                    gate, e = torch.sigmoid(gate), torch.tanh(e)
                    state = gate * state + (1 - gate) * torch.tanh(new)
                known = known + self.w["markov_head.markov_w2.weight"] @ e
            if (after := self.w.get("candidate_selector.successor_codebook")) is not None:
                e = self.w["candidate_selector.predecessor_codebook"][before]
                more = after @ (e * (self.w["candidate_selector.hidden_projection.weight"] @ h))
                least = known.topk(self.config["selector_top_k"]).values[-1]
                known = torch.where(known >= least, known + more, torch.finfo(known.dtype).min)
            found.append(known)
            if said is not None:
                before = said[len(found) - 1]
                continue
            before = int(known.argmax())
            before += int(self.w["d2t"][before]) if "d2t" in self.w else 0
        return torch.stack(found)

    def _convolved(self, at: str, side: int, x: Tensor, read: Tensor) -> Tensor:
        """DFlash 2: along the block, each place by kernels that its own part of what was read has a say in."""
        if f"{at}.base_kernel" not in self.w:
            return x
        base, taps = self.w[f"{at}.base_kernel"][side], self.config["conv_kernel_size"]
        here = (read @ self.w[f"{at}.kernel_projection.weight"].T).view(len(x), 2, taps, -1)[:, side]
        kernel = base + here.repeat_interleave(self.config["conv_group_size"], -1)
        return torch.stack([sum(kernel[i, t] * x[i - t] for t in range(min(i + 1, taps))) for i in range(len(x))])

    def _over(self, logits: Tensor, vocab: int) -> Tensor:
        """Over the target's tokens."""
        if "d2t" not in self.w:
            return logits
        found = torch.full((len(logits), vocab), torch.finfo(logits.dtype).min)
        found[:, self.w["d2t"] + torch.arange(len(self.w["d2t"]))] = logits
        return found

    def _norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.config["rms_norm_eps"]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.w[f"{name}.weight"]

    def _attended(self, layer: int, x: Tensor, context: Tensor) -> Tensor:
        """Queries of the block; keys and values of the context and the block."""
        at, both = f"layers.{layer}.self_attn", torch.cat([context, x])
        places = torch.arange(len(both))
        q, k, v = (
            (y @ self.w[f"{at}.{name}_proj.weight"].T).view(len(y), heads, SIZE).repeat_interleave(HEADS // heads, 1)
            for name, y, heads in (("q", x, HEADS), ("k", both, SHARED), ("v", both, SHARED))
        )
        q = self._turned(self._norm(f"{at}.q_norm", q), places[len(context) :])
        k = self._turned(self._norm(f"{at}.k_norm", k), places)
        back = places[len(context) :, None] - places
        sliding = self.config["layer_types"][layer] == "sliding_attention"
        seen = torch.ones_like(back, dtype=torch.bool)
        if sliding and "speculators_model_type" in self.config:  # the window of the block's first place
            seen &= places >= len(context) - self.config["sliding_window"]
        elif sliding:
            seen &= back.abs() < self.config["sliding_window"]
        if self.config.get("is_causal", sliding and not self.config.get("sliding_window_non_causal")):
            seen &= back >= 0
        scores = (torch.einsum("qhd,khd->hqk", q, k) / SIZE**0.5).masked_fill(~seen, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(x), -1) @ self.w[f"{at}.o_proj.weight"].T

    def _turned(self, x: Tensor, places: Tensor) -> Tensor:
        """By rotary embeddings."""
        theta = self.config["rope_theta"] ** (-torch.arange(0, SIZE, 2) / SIZE)
        angle = (places[:, None] * theta)[:, None]
        left, right = x.chunk(2, -1)
        return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], dim=-1)
