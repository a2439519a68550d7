"""Which drafters are known for a target: `index.json`, by name, and by architecture, sizes and tokenizer."""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .tokenizer import hash_near, public_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INDEX = Path(__file__).with_name("index.json")
READY = "hub_configs"
"""folder of ready drafters, in a clone of the repository"""
SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
"""fields of a model's config that an entry compares"""


@dataclass(frozen=True)
class Known:
    """What drafts, and for which targets: a draft model or heads in a `repo` of the Hub, or a ready drafter in a
    `folder` below `READY`."""

    kind: str
    """the `drafter_type` that is made of it"""
    targets: tuple[str, ...]
    """Hub repos that it is for"""
    like: dict[str, Any] = field(hash=False)
    """what a target's config must say (`SIZES`), and the `tokenizer_hash`, where that can be told"""
    source: str
    """where the pair is published, or was measured"""
    repo: str = ""
    folder: str = ""

    @property
    def name(self) -> str:
        """For a message."""
        return self.repo or f"{READY}/{self.folder}"

    def fits(self, target: "PreTrainedModel") -> bool:
        """Whether a target has the architecture, the sizes and the tokenizer."""
        config = target.config.get_text_config()
        same = all(getattr(config, name, None) == self.like[name] for name in SIZES)
        wanted = self.like.get("tokenizer_hash")
        theirs = None if wanted is None or not same else hash_near(target)
        return same and (theirs is None or theirs == wanted)

    def names(self, target: "PreTrainedModel") -> bool:
        """Whether a target is called like one of those that it is for: by its repo, or by the name of its folder."""
        name = public_name(target.config.name_or_path) or ""
        return name in self.targets or name in [repo.split("/")[1] for repo in self.targets]


@cache
def index() -> tuple[Known, ...]:
    """All that is known, the best first."""
    entries = json.loads(INDEX.read_text(encoding="utf-8"))["drafters"]
    return tuple(Known(**entry | {"targets": tuple(entry["targets"])}) for entry in entries)


def known_for(target: "PreTrainedModel") -> list[Known]:
    """What fits a target, first that which is known for it by name."""
    return sorted((known for known in index() if known.fits(target)), key=lambda known: not known.names(target))


def ready_folder(name: str) -> Path | None:
    """A ready drafter's folder, where this is a clone of the repository or one is the working directory."""
    places = (root / READY / name for root in (Path(__file__).parents[2], Path.cwd()))
    return next((place for place in places if place.is_dir()), None)
