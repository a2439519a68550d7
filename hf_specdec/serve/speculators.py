"""An EAGLE-3 head → a folder in the format of `speculators`, which that package and vLLM load.

Names as in speculators 0.9.0 (`config.py`, `models/eagle3/`, `proposals/greedy.py`). The format holds heads only.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ..drafters.heads.eagle_format import FLAGS, NESTED
from ..drafters.heads.eagle_model import LAYER_IDS, LlamaForCausalLMEagle3
from ..drafters.heads.fields import of_speculators
from ..drafters.heads.loading import write_files


def write_head(head: LlamaForCausalLMEagle3, folder: Path, target: str | None, num_tokens: int) -> None:
    """Write `config.json` and `model.safetensors`.

    Args:
        target: the model that verifies, a Hub repo or a folder; None leaves it open.
        num_tokens: drafted per round.

    Raises:
        OSError: the folder cannot be written.
    """
    weights = {_their_name(name): tensor for name, tensor in head.state_dict().items()}
    if bool(head.t2d.all()) and not bool(head.d2t.any()):  # it knows each token by the target's own id
        del weights["d2t"], weights["t2d"]
    write_files(folder, _config(head, target, num_tokens), weights)


def _their_name(name: str) -> str:
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def _config(head: LlamaForCausalLMEagle3, target: str | None, num_tokens: int) -> dict[str, Any]:
    flags = {name: head.of_config(name, False) for name in FLAGS}
    sizes = {"draft_vocab_size": len(head.d2t), "target_hidden_size": head.of_config("target_hidden_size", None)}
    return of_speculators("eagle3", num_tokens, target) | {
        "architectures": ["Eagle3DraftModel"],
        "dtype": str(head.dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        LAYER_IDS: head.of_config(LAYER_IDS, None),
        **flags,
        **sizes,
        NESTED: _layer(head.config),
    }


def _layer(config: PreTrainedConfig) -> dict[str, Any]:
    """What is a Llama's or a Qwen3's own in a head's config."""
    beside = (*FLAGS, LAYER_IDS, "eagle_config", "architectures")
    return {name: value for name, value in config.to_diff_dict().items() if name not in beside}
