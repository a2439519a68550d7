"""Small EAGLE-3 heads with random weights, written as others publish theirs, and a slow reference of their drafts."""

import functools
import json
from pathlib import Path
from typing import Any

import models
import torch
from processes import folder_of_the_session
from published import written
from safetensors.torch import load_file
from sampled_triples import VOCAB as FEW
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig

from hf_specdec import Drafter, EagleDrafter
from hf_specdec.drafters.heads.eagle_model import LlamaForCausalLMEagle3

HIDDEN, HEADS, SHARED, SIZE, INNER, VOCAB, KNOWN = 32, 4, 2, 8, 48, models.VOCAB, 40
EPS = 1e-5
LAYERS = 7
"""of the target"""
LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": SHARED,
    "head_dim": SIZE,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
SHORT = LAYER | {"max_position_embeddings": 6}
"""of a head that was made for shorter texts than its target"""
SAFEAILAB = LAYER | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": KNOWN, "rope_scaling": None}
SGLANG = LAYER | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": KNOWN,
    "rope_theta": 500.0,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]},
}
SPECULATORS: dict[str, Any] = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": KNOWN,
    "norm_before_residual": False,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": None,
    "transformer_layer_config": LAYER,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": None}},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "SafeAILab": SAFEAILAB,
    "SGLang, its own embeddings": SGLANG,
    "all tokens, biases": SGLANG | {"draft_vocab_size": VOCAB, "attention_bias": True, "eagle_config": None},
    "speculators": SPECULATORS
    | {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 6], "norm_before_fc": True},
    "EAGLE-3.1, Qwen3, two layers": SPECULATORS
    | {"fc_norm": True, "norm_output": True}
    | {"transformer_layer_config": SHORT | {"model_type": "qwen3", "num_hidden_layers": 2, "rope_theta": 1000.0}},
    "P-EAGLE": SPECULATORS
    | {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": VOCAB - 1}
    | {"norm_before_fc": True, "transformer_layer_config": SHORT | {"num_hidden_layers": 2}},
}


def weights(config: dict[str, Any], seed: int = 3) -> dict[str, Tensor]:
    """Named as in the files of the config's format."""
    layer = config.get("transformer_layer_config", config)
    nested, generator = layer is not config, torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}

    def linear(name: str, out: int, into: int, bias: bool = False) -> None:
        found[f"{name}.weight"] = torch.randn(out, into, generator=generator) * 1.5 / into**0.5
        if bias:
            found[f"{name}.bias"] = torch.randn(out, generator=generator)

    def norm(name: str, size: int = HIDDEN) -> None:
        found[f"{name}.weight"] = 1 + 0.3 * torch.randn(size, generator=generator)

    linear("fc", HIDDEN, 3 * HIDDEN)
    for i in range(layer["num_hidden_layers"]):
        at, into = "midlayer" if not nested else f"layers.{i}", HIDDEN if i else 2 * HIDDEN
        for name, heads in (("q", HEADS), ("k", SHARED), ("v", SHARED)):
            linear(f"{at}.self_attn.{name}_proj", heads * SIZE, into, layer.get("attention_bias", False))
        linear(f"{at}.self_attn.o_proj", HIDDEN, HEADS * SIZE, layer.get("attention_bias", False))
        if layer["model_type"] == "qwen3":
            norm(f"{at}.self_attn.q_norm", SIZE)
            norm(f"{at}.self_attn.k_norm", SIZE)
        linear(f"{at}.mlp.gate_proj", INNER, HIDDEN)
        linear(f"{at}.mlp.up_proj", INNER, HIDDEN)
        linear(f"{at}.mlp.down_proj", HIDDEN, INNER)
        norm(f"{at}.input_layernorm")
        norm(f"{at}.post_attention_layernorm")
        if not i:
            norm(f"{at}.hidden_norm")
    norm("norm")
    if config.get("norm_before_fc"):
        norm("input_norm", 3 * HIDDEN)
    for i in range(3 if config.get("fc_norm") else 0):
        norm(f"fc_norm.{i}")
    if "mask_token_id" in config:
        found["mask_hidden"] = torch.randn(1, 1, 3 * HIDDEN, generator=generator)
    linear("lm_head", config["draft_vocab_size"], HIDDEN)
    if "rope_theta" in config:
        linear("embed_tokens", VOCAB, HIDDEN)
    if config["draft_vocab_size"] < VOCAB:
        tokens = torch.randperm(VOCAB, generator=generator)[:KNOWN].sort().values
        found["d2t"] = tokens - torch.arange(KNOWN)
        found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, tokens, True)
    return found


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> Path:
    """A published head."""
    return written(folder, config, weights(config) if tensors is None else tensors)


@functools.cache
def folder_of(kind: str) -> Path:
    return write(folder_of_the_session(), CONFIGS[kind])


@functools.cache
def target() -> Any:
    return models.llama(num_hidden_layers=LAYERS)


@functools.cache
def eagle(kind: str) -> tuple[Any, EagleDrafter]:
    """A target, and a drafter from the files of a head."""
    drafter = Drafter.from_pretrained(folder_of(kind), num_draft_tokens=3)
    assert isinstance(drafter, EagleDrafter)
    return target(), drafter


def tiny(vocab: int, known: int, hidden: int = 8, **more: Any) -> LlamaForCausalLMEagle3:
    """For targets of two layers."""
    sizes = {"hidden_size": hidden, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": None}
    read = {"draft_vocab_size": known, "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        head = LlamaForCausalLMEagle3(LlamaConfig(vocab_size=vocab, **sizes, **heads, **read, **more))
    head.know(torch.arange(vocab)[-known:])
    return head.eval().requires_grad_(False)


PAIRS = {f"EAGLE-3, {kind}": functools.partial(eagle, kind) for kind in CONFIGS}


def _small(target: Any, **read: Any) -> EagleDrafter:
    """Which does not know one of the tokens."""
    return EagleDrafter(models.loud(tiny(FEW, known=FEW - 1, **read), seed=4), num_draft_tokens=2)


SMALL = {"EAGLE-3": _small, "P-EAGLE": functools.partial(_small, mask_token_id=FEW - 1)}


def drafter() -> EagleDrafter:
    return EagleDrafter(tiny(40, known=30))


def alone(target: Any, drafter: Any, text: Tensor) -> list[int]:
    reference = Reference(Path(drafter.draft_model.config.name_or_path))
    logits = reference.chain(target, text[0].tolist(), drafter.config.num_draft_tokens)
    return [int(each.argmax()) for each in logits]


# ------------------------------------------------------------------ the reference


class Reference:
    """From the files alone, over a whole text at once: no cache, no batch, no class of ours or of transformers'."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.flags, self.layer = config, config.get("transformer_layer_config", config)
        self.w = load_file(folder / "model.safetensors")
        ids, inner = config.get("eagle_aux_hidden_state_layer_ids"), (config.get("eagle_config") or {})
        if ids is None and inner:
            ids = [i + 1 for i in inner["eagle_aux_hidden_state_layer_ids"]]
        self.states = ids or [2, LAYERS // 2, LAYERS - 3]

    @torch.no_grad()
    def chain(self, target: Any, text: list[int], steps: int, said: list[int] | None = None) -> list[Tensor]:
        """Logits [V] of each step behind a text, of which the next ones go on from the likeliest token, or from what
        was said."""
        table = self.w.get("embed_tokens.weight", target.get_input_embeddings().weight)
        hidden = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        read, tokens, found = [hidden[i][0] for i in self.states], text[1:], []
        if "mask_hidden" in self.w:  # all places at once
            masks = self.w["mask_hidden"][0].expand(steps - 1, -1).chunk(3, -1)
            read = [torch.cat([state, mask]) for state, mask in zip(read, masks, strict=True)]
            a = self._layers(self._fused(read), table[[*tokens, *[self.flags["mask_token_id"]] * (steps - 1)]])
            return [self._logits(self._norm("norm", each)) for each in a[-steps:]]
        g = self._fused(read)
        for _ in range(steps):
            a = self._layers(g, table[tokens])
            normed = self._norm("norm", a[-1])
            logits = self._logits(normed)
            found.append(logits)
            g = torch.cat([g, (normed if self.flags.get("norm_output") else a[-1])[None]])
            tokens = [*tokens, int(logits.argmax()) if said is None else said[len(found) - 1]]
        return found

    def _logits(self, normed: Tensor) -> Tensor:
        """[V] over the target's tokens."""
        known = normed @ self.w["lm_head.weight"].T
        logits = torch.full((VOCAB,), torch.finfo(torch.float32).min)
        logits[torch.arange(len(known)) + self.w.get("d2t", torch.zeros(1)).long()] = known
        return logits

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.layer["rms_norm_eps"]) * self.w[f"{name}.weight"]

    def _fused(self, states: list[Tensor]) -> Tensor:
        if self.flags.get("fc_norm"):
            states = [self._norm(f"fc_norm.{i}", state) for i, state in enumerate(states)]
        fused = torch.cat(states, -1)
        return (self._norm("input_norm", fused) if self.flags.get("norm_before_fc") else fused) @ self.w["fc.weight"].T

    def _layers(self, g: Tensor, e: Tensor) -> Tensor:
        first = "layers.0" if "layers.0.input_layernorm.weight" in self.w else "midlayer"
        normed = self._norm(f"{first}.hidden_norm", g)
        kept = normed if self.flags.get("norm_before_residual") else g
        a = self._rest(first, torch.cat([self._norm(f"{first}.input_layernorm", e), normed], -1), kept)
        for i in range(1, self.layer["num_hidden_layers"]):
            a = self._rest(f"layers.{i}", self._norm(f"layers.{i}.input_layernorm", a), a)
        return a

    def _rest(self, at: str, x: Tensor, kept: Tensor) -> Tensor:
        a = kept + self._attended(f"{at}.self_attn", x)
        x = self._norm(f"{at}.post_attention_layernorm", a)
        gate, up = (x @ self.w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return a + (functional.silu(gate) * up) @ self.w[f"{at}.mlp.down_proj.weight"].T

    def _attended(self, at: str, x: Tensor) -> Tensor:
        length = len(x)
        split = {}
        for name, heads in (("q", HEADS), ("k", SHARED), ("v", SHARED)):
            y = x @ self.w[f"{at}.{name}_proj.weight"].T + self.w.get(f"{at}.{name}_proj.bias", torch.zeros(1))
            y = y.view(length, heads, SIZE)
            if f"{at}.{name}_norm.weight" in self.w:
                y = self._norm(f"{at}.{name}_norm", y)
            split[name] = (y if name == "v" else self._turned(y)).repeat_interleave(HEADS // heads, 1)
        scores = torch.einsum("qhd,khd->hqk", split["q"], split["k"]) / SIZE**0.5
        within = torch.ones(length, length).tril().triu(1 - self.layer["max_position_embeddings"]).bool()
        scores = scores.masked_fill(~within, -torch.inf)
        seen = torch.einsum("hqk,khd->qhd", scores.softmax(-1), split["v"]).reshape(length, HEADS * SIZE)
        return seen @ self.w[f"{at}.o_proj.weight"].T + self.w.get(f"{at}.o_proj.bias", torch.zeros(1))

    def _turned(self, x: Tensor) -> Tensor:
        """By rotary embeddings."""
        base = self.layer.get("rope_parameters", self.layer).get("rope_theta", 10000.0)
        theta = base ** (-torch.arange(0, SIZE, 2) / SIZE)
        angle = (torch.arange(len(x))[:, None] * theta)[:, None]
        left, right = x.chunk(2, -1)
        return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], dim=-1)
