"""A drafter's settings in the words of serving engines that have speculative decoding of their own.

Engines draft chains of a fixed length and know nothing of a budget: what a drafter decides round by round becomes a
number here. Names as in vLLM 0.19 (`SpeculativeConfig`) and SGLang 0.5 (its `--speculative-...` flags).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import DrafterConfig
from ..errors import SpeculationError
from ..generate import OWN_MODELS
from ..hub.files import read_json

AUTO = 4
"""γ for an engine, where the drafter chooses it by itself"""

Settings = dict[str, Any]


def translated(config: DrafterConfig, engine: str, draft: str | None) -> str:
    """What an engine is told to draft as a drafter of this config does.

    Args:
        engine: one of `ENGINES`.
        draft: repo or folder of the draft model, where it needs one.

    Returns:
        For vLLM the JSON of `--speculative-config`, for SGLang flags of its server.

    Raises:
        SpeculationError: there is no such engine, it has no such way of drafting, or cannot load the draft model.
    """
    if engine not in ENGINES:
        raise SpeculationError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    known = ENGINES[engine]
    if config.drafter_type not in known:
        raise SpeculationError(
            f"{engine} has no equivalent of speculation_type={config.drafter_type!r}; these can be translated: "
            f"{', '.join(known)}"
        )
    return known[config.drafter_type](config, draft)


def _vllm_ngram(config: Any, _: str | None) -> str:
    settings: Settings = {"method": "ngram", "num_speculative_tokens": config.max_draft_tokens}
    return json.dumps(settings | {"prompt_lookup_min": config.min_match, "prompt_lookup_max": config.max_match})


def _vllm_suffix(config: Any, _: str | None) -> str:
    settings: Settings = {
        "method": "suffix",
        "num_speculative_tokens": config.max_draft_tokens,
        "suffix_decoding_max_tree_depth": config.max_match + config.max_draft_tokens,
        "suffix_decoding_max_spec_factor": float(config.tokens_per_match),
        "suffix_decoding_min_token_prob": config.min_probability,
    }
    return json.dumps(settings)


def _vllm_draft(config: Any, draft: str | None) -> str:
    return json.dumps({"method": "draft_model", "model": _named(draft), "num_speculative_tokens": _window(config)})


def _sglang_ngram(config: Any, _: str | None) -> str:
    return _flags(
        {
            "algorithm": "NGRAM",
            "num-draft-tokens": config.max_draft_tokens + 1,  # the last accepted token is counted there
            "ngram-max-bfs-breadth": config.num_branches,
            "ngram-max-trie-depth": config.max_match + config.max_draft_tokens,
        }
    )


def _sglang_draft(config: Any, draft: str | None) -> str:
    gamma = _window(config)
    flags: Settings = {"algorithm": "STANDALONE", "draft-model-path": _named(draft), "num-steps": gamma}
    return _flags(flags | {"eagle-topk": 1, "num-draft-tokens": gamma + 1})


ENGINES: dict[str, dict[str, Callable[[Any, str | None], str]]] = {
    "vllm": {"draft_model": _vllm_draft, "prompt_lookup": _vllm_ngram, "suffix": _vllm_suffix},
    "sglang": {"draft_model": _sglang_draft, "prompt_lookup": _sglang_ngram, "suffix": _sglang_ngram},
}


def _flags(settings: Settings) -> str:
    return " ".join(f"--speculative-{name} {value}" for name, value in settings.items())


def _window(config: Any) -> int:
    return AUTO if config.num_draft_tokens == "auto" else int(config.num_draft_tokens)


def _named(draft: str | None) -> str:
    if draft is None:
        raise SpeculationError("the engine loads the draft model itself; name its repo or folder with --draft")
    if (Path(draft) / "config.json").is_file():
        kind = read_json(Path(draft), "config.json").get("model_type")
        if kind in OWN_MODELS:
            raise SpeculationError(
                f"{draft} is a {kind} model, which the engines cannot load; name a draft of the target's own "
                "architecture"
            )
    return draft
