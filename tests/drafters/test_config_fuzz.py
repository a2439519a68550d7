"""Whatever a config holds: its drafter loads, or is refused by a `SpeculationError`, soon and in little memory."""

import json
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_tools import drafter_of

from hf_specdec import Drafter, SpeculationError
from hf_specdec.hub.registry import drafter_types

MUTATIONS = 300
"""of each type's config"""
SECONDS, MEGABYTES = 20.0, 200
"""what one of them may take of the processor: a config that asks for too much takes minutes"""

Mutate = Callable[[random.Random, Any], Any]

OTHER_TYPE: list[Any] = [None, True, False, 0, 1, 0.5, "", "3", "auto", "os.system", [], [3], {}, {"a": 1}]
SIZES = [2, 8, 64, 65, 256, 257, 512, 513, 1024, 1025, 65536, 65537, 1 << 24, 1 << 30, (1 << 31) - 1, 1 << 31, 1 << 45]
SIZES += [1 << 63, 10**30, 10**300]


def other_type(chance: random.Random, value: Any) -> Any:
    return chance.choice(OTHER_TYPE)


def other_sign(chance: random.Random, value: Any) -> Any:
    return -value if isinstance(value, int | float) and value else -chance.choice(SIZES)


def other_size(chance: random.Random, value: Any) -> Any:
    size = chance.choice(SIZES)
    if isinstance(value, str):
        return (value or "x") * min(size, 10_000)
    if isinstance(value, list):
        return chance.choice([[size], [size] * 15, [1] * min(size, 10_000)])
    return chance.choice([size, float(size), size + 0.5, 10.0**-20])


def nested(chance: random.Random, value: Any) -> Any:
    for _ in range(chance.choice([1, 2, 50, 900])):
        value = [value] if chance.random() < 0.5 else {chance.choice(["", "subfolder", "vocab_size"]): value}
    return value


def inside(chance: random.Random, value: Any) -> Any:
    """Something in an entry that is an object or a list."""
    if not isinstance(value, dict | list) or not value:
        return other_size(chance, value)
    place = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    changed = value.copy()
    changed[place] = chance.choice([other_type, other_sign, other_size, nested])(chance, value[place])
    return changed


MUTATORS: list[Mutate] = [other_type, other_sign, other_size, nested, inside]


def good_folder(name: str, folder: Path) -> dict[str, Any]:
    """A saved drafter, and its config with every field written out."""
    drafter = drafter_of(name)
    drafter.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    target = {"name": "org/target", "vocab_size": 40, "hidden_size": 8, "tokenizer_hash": "0" * 64}
    fields = {option: getattr(drafter.config, option) for option in drafter.config.options()}
    return fields | {"target": target, "draft_model": None} | content


def peak_megabytes() -> float:
    """Of this process so far; pages that were promised and never touched do not count."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("name", drafter_types())
def test_mutated_configs(name: str, tmp_path: Path) -> None:
    chance, content = random.Random(f"{name} 0"), good_folder(name, tmp_path)
    loaded = Drafter.from_pretrained(tmp_path)
    model = {"draft_model": loaded.draft_model} if loaded.takes_draft_model else {}  # read once, not every time
    outcomes = {"loaded": 0, "refused": 0}
    for number in range(MUTATIONS):
        field = list(content)[number % len(content)]
        value = MUTATORS[number // len(content) % len(MUTATORS)](chance, content[field])
        (tmp_path / "config.json").write_text(json.dumps(content | {field: value}))
        before, began = peak_megabytes(), time.process_time()
        try:
            Drafter.from_pretrained(tmp_path, **model)
            outcome = "loaded"
        except SpeculationError as error:
            outcome = "refused"
            assert str(tmp_path) in str(error), (field, value)
            assert len(str(error)) < 2000, field
        outcomes[outcome] += 1
        assert time.process_time() - began < SECONDS, (field, value)
        assert peak_megabytes() - before < MEGABYTES, (field, value)
    assert min(outcomes.values()) > 5, outcomes
