"""The command that starts a serving engine with what a drafter does, in the words of the engine's own options.

Engines draft chains of a fixed length and know nothing of a budget: what a drafter decides round by round becomes a
number here. Names as in vLLM 0.33.0 (`vllm/config/speculative.py`) and SGLang 0.5.23
(`sglang/srt/arg_groups/fields/spec.py`).
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..config import DrafterConfig
from ..errors import SpeculationError, meant

AUTO = 4
"""γ for an engine, where the drafter chooses it by itself"""
SPECULATORS = "speculators"
"""a format of heads, which vLLM loads"""
ANY_TARGET = "your/target"
"""Stands for the target in the command of a drafter that fits any."""


@dataclass(frozen=True)
class EngineDraft:
    """The draft model as an engine is told of it."""

    model: str
    """a folder, or a repo on the Hub"""
    revision: str | None = None
    """of a repo; None is its main branch"""


Settings = dict[str, Any]


def start_command(config: DrafterConfig, engine: str, draft: EngineDraft | None) -> str:
    """What starts an engine that drafts as a drafter of this config does.

    Args:
        config: one that passed `check_known`.
        draft: for drafters of the types `draft_model` and `eagle3`.
    """
    target = target_name(config) or ANY_TARGET
    settings = ENGINES[engine][config.drafter_type](config, draft)
    if engine != "sglang":
        return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(settings)])
    flags = [word for name, value in settings.items() for word in (f"--speculative-{name}", str(value))]
    return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", target, *flags])


def target_name(config: DrafterConfig) -> str | None:
    """The target that a drafter was saved with, where it was."""
    return (config.target or {}).get("name")


def check_known(config: DrafterConfig, engine: str) -> None:
    """
    Raises:
        SpeculationError: there is no such engine, or it has no such way of drafting.
    """
    if engine not in ENGINES:
        raise SpeculationError(f"--to must be one of {', '.join(ENGINES)}, got {engine!r}{meant(engine, ENGINES)}")
    kind, has = config.drafter_type, ENGINES[engine]
    if kind in has:
        return
    reason = f"{engine} has nothing like a {kind!r} drafter (it has {', '.join(has)})"
    instead = INSTEAD.get(kind, "prompt_lookup or suffix, which need no model")
    if engine == SPECULATORS:
        reason = f"{engine} is a format of heads, of which EAGLE-3's are written; this drafter is of type {kind!r}"
        instead = "it with --to vllm" if kind in ENGINES["vllm"] else f"{instead} (--to vllm)"
    raise SpeculationError(f"{reason}; export {instead}")


def _vllm_ngram(config: Any, _: EngineDraft | None) -> Settings:
    return {
        "method": "ngram",
        "num_speculative_tokens": config.max_draft_tokens,
        "prompt_lookup_min": config.min_match,
        "prompt_lookup_max": config.max_match,
    }


def _vllm_suffix(config: Any, _: EngineDraft | None) -> Settings:
    return {
        "method": "suffix",
        "num_speculative_tokens": config.max_draft_tokens,
        "suffix_decoding_max_tree_depth": config.max_match + config.max_draft_tokens,
        "suffix_decoding_max_spec_factor": float(config.tokens_per_match),
        "suffix_decoding_min_token_prob": config.min_probability,
    }


def _vllm_draft(config: Any, draft: EngineDraft | None) -> Settings:
    assert draft is not None
    pinned = {} if draft.revision is None else {"revision": draft.revision}
    model = {"method": "draft_model", "model": draft.model} | pinned
    return model | {"num_speculative_tokens": _window(config)}


def _vllm_eagle(config: Any, draft: EngineDraft | None) -> Settings:
    return _vllm_draft(config, draft) | {"method": "eagle3"}


def _sglang_ngram(config: Any, _: EngineDraft | None) -> Settings:
    return {
        "algorithm": "NGRAM",
        "num-draft-tokens": config.max_draft_tokens + 1,  # the last accepted token is counted there
        "ngram-max-bfs-breadth": config.num_branches,
        "ngram-max-trie-depth": config.max_match + config.max_draft_tokens,
    }


def _sglang_draft(config: Any, draft: EngineDraft | None) -> Settings:
    assert draft is not None
    gamma = _window(config)
    pinned = {} if draft.revision is None else {"draft-model-revision": draft.revision}
    model = {"algorithm": "STANDALONE", "draft-model-path": draft.model} | pinned
    return model | {"num-steps": gamma, "eagle-topk": 1, "num-draft-tokens": gamma + 1}


def _sglang_eagle(config: Any, draft: EngineDraft | None) -> Settings:
    return _sglang_draft(config, draft) | {"algorithm": "EAGLE3"}


ENGINES: dict[str, dict[str, Callable[[Any, EngineDraft | None], Settings]]] = {
    "vllm": {
        "draft_model": _vllm_draft,
        "eagle3": _vllm_eagle,
        "prompt_lookup": _vllm_ngram,
        "suffix": _vllm_suffix,
    },
    "sglang": {
        "draft_model": _sglang_draft,
        "eagle3": _sglang_eagle,
        "prompt_lookup": _sglang_ngram,
        "suffix": _sglang_ngram,
    },
    SPECULATORS: {"eagle3": _vllm_eagle},
}
"""by engine and `drafter_type`"""

ITS_DRAFT = "its draft model alone: draft_model with --draft FOLDER"
ITS_HEADS = "nothing: name the head's own repo to the engine, which loads such heads itself"
INSTEAD = dict.fromkeys(("hybrid", "disco", "pearl"), ITS_DRAFT) | dict.fromkeys(
    ("block_diffusion", "gemma4", "mtp"), ITS_HEADS
)
"""what comes nearest to a drafter that no engine has"""


def _window(config: Any) -> int:
    return AUTO if config.num_draft_tokens == "auto" else int(config.num_draft_tokens)
