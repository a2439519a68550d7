"""Models whose weights lie elsewhere until a layer runs (accelerate): the text stays plain decoding's."""

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from accelerate import cpu_offload, disk_offload

from hf_specdec import BatchDecoder, DraftModelDrafter, HybridDrafter, PearlDrafter, PromptLookupDrafter, SuffixDrafter
from hf_specdec.target.devices import input_device

MAKES: dict[str, Any] = {
    "lookup": lambda target, draft: PromptLookupDrafter(),
    "suffix": lambda target, draft: SuffixDrafter(),
    "draft": lambda target, draft: DraftModelDrafter(draft, num_draft_tokens=3),
    "hybrid": lambda target, draft: HybridDrafter(draft),
    "pearl": lambda target, draft: PearlDrafter(draft, window=3, worker="thread"),
}
DRAFTED = ["draft", "hybrid", "pearl"]


def offloaded(model: Any, way: str, folder: Path) -> Any:
    if way == "cpu":
        return cpu_offload(model, execution_device=torch.device("cpu"))
    folder.mkdir()
    return disk_offload(model, folder, execution_device=torch.device("cpu"))


@pytest.mark.set_times
@pytest.mark.grid
@pytest.mark.parametrize(
    ("kind", "who"),
    [*((kind, "target") for kind in MAKES), *((kind, who) for kind in DRAFTED for who in ("draft", "both"))],
)
@pytest.mark.parametrize("way", ["cpu", "disk"])
def test_the_text_is_plain_decodings(kind: str, way: str, who: str, tmp_path: Path) -> None:
    target, draft = models.llama(), models.llama(seed=3)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    plain = {rows: target.generate(**models.prompts([7, 4][:rows]), **options) for rows in (1, 2)}
    if who != "draft":
        target = offloaded(target, way, tmp_path / "target")
        assert target.device.type == "meta"
    if who != "target":
        draft = offloaded(draft, way, tmp_path / "draft")
    drafter = MAKES[kind](target, draft)
    for rows, text in plain.items():
        assert torch.equal(target.generate(**models.prompts([7, 4][:rows]), assistant_model=drafter, **options), text)
        assert drafter.last_stats.drafted_tokens > 0
    if who == "target" and way == "cpu" and kind != "pearl":
        with BatchDecoder(target, drafter, max_rows=2) as decoder:
            answer = decoder.submit(models.prompts([7])["input_ids"], max_new_tokens=16, do_sample=False)
            assert answer.result(60) == plain[1][0, 7:].tolist()


def test_where_inputs_go() -> None:
    model = models.llama()
    assert input_device(model) == torch.device("cpu")
    assert input_device(cpu_offload(model, execution_device=torch.device("cpu"))) == torch.device("cpu")
    assert input_device(models.llama().to("meta")).type == "meta"  # nobody brings its weights
