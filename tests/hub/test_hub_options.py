"""Every option has a range, refused on construction and on load, where the message names the file as well."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hub_tools import drafter_of, tiny_model

from hf_specdec import Drafter, SpeculationError
from hf_specdec.drafters.suffix import drafter as suffix
from hf_specdec.hub import drafter_from_flag
from hf_specdec.hub.registry import drafter_class, drafter_types

RANGES = [
    (name, option.name, *option.metadata["range"])
    for name in drafter_types()
    for option in dataclasses.fields(drafter_class(name).config_class)
    if "range" in option.metadata and not option.metadata["entries"]
]
BAD = [10**30, -(10**30), True, 3.5, float("nan"), float("inf"), [3], {"a": 3}, "3", None]


def refusal(name: str, **options: Any) -> str:
    with pytest.raises(SpeculationError) as error:
        drafter_class(name).config_class.from_options(options)
    return str(error.value)


@pytest.mark.parametrize("name", drafter_types())
def test_every_number_has_a_range(name: str) -> None:
    numbers = {f.name for f in dataclasses.fields(drafter_class(name).config_class) if "int" in str(f.type)}
    floats = {f.name for f in dataclasses.fields(drafter_class(name).config_class) if f.type is float}
    assert numbers | floats == {option for drafter, option, *_ in RANGES if drafter == name} | (
        {"sizes"} if name == "ngram" else set()
    )


@pytest.mark.parametrize(("name", "option", "least", "most"), RANGES)
def test_a_range(name: str, option: str, least: float, most: float) -> None:
    config = drafter_class(name).config_class
    kind = float if config.from_options({}).to_dict().get(option).__class__ is float else int
    ends = {"max_match": most} if option == "min_match" else {}
    for good in (least, most):
        assert getattr(config.from_options({**ends, option: kind(good)}), option) == good
    for bad in (kind(least - 1), kind(most + 1)):
        assert f"{option} must be from {least} to {most}" in (said := refusal(name, **{option: bad}))
        assert f"got {bad}" in said
    for value in BAD:
        if not (kind is float and value == 3.5):
            assert option in refusal(name, **{option: value})
    assert option in refusal(name, **{option: 10**5000 if kind is int else 1e300})


def test_the_sizes_of_an_ngram_model() -> None:
    assert "at most 15 entries, got 16" in refusal("ngram", sizes=[1] * 16)
    for bad in (-1, 1 << 31, 10**30, True, 2.0, [1]):
        assert "sizes" in refusal("ngram", sizes=[5, bad])


def test_a_long_value_is_not_repeated_in_full() -> None:
    assert len(refusal("prompt_lookup", max_match="x" * 100_000)) < 1000


def test_a_loaded_option_out_of_range_names_the_file(tmp_path: Path) -> None:
    drafter_of("suffix").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"memory_mb": 1 << 20}))
    with pytest.raises(SpeculationError, match=r"config\.json.*memory_mb must be from 1 to 65536, got 1048576"):
        Drafter.from_pretrained(tmp_path)


def no_memory(*_: Any) -> None:
    raise MemoryError("no room")


def test_options_beyond_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter_of("suffix").save_pretrained(tmp_path)
    monkeypatch.setattr(suffix, "SuffixStore", no_memory)
    with pytest.raises(SpeculationError, match=r"config\.json.*memory.*no room"):
        Drafter.from_pretrained(tmp_path)
    with pytest.raises(SpeculationError, match=r"memory_mb.*no room"):
        drafter_from_flag(tiny_model(), "suffix", {"memory_mb": 65536})
