"""Small models and one drafter per type, for the tests of the Hub."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from head_pairs import HEADS
from hub_server import TOKEN, HubServer
from huggingface_hub import HfApi, constants
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_specdec import Drafter, StreamingDrafter
from hf_specdec.drafters.ngram import Level, NGramDrafter, NGramModel
from hf_specdec.hub.registry import drafter_class, drafter_types

ROOT = Path(__file__).parents[2]
PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])


def tiny_model(seed: int = 0, **sizes: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2} | sizes
    config = LlamaConfig(num_attention_heads=1, num_key_value_heads=1, eos_token_id=None, pad_token_id=0, **shape)
    return LlamaForCausalLM(config).eval()


ON_ANY_TARGET = [name for name in drafter_types() if name not in ("gemma4", "mtp")]
"""that one drafts with layers of its target's own (`test_heads.py`)"""


def tiny_ngram(vocab_size: int = 40) -> NGramDrafter:
    even = np.full(vocab_size, 1 / vocab_size, dtype=np.float32)
    keys = np.array([5 * vocab_size + 6, 6 * vocab_size + 7], dtype=np.int64)
    half = np.full(2, 0.5, dtype=np.float32)
    backoff = np.ones(vocab_size, dtype=np.float32)
    backoff[[5, 6]] = 0.5
    return NGramDrafter(
        NGramModel(even, backoff, [Level(keys, half, np.ones(2, dtype=np.float32))]), num_draft_tokens=2
    )


def drafter_of(name: str) -> Drafter:
    """One drafter of each registered type."""
    cls = drafter_class(name)
    if cls is NGramDrafter:
        return tiny_ngram()
    if cls in HEADS:
        return HEADS[cls].drafter()
    options: dict[str, Any] = {}
    if "worker" in cls.config_class.options():
        options = {"worker": "thread"}  # a process takes long to start
    if cls is StreamingDrafter:
        options = {"hidden_size": tiny_model().config.hidden_size, "num_streams": 2}
    drafter = cls(*[tiny_model(seed=1)] * cls.takes_draft_model, **options)
    drafter.load_weights(drafter.weights())  # random weights will do: the text does not depend on the draft
    return drafter


def generate(target: PreTrainedModel, **kwargs: Any) -> list[int]:
    return target.generate(PROMPT, max_new_tokens=12, do_sample=False, **kwargs)[0].tolist()


@contextmanager
def hub_of_our_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub, and an empty cache. What HF_ENDPOINT and HF_HOME set on import is set here afterwards."""
    with HubServer(folder / "hub") as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
        yield server


def push_model(model: PreTrainedModel, repo_id: str) -> None:
    """A model into a repo of its own; transformers' own way to push remembers the first Hub that it has met."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        api = HfApi(endpoint=constants.ENDPOINT, token=TOKEN)
        api.create_repo(repo_id, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder)
