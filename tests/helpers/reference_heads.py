"""Small heads of `speculators` with random weights, and what its own classes make of them: the files in
`tests/drafters/reference`.

    python tests/helpers/reference_heads.py  # with speculators 0.9.0 installed

Each file holds the weights as they are published, the published config in its metadata, and named `told.*`: the table
of the target `embeddings` [V, H], `states` [T, n H] that are read of it, `tokens` [T], and `logits` [A, L, K] of blocks
at the places `anchors` [A], each place given the tokens before it; of DSpark also `confidence` [A, L], as logits.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.xpress import XPressDraftModel, XPressSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

FOLDER = Path(__file__).parent.parent / "drafters" / "reference"
VOCAB, HIDDEN, LENGTH, BLOCK = 32, 16, 14, 4
ANCHORS = [3, 6, 9]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "attn_implementation": "eager",
}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
SLIDING |= {"use_sliding_window": True}
KINDS: dict[str, tuple[type, type, dict[str, Any], dict[str, Any]]] = {
    "dflash": (DFlashDraftModel, DFlashSpeculatorConfig, {}, SLIDING),
    "dflash-all": (
        DFlashDraftModel,
        DFlashSpeculatorConfig,
        {"draft_vocab_size": VOCAB, "sample_from_anchor": True, "sliding_window_non_causal": True},
        SLIDING,
    ),
    "dflash2": (
        DFlash2DraftModel,
        DFlash2SpeculatorConfig,
        {
            "draft_vocab_size": VOCAB,
            "conv_kernel_size": 3,
            "conv_group_size": 4,
            "selector_rank": 4,
            "selector_top_k": 6,
        },
        SLIDING,
    ),
    "peagle": (
        PEagleDraftModel,
        PEagleSpeculatorConfig,
        {"norm_before_residual": True, "norm_before_fc": True},
        SLIDING,
    ),
    "xpress": (XPressDraftModel, XPressSpeculatorConfig, {"xpress_rank": 4}, {}),
    "xpress-anchor": (XPressDraftModel, XPressSpeculatorConfig, {"xpress_rank": 4, "sample_from_anchor": True}, {}),
    "dspark": (DSparkDraftModel, DSparkSpeculatorConfig, {"markov_rank": 4}, {}),
    "dspark-gated": (
        DSparkDraftModel,
        DSparkSpeculatorConfig,
        {
            "markov_head_type": "gated",
            "markov_rank": 4,
            "sample_from_anchor": False,
            "confidence_head_with_markov": False,
        },
        {},
    ),
    "dspark-rnn": (
        DSparkDraftModel,
        DSparkSpeculatorConfig,
        {"markov_head_type": "rnn", "markov_rank": 4, "draft_vocab_size": VOCAB},
        {},
    ),
}


def made(kind: str, folder: Path) -> tuple[Any, torch.Tensor]:
    """A model, which is written into the folder, and the target's table."""
    model_class, config_class, said, layer = KINDS[kind]
    read = (
        {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]} if kind == "peagle" else {"aux_hidden_state_layer_ids": [0, 2]}
    )
    said = {"draft_vocab_size": 20} | ({} if kind == "peagle" else {"block_size": BLOCK}) | read | said
    verifier = VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"])
    config = config_class(
        **said | {"mask_token_id": VOCAB - 1, "transformer_layer_config": Qwen3Config(**SIZES | layer)},
        speculators_config=SpeculatorsConfig(
            algorithm=kind.partition("-")[0],
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
    )
    config.transformer_layer_config._attn_implementation = "eager"
    torch.manual_seed(4)
    model = model_class(config).eval()
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape)
        weight.data = (1 + 0.3 * noise if "norm" in name else noise * 1.5 / weight.shape[-1] ** 0.5).bfloat16().float()
    table = model.embed_tokens.weight.detach().clone()
    if model.use_draft_vocab:
        known = torch.arange(VOCAB)[-config.draft_vocab_size :] - torch.arange(config.draft_vocab_size)
        model.d2t.copy_(known)
        model.t2d[-config.draft_vocab_size :] = True
    else:
        model.lm_head.weight.data.copy_(table)
    model.save_pretrained(folder)
    return model, table


@torch.no_grad()
def computed_at_depths(model: Any, states: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same of P-EAGLE, which takes with each state the token behind it."""
    module, found, last = sys.modules[type(model).__module__], [], torch.tensor(ANCHORS) - 1
    first = torch.cat([torch.arange(LENGTH), last.repeat(BLOCK - 1)])
    depth = torch.cat([torch.zeros(LENGTH, dtype=torch.long), torch.arange(1, BLOCK).repeat_interleave(len(last))])
    before = module.generate_cod_sample_indices, module.compute_metrics
    module.generate_cod_sample_indices = lambda **told: (first, depth)
    module.compute_metrics = lambda logits, **told: (found.append(logits[0]), {})
    try:
        last_states, documents = torch.zeros(1, LENGTH, HIDDEN), torch.zeros(1, LENGTH, dtype=torch.long)
        model(states[None], tokens.roll(-1)[None], documents, verifier_last_hidden_states=last_states)
    finally:
        module.generate_cod_sample_indices, module.compute_metrics = before
    at_depths = [found[0][last], *found[0][LENGTH:].view(BLOCK - 1, len(ANCHORS), -1)]
    return {"logits": torch.stack(at_depths, 1)}


@torch.no_grad()
def computed(model: Any, states: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """What its training computes of the blocks."""
    mask = torch.zeros(1, LENGTH)
    mask[0, ANCHORS] = 1
    found: dict[str, torch.Tensor] = {}
    module = sys.modules[type(model).__module__]
    before = module.compute_metrics

    def compute_metrics(logits: torch.Tensor, targets: torch.Tensor, *rest: Any, **more: Any) -> tuple[None, dict]:
        found["logits"] = logits.view(len(ANCHORS), BLOCK, -1)
        if hasattr(model, "confidence_head"):
            found["confidence"] = rest[0].view(len(ANCHORS), BLOCK)
        return None, {}

    if hasattr(model, "candidate_selector"):
        selector, score = model.candidate_selector, model.candidate_selector.score_candidates

        def selected(logits: torch.Tensor, filled: torch.Tensor, before: torch.Tensor, ids: Any) -> torch.Tensor:
            likeliest = logits.topk(selector.top_k).indices
            lowest = torch.full_like(logits, torch.finfo(logits.dtype).min)
            compute_metrics(lowest.scatter(-1, likeliest, score(logits, filled, before, likeliest)), logits)
            return score(logits, filled, before, ids)

        selector.score_candidates = selected
        module.compute_metrics = lambda **told: (None, {})
    else:
        module.compute_metrics = compute_metrics
    try:
        last = torch.zeros(1, LENGTH, HIDDEN)
        documents = torch.zeros(1, LENGTH, dtype=torch.long)
        model(states[None], tokens[None], mask, last, documents, max_anchors=len(ANCHORS))
    finally:
        module.compute_metrics = before
    return found


def write(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, table = made(kind, Path(folder))
        weights = load_file(Path(folder) / "model.safetensors")
        config = json.loads((Path(folder) / "config.json").read_text())
    states = torch.randn(LENGTH, model.fc.in_features)
    tokens = torch.randint(0, VOCAB - 1, (LENGTH,))
    told = {"embeddings": table, "states": states, "tokens": tokens, "anchors": torch.tensor(ANCHORS)}
    told |= (computed_at_depths if kind == "peagle" else computed)(model, states, tokens)
    stored = {n: w.bfloat16() if w.is_floating_point() else w for n, w in weights.items()}
    stored |= {f"told.{name}": tensor.contiguous() for name, tensor in told.items()}
    save_file(stored, FOLDER / f"{kind}.safetensors", metadata={"config": json.dumps(config)})


if __name__ == "__main__":
    for kind in KINDS:
        write(kind)
