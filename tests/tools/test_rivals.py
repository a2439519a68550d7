"""Other packages as baselines of `bench`: with the package where it is installed, and what is said where not."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from hf_specdec import SpeculationError
from hf_specdec.tools.bench import rivals
from hf_specdec.tools.bench.methods import build_method
from hf_specdec.tools.bench.rivals import RIVALS


def installed(name: str) -> bool:
    return find_spec(name.partition("-")[0]) is not None


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", RIVALS)
def test_they_write_plain_decodings_text(name: str, do_sample: bool, tmp_path: Path) -> None:
    if not installed(name):
        pytest.skip(f"{name.partition('-')[0]} is not installed")
    target, draft = models.llama(), models.llama(seed=1)
    draft.save_pretrained(tmp_path)
    draft.config._name_or_path = str(tmp_path)
    method, inputs = build_method(name, draft), models.prompts([9])
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": do_sample, "pad_token_id": 0}
    options |= {"temperature": 0.7} if do_sample else {}
    rows = method.generate(target, inputs, **options)
    assert len(rows[0]) == 20 and method.rounds
    assert sum(accepted for _, accepted in method.rounds) <= 20
    if not do_sample:
        assert rows == target.generate(**inputs, **options)[:, 9:].tolist()


@pytest.mark.parametrize("name", RIVALS)
def test_what_they_lack_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "find_spec", lambda _: None)
    with pytest.raises(SpeculationError, match=r"hf-specdec\[rivals\]"):
        build_method(name, models.llama())
    monkeypatch.setattr(rivals, "find_spec", lambda _: True)
    if name != "economize-lookup":
        with pytest.raises(SpeculationError, match="draft"):
            build_method(name, None)
        draft = models.llama()
        draft.config.model_type = "cut_llama"
        with pytest.raises(SpeculationError, match="hf-specdec export FOLDER --to vllm"):
            build_method(name, draft)
    with pytest.raises(SpeculationError, match=r"unknown option \['gamma'\]"):
        build_method(f"{name}:gamma=3", torch.nn.Module())  # type: ignore[arg-type]
