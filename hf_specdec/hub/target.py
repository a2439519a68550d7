"""What a drafter was made for: written into its config on saving, compared with the target before its first use."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SpeculationError, shown
from .tokenizer import check_entries, hash_near, public_name, vocabulary_hash

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FIELDS: dict[str, type] = {"name": str, "vocab_size": int, "hidden_size": int, "tokenizer_hash": str}
SIZES = ("vocab_size", "hidden_size", "tokenizer_hash")
"""what must be equal; a name is for messages"""


def made_for(target: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None" = None) -> dict[str, Any]:
    """The `target` entry of a drafter's config; the tokenizer's hash is there if a tokenizer is given or found."""
    config = target.config.get_text_config()
    found = {
        "name": public_name(target.config.name_or_path),
        "vocab_size": getattr(config, "vocab_size", None),
        "hidden_size": getattr(config, "hidden_size", None),
        "tokenizer_hash": vocabulary_hash(tokenizer.get_vocab()) if tokenizer is not None else hash_near(target),
    }
    return {name: value for name, value in found.items() if value is not None}


def check_fields(entry: Any, path: Path) -> None:
    """Refuse a `target` entry with unknown names or wrong types."""
    if not isinstance(entry, dict):
        raise SpeculationError(f"{path}: target is {shown(entry)}; it must be an object with {', '.join(FIELDS)}")
    try:
        check_entries("target", entry, FIELDS)
    except ValueError as error:
        raise SpeculationError(f"{path}: {error}") from None


def check_made_for(entry: dict[str, Any] | None, target: "PreTrainedModel") -> None:
    """Refuse a target that the drafter was not made for.

    Args:
        entry: `drafter.config.target`; None, or what is not in it, fits every target.
        target: the model that `generate` was called on. Its tokenizer is compared where its file is on this machine
            (beside the model, or in the Hub cache).

    Raises:
        SpeculationError: another vocabulary size, hidden size or tokenizer.
    """
    entry, config = entry or {}, target.config.get_text_config()
    for name in ("vocab_size", "hidden_size"):
        wanted, got = entry.get(name), getattr(config, name, None)
        if wanted is not None and got is not None and wanted != got:
            raise _refusal(entry, f"a target with {name}={wanted}, and this {type(target).__name__} has {name}={got}")
    wanted = entry.get("tokenizer_hash")
    got = None if wanted is None else hash_near(target)
    if wanted is not None and got is not None and wanted != got:
        raise _refusal(entry, f"another tokenizer (hash {wanted[:12]}) than that of the target (hash {got[:12]})")


def _refusal(entry: dict[str, Any], why: str) -> SpeculationError:
    of_name = f" ({entry['name']})" if entry.get("name") else ""
    return SpeculationError(
        f"the drafter's config.json says it was made for {why}; use the model it was made for{of_name}, "
        "or a drafter made for this one"
    )
