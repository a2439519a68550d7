"""The model card of a drafter: metadata for the Hub, the code to use it, and what was measured."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..errors import SpeculationError

REPO_PLACEHOLDER = "ORG/NAME"
"""Stands for the repo in a card that was not pushed yet."""

MEASURED = "## Measured"

SUMMARIES = {
    "prompt_lookup": "Copies what followed an earlier occurrence of the last tokens. No draft model, any target.",
    "ngram": "Draws from a Kneser-Ney n-gram model over token ids: no forward pass, for targets with this tokenizer.",
    "suffix": "Copies from a suffix index over the prompt and past outputs. No draft model, any target.",
    "hybrid": "Copies earlier text or asks a small model, whichever promises more tokens per second.",
    "draft_model": "A small model drafts and the target verifies (speculative sampling, Leviathan et al. 2023).",
    "disco": "A small model drafts, and a classifier decides after every token whether to go on (DISCO, 2024).",
    "pearl": "A small model drafts while the target verifies (PEARL, 2024).",
}

COLUMNS = {
    "method": lambda run: _method_name(run["name"]),
    "data": lambda run: run["dataset"],
    "batch": lambda run: str(run["batch_size"]),
    "T": lambda run: f"{run['temperature']:g}",
    "prompts": lambda run: str(run["prompts"]),
    "tokens/s": lambda run: f"{run['tokens_per_second']:.1f}",
    "speed-up": lambda run: _with_interval(run["speedup"], run.get("speedup_interval")),
    "tokens per target call": lambda run: f"{run['mean_acceptance_length']:.2f}",
    "accepted of drafted": lambda run: _rate(run["draft_acceptance_rate"]),
    "same text": lambda run: {True: "yes", False: "no"}.get(run["identical"], "(sampled)"),
}


def make_card(
    config: dict[str, Any],
    *,
    license: str | None = None,
    datasets: list[str] | None = None,
    trained_on: str | None = None,
    results: str | Path | None = None,
) -> str:
    """The text of `README.md`.

    Args:
        config: the content of `config.json`.
        license: as the Hub names it, such as "apache-2.0".
        datasets: ids of data sets on the Hub that the drafter was trained on.
        trained_on: a sentence on the training, for readers.
        results: a result file of `hf-specdec bench`; its figures become a table.

    Raises:
        SpeculationError: the result file cannot be read.
    """
    name, target = config["drafter_type"], (config.get("target") or {}).get("name")
    data = ModelCardData(
        library_name="hf_specdec",
        pipeline_tag="text-generation",
        license=license,
        base_model=target if _is_repo_id(target) else None,
        datasets=datasets,
        tags=["hf_specdec", "speculative-decoding", name],
    )
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {REPO_PLACEHOLDER}",
        f"A `{name}` drafter for [speculative decoding](https://arxiv.org/abs/2211.17192) inside `model.generate`: "
        f"fewer target calls, the same text. {SUMMARIES.get(name, '')}".rstrip(),
        "## Use",
        _usage(name),
        "## Made for",
        f"`{target}`; other targets are refused." if target else "Any target.",
        "## Trained on",
        trained_on or "Nothing: this drafter has no weights of its own.",
        MEASURED,
        "Nothing yet. `hf-specdec bench` measures it on your model and texts.",
    ]
    card = "\n\n".join(sections) + "\n"
    return card if results is None else with_results(card, results)


def with_results(card: str, results: str | Path) -> str:
    """The card with the figures of a result file of `hf-specdec bench` in its last section."""
    return f"{card.split(MEASURED)[0].rstrip()}\n\n{MEASURED}\n\n{_table(results)}\n"


def _usage(name: str) -> str:
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from hf_specdec import Drafter

tokenizer = AutoTokenizer.from_pretrained("your/target")
model = AutoModelForCausalLM.from_pretrained("your/target")
drafter = Drafter.from_pretrained("{REPO_PLACEHOLDER}")

inputs = tokenizer("Hello", return_tensors="pt")
model.generate(**inputs, assistant_model=drafter)
model.generate(**inputs, speculation_type="{name}", speculation={{"drafter": "{REPO_PLACEHOLDER}"}})  # or as a flag
model.generate(**inputs, custom_generate="{REPO_PLACEHOLDER}", trust_remote_code=True)  # or with nothing imported
```"""


def _table(path: str | Path) -> str:
    """The `runs` of a result file, and where they were measured."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        runs, provenance = content["runs"], content["provenance"]
        rows = [[cell(run) for cell in COLUMNS.values()] for run in runs]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpeculationError(
            f"results={str(path)!r} is not a result file of `hf-specdec bench`: {error!r}"
        ) from error
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n{_measured_where(provenance)}".rstrip()


def _measured_where(provenance: dict[str, Any]) -> str:
    """Device, versions and command line, the latter without the folders of that machine."""
    facts = [
        f"{name}: {provenance[name]}" for name in ("device", "threads", "git_revision", "time") if name in provenance
    ]
    facts += [f"{name} {version}" for name, version in provenance.get("versions", {}).items() if version]
    command = " ".join(_method_name(word) for word in str(provenance.get("command", "")).split())
    return "; ".join(facts) + (f"\n\n```sh\n{command}\n```" if command else "")


def _method_name(spec: str) -> str:
    """A SPEC or argument without the folders of the machine that measured it."""
    return Path(spec).name if spec.startswith(("/", ".", "~")) else spec


def _with_interval(ratio: float, interval: list[float] | None) -> str:
    return f"{ratio:.2f}x" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0%}"


def _is_repo_id(name: str | None) -> bool:
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return False
    return "/" in (name or "")
