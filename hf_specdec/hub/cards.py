"""The model card of a drafter: metadata for the Hub, the code to use it, and what was measured."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypedDict

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..config import DrafterConfig
from ..options import default_of, in_short, is_trained
from .draft import is_embedded
from .measured import measured_section
from .registry import Storable, drafter_class

REPO_PLACEHOLDER = "ORG/NAME"
"""Stands for the repo in a card that was not pushed yet."""

MEASURED = "## Measured"

SUMMARIES = {
    "prompt_lookup": "Copies what followed an earlier occurrence of the last tokens; no draft model, any target.",
    "ngram": "Draws from an n-gram model over token ids; no forward pass, for targets with this tokenizer.",
    "suffix": "Copies from an index over the prompt and past outputs; no draft model, any target.",
    "auto": "Chooses what drafts for a target: what it brings, what is known for it, else copies and past outputs.",
    "hybrid": "Merges copies of earlier text and a small model's tokens into one tree.",
    "draft_model": "A small model drafts and the target verifies (speculative sampling, Leviathan et al. 2023).",
    "disco": "A small model drafts, and a classifier decides after every token whether to go on (DISCO, 2024).",
    "pearl": "A small model drafts while the target verifies (PEARL, 2024).",
    "gemma4": "A small model that looks at the target's own keys and values drafts a chain (Gemma 4's assistants).",
    "eagle3": "A layer over the target's low, middle and high states drafts a chain (EAGLE-3, Li et al. 2025).",
    "streaming": "The target drafts for itself, by trained streams in its upper layers (Bhendawade et al. 2024).",
}


class CardInfo(TypedDict, total=False):
    """What a model card says beside what the config does."""

    license: str | None
    """as the Hub names it: apache-2.0, for example"""
    datasets: list[str] | None
    """ids of data sets on the Hub that the drafter was trained on"""
    trained_on: str | None
    """a sentence on the training"""
    results: str | Path | None
    """a result file of `hf-specdec bench`"""


UNKNOWN_TRAINING = "Not stated. The argument `trained_on` of `save_pretrained` fills this in."


def make_card(
    config: dict[str, Any],
    *,
    license: str | None = None,
    datasets: list[str] | None = None,
    trained_on: str | None = None,
) -> str:
    """The text of `README.md`.

    Args:
        config: the content of `config.json`.
        license: as the Hub names it, such as "apache-2.0".
        datasets: ids of data sets on the Hub that the drafter was trained on.
        trained_on: a sentence on the training, for readers.
    """
    name, target = config["drafter_type"], (config.get("target") or {}).get("name")
    draft, base = config.get("draft_model"), target if _is_repo_id(target) else None
    data = ModelCardData(
        library_name="hf_specdec",
        pipeline_tag="text-generation",
        license=license,
        base_model=base,
        datasets=datasets,
        tags=["hf_specdec", "speculative-decoding", name],
    )
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {REPO_PLACEHOLDER}",
        f"A `{name}` drafter for [speculative decoding](https://arxiv.org/abs/2211.17192) in `model.generate`: "
        f"fewer target calls, the same text. {SUMMARIES.get(name, '')}".rstrip(),
        "## Use",
        _usage(name, base or "your/target", config.get("mode") == "tuned"),
        "## Target",
        _made_for(config),
        *(["## Draft model", draft_sentence(draft)] if draft else []),
        *_options(config),
        "## Trained on",
        trained_on or _unknown_training(name, draft),
        MEASURED,
        f"No figures yet. Measure your own prompts, and push the result with `--results results.json`:\n\n```sh\n"
        f"hf-specdec bench --target {base or 'your/target'} --drafter {REPO_PLACEHOLDER} \\\n"
        "  --prompts prompts.jsonl --output results.json\n```",
    ]
    return "\n\n".join(sections) + "\n"


def with_results(card: str, results: str | Path, config: DrafterConfig, names: Collection[str] = ()) -> str:
    """The card with the figures of a result file of `hf-specdec bench` in its last section; see `measured_section`."""
    return with_measured(card, measured_section(results, config, names))


def with_measured(card: str, text: str) -> str:
    """The card with this text in its last section."""
    return f"{card.split(MEASURED)[0].rstrip()}\n\n{MEASURED}\n\n{text}\n"


def with_license(card: str, license: str) -> str:
    """The card with this licence in its metadata, as the Hub names it."""
    changed = ModelCard(card, ignore_metadata_errors=True)
    changed.data["license"] = license
    return str(changed)


def draft_sentence(entry: dict[str, str]) -> str:
    """Where the draft model is, for readers."""
    inside = f", folder `{entry['subfolder']}`" if "subfolder" in entry else ""
    if "repo_id" in entry:
        repo = entry["repo_id"]
        return f"[`{repo}`](https://huggingface.co/{repo}){inside}, at commit `{entry['revision'][:12]}`."
    return f"In `{entry['path']}`, beside this folder." if "path" in entry else f"In `{entry['subfolder']}/`."


def _made_for(config: dict[str, Any]) -> str:
    target, tokenizer = config.get("target") or {}, config.get("tokenizer") or {}
    if target.get("name"):
        return f"`{target['name']}`; other targets are refused."
    if tokenizer.get("name"):
        return f"Targets with the tokenizer of `{tokenizer['name']}`; others are refused."
    if target or tokenizer:
        return "One target, known by its sizes and its tokenizer; others are refused."
    return "Any target."


def _unknown_training(name: str, draft: dict[str, str] | None) -> str:
    """What follows from the type alone, where nobody described the training."""
    if drafter_class(name).weights is not Storable.weights:
        return UNKNOWN_TRAINING
    if draft is None:
        return "Nothing: this drafter has no weights of its own."
    return UNKNOWN_TRAINING if is_embedded(draft) else "Nothing of its own; only the draft model is trained."


def _options(config: dict[str, Any]) -> list[str]:
    """The section on options, for types that have one."""
    lines = [
        f"- `{option.name}` ({json.dumps(config.get(option.name, default_of(option)))}): {in_short(option)}"
        for option in drafter_class(config["drafter_type"]).config_class.fields()
        if not is_trained(option)
    ]
    lead = "Arguments of `Drafter.from_pretrained`, with the stored values in brackets:"
    return ["## Options", "\n".join([lead, "", *lines])] if lines else []


def _usage(name: str, target: str, tunes: bool = False) -> str:
    tune = "drafter.tune(model)  # adds what it learned to the model's weights\n" if tunes else ""
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from hf_specdec import Drafter

tokenizer = AutoTokenizer.from_pretrained("{target}")
model = AutoModelForCausalLM.from_pretrained("{target}")
drafter = Drafter.from_pretrained("{REPO_PLACEHOLDER}")
{tune}
inputs = tokenizer("The quick brown fox", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=64, assistant_model=drafter)
print(tokenizer.decode(output[0]))
```

As a flag: `speculation_type="{name}", speculation={{"drafter": "{REPO_PLACEHOLDER}"}}`.
Without an import: `custom_generate="{REPO_PLACEHOLDER}", trust_remote_code=True`."""


def _is_repo_id(name: str | None) -> bool:
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return False
    return "/" in (name or "")
