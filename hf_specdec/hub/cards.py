"""The model card of a drafter: metadata for the Hub, the code to use it, and what was measured."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..config import DrafterConfig
from ..registry import Storable, drafter_class
from .draft import is_embedded
from .measured import measured_section

REPO_PLACEHOLDER = "ORG/NAME"
"""Stands for the repo in a card that was not pushed yet."""

MEASURED = "## Measured"

SUMMARIES = {
    "prompt_lookup": "Copies what followed an earlier occurrence of the last tokens. No draft model, any target.",
    "ngram": "Draws from a Kneser-Ney n-gram model over token ids: no forward pass, for targets with this tokenizer.",
    "suffix": "Copies from a suffix index over the prompt and past outputs. No draft model, any target.",
    "hybrid": "Copies earlier text and asks a small model, and verifies what promises most tokens per second.",
    "draft_model": "A small model drafts and the target verifies (speculative sampling, Leviathan et al. 2023).",
    "disco": "A small model drafts, and a classifier decides after every token whether to go on (DISCO, 2024).",
    "pearl": "A small model drafts while the target verifies (PEARL, 2024).",
    "streaming": "The target drafts for itself, by trained streams in its upper layers (Bhendawade et al. 2024).",
}

NOT_TOLD = "Not told; `trained_on=` of `save_pretrained` says it here."


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
        f"A `{name}` drafter for [speculative decoding](https://arxiv.org/abs/2211.17192) inside `model.generate`: "
        f"fewer target calls, the same text. {SUMMARIES.get(name, '')}".rstrip(),
        "## Use",
        _usage(name, base or "your/target", config.get("mode") == "tuned"),
        "## Made for",
        _made_for(config),
        *(["## Draft model", draft_sentence(draft)] if draft else []),
        "## Trained on",
        trained_on or _untold(name, draft),
        MEASURED,
        "Nothing yet. `hf-specdec bench` measures it on your model and texts.",
    ]
    return "\n\n".join(sections) + "\n"


def with_results(card: str, results: str | Path, config: DrafterConfig, names: Collection[str] = ()) -> str:
    """The card with the figures of a result file of `hf-specdec bench` in its last section; see `measured_section`."""
    return f"{card.split(MEASURED)[0].rstrip()}\n\n{MEASURED}\n\n{measured_section(results, config, names)}\n"


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
    return "One target, by its sizes and its tokenizer; others are refused." if target or tokenizer else "Any target."


def _untold(name: str, draft: dict[str, str] | None) -> str:
    """What is said of the training where nobody has said anything."""
    if drafter_class(name).weights is not Storable.weights:
        return NOT_TOLD
    if draft is None:
        return "Nothing: this drafter has no weights of its own."
    return NOT_TOLD if is_embedded(draft) else "Nothing of its own: it is the draft model that was trained."


def _usage(name: str, target: str, tunes: bool = False) -> str:
    tune = "drafter.tune(model)  # adds what it learned to the model's weights\n" if tunes else ""
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from hf_specdec import Drafter

tokenizer = AutoTokenizer.from_pretrained("{target}")
model = AutoModelForCausalLM.from_pretrained("{target}")
drafter = Drafter.from_pretrained("{REPO_PLACEHOLDER}")
{tune}
inputs = tokenizer("Hello", return_tensors="pt")
model.generate(**inputs, assistant_model=drafter)
model.generate(**inputs, speculation_type="{name}", speculation={{"drafter": "{REPO_PLACEHOLDER}"}})  # or as a flag
model.generate(**inputs, custom_generate="{REPO_PLACEHOLDER}", trust_remote_code=True)  # or with nothing imported
```"""


def _is_repo_id(name: str | None) -> bool:
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return False
    return "/" in (name or "")
