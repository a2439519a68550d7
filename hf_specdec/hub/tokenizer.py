"""A tokenizer's fingerprint: what a drafter that knows token ids only keeps of it, and holds against a target's."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from ..errors import SpeculationError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIELDS: dict[str, type] = {"name": str, "vocab_size": int, "hash": str, "bos_token_id": int, "eos_token_id": int}
SNAPSHOTS = "snapshots"
"""the folder of the Hub cache in which a repo's commits lie"""


def fingerprint(tokenizer: Any) -> dict[str, Any]:
    """Name, number of tokens, hash over tokens and ids, and the special ids that it has.

    Args:
        tokenizer: transformers' kind; what another kind does not tell is left out.
    """
    vocabulary = getattr(tokenizer, "get_vocab", None)
    found = {
        "name": public_name(getattr(tokenizer, "name_or_path", None)),
        "vocab_size": len(tokenizer),
        "hash": None if vocabulary is None else vocabulary_hash(vocabulary()),
        "bos_token_id": getattr(tokenizer, "bos_token_id", None),
        "eos_token_id": getattr(tokenizer, "eos_token_id", None),
    }
    return {name: value for name, value in found.items() if value is not None}


def check_fingerprint(stored: dict[str, Any]) -> None:
    """Refuse unknown names, and values of the wrong type.

    Raises:
        ValueError: as the rules of a config do.
    """
    check_entries("tokenizer", stored, FIELDS)


def check_entries(what: str, stored: dict[str, Any], fields: dict[str, type]) -> None:
    """Refuse unknown names, and values of the wrong type.

    Args:
        what: whose entries these are, for the message.
        fields: the known names and their types.

    Raises:
        ValueError: it names the entry and what is allowed.
    """
    for name, value in stored.items():
        if name not in fields:
            raise ValueError(f"unknown entry {shown(name)} in {what}; known are {', '.join(fields)}")
        if type(value) is not fields[name]:
            raise ValueError(f"{what}.{name} is {shown(value)}; it must be {fields[name].__name__}")


def check_same_ids(stored: dict[str, Any], target: "PreTrainedModel", what: str, fix: str) -> None:
    """Refuse a target of another tokenizer: by the hash, where the target's `tokenizer.json` is on this machine, else
    by what its config says of sizes and special ids.

    Args:
        stored: a fingerprint; what is not in it is not compared.
        what, fix: for the message: whose fingerprint it is, and what to do.

    Raises:
        SpeculationError: the tokenizers differ.
    """
    theirs = None if stored.get("hash") is None else hash_near(target)
    if theirs is None:
        reason = _unlike(stored, target)
    else:
        reason = None if theirs == stored["hash"] else f"hashes {stored['hash'][:12]} and {theirs[:12]}"
    if reason:
        name = f" ({stored['name']})" if "name" in stored else ""
        raise SpeculationError(f"{what} and the target have different tokenizers{name}: {reason}. {fix}")


def sizes_apart(a: int, b: int) -> bool:
    """Whether two vocabularies are too unlike in size for padding to explain it."""
    return abs(a - b) > max(1024, max(a, b) // 50)


def ids_of(value: int | list[int] | None) -> set[int]:
    """A config's bos or eos entry, which may be one id, several or none."""
    return set(value if isinstance(value, list) else [] if value is None else [value])


def _unlike(stored: dict[str, Any], target: "PreTrainedModel") -> str | None:
    config: Any = target.config.get_text_config()
    size = stored.get("vocab_size")
    if size is not None and sizes_apart(size, config.vocab_size):
        return f"vocabularies of {size} and {config.vocab_size} tokens"
    for name in ("bos_token_id", "eos_token_id"):
        known = (getattr(place, name, None) for place in (config, getattr(target, "generation_config", None)))
        theirs = set().union(*map(ids_of, known))
        if stored.get(name) is not None and theirs and stored[name] not in theirs:
            return f"{name} {stored[name]} and {sorted(theirs)}"
    return None


def public_name(name: str | None) -> str | None:
    """The repo id, or the last part of a folder: paths of this machine are nobody's business."""
    if not name:
        return None
    path = Path(name)
    if path.parent.name == SNAPSHOTS and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.absolute().name if path.is_dir() else name


def hash_near(target: "PreTrainedModel") -> str | None:
    """Hash of the tokenizer that lies with the target's weights on this machine, or None."""
    name = target.config.name_or_path
    if not name:
        return None
    path = Path(name) / "tokenizer.json"
    if not Path(name).is_dir():
        revision = getattr(target.config, "_commit_hash", None)
        try:
            cached = try_to_load_from_cache(name, "tokenizer.json", revision=revision)
        except ValueError:  # the name is no repo id
            return None
        path = Path(cached) if isinstance(cached, str) else path
    return _file_hash(str(path), path.stat().st_mtime_ns) if path.is_file() else None


@lru_cache(maxsize=32)
def _file_hash(path: str, modified: int) -> str | None:
    try:
        return vocabulary_hash(Tokenizer.from_file(path).get_vocab(with_added_tokens=True))
    except Exception:  # the library raises plain Exception; a tokenizer that cannot be read is not compared
        return None


def vocabulary_hash(vocabulary: dict[str, int]) -> str:
    """SHA-256 over tokens and ids; how the file is laid out does not count."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items(), key=lambda item: item[1])).encode()).hexdigest()
