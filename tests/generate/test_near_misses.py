"""A name that is nearly right is answered with the right one, and a thing in another's place with how to make that."""

from pathlib import Path

import models
import pytest

from hf_specdec import Drafter, DraftModelDrafter, HybridDrafter, PearlDrafter, SpeculationError


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("prompt-lookup", "prompt_lookup"),
        ("PromptLookup", "prompt_lookup"),
        ("draft-model", "draft_model"),
        ("sufix", "suffix"),
        ("Hybrid", "hybrid"),
        ("None", "none"),
    ],
)
def test_speculation_types(said: str, meant: str) -> None:
    with pytest.raises(SpeculationError, match=rf"speculation_type '{said}' \(did you mean '{meant}'\?\); known"):
        models.llama().generate(**models.prompts([5]), speculation_type=said)
    with pytest.raises(SpeculationError, match="unknown speculation_type 'xyz'; known"):
        models.llama().generate(**models.prompts([5]), speculation_type="xyz")


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "My-Hybrid").mkdir()
    for said in ("My-Hybird", "my_hybrid", "MY-HYBRID2"):
        with pytest.raises(SpeculationError, match=r"no local folder \(did you mean 'My-Hybrid'\?\)"):
            Drafter.from_pretrained(tmp_path / said)


@pytest.mark.parametrize("make", [HybridDrafter, DraftModelDrafter, PearlDrafter])
def test_a_folder_in_place_of_a_model(make: type[Drafter]) -> None:
    with pytest.raises(SpeculationError, match=r"must be a transformers model, got 'folder'; load it by AutoModel"):
        make("folder")  # type: ignore[call-arg]
