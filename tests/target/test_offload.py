"""Models whose weights lie elsewhere until a layer runs (accelerate): the text stays plain decoding's."""

from pathlib import Path
from typing import Any

import dflash_models
import head_pairs
import models
import mtp_heads
import pytest
import stream_models
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

from hf_specdec import (
    BatchDecoder,
    DraftModelDrafter,
    HybridDrafter,
    PearlDrafter,
    PromptLookupDrafter,
    SpeculationError,
    SuffixDrafter,
)
from hf_specdec.target.devices import input_device
from hf_specdec.tools.instruments.audit import Audit
from hf_specdec.tools.instruments.meter import metered

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


OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
ROWS = pytest.mark.parametrize("lengths", [[7], [7, 4]], ids=["one row", "uneven rows"])


def agree(target: Any, drafter: Any, lengths: list[int], plain: Any, **options: Any) -> None:
    """The offloaded model says what it did, and the drafter is not dropped."""
    text = target.generate(**models.prompts(lengths), **OPTIONS | options, assistant_model=drafter)
    stats = drafter.last_stats
    assert torch.equal(text, plain) and stats.drafted_tokens > 0
    assert not any("dropped" in note for note in stats.notes), stats.notes


def in_part(model: Any, parts: list[str], folder: Path) -> Any:
    """With these parts on the disk, and the others in memory."""
    layers = {f"model.layers.{i}" for i in range(len(model.model.layers))}
    names = layers | {"model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"}
    places = {name: "disk" if name in parts else "cpu" for name in names}
    return dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


LAYERS = [f"model.layers.{i}" for i in range(4)]


@pytest.mark.set_times
@ROWS
@pytest.mark.parametrize(
    "parts", [LAYERS[:1], LAYERS[-1:], ["model.embed_tokens"], LAYERS], ids=["lower", "upper", "embeddings", "layers"]
)
def test_streams_in_a_target_that_is_offloaded_in_part(parts: list[str], lengths: list[int], tmp_path: Path) -> None:
    target = stream_models.target_of("Llama", layers=4)
    plain = target.generate(**models.prompts(lengths), **OPTIONS)
    agree(in_part(target, parts, tmp_path), stream_models.streams_of(target, 2, prune_below=0.02), lengths, plain)


def test_streams_want_the_head_in_memory() -> None:
    target = stream_models.target_of("Llama")
    drafter = stream_models.streams_of(target)
    with pytest.raises(SpeculationError, match="streams need the target's output head in memory"):
        cpu_offload(target).generate(**models.prompts([7]), **OPTIONS, assistant_model=drafter)


@pytest.mark.set_times
@ROWS
@pytest.mark.parametrize("who", ["target", "heads"])
@pytest.mark.parametrize("pair", ["DFlash, mixed", "GLM-4-MoE, 3"])
def test_heads_of_such_a_target(
    pair: str, who: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    head_pairs.never_declined(monkeypatch)
    mtp_heads.mtp.cache_clear(), dflash_models.dflash.cache_clear()
    try:
        target, drafter = head_pairs.PAIRS[pair]()
        plain = target.generate(**models.prompts(lengths), **OPTIONS)
        heads = drafter.draft_model if pair.startswith("DFlash") else drafter.model  # type: ignore[attr-defined]
        offloaded(target if who == "target" else heads, "cpu", tmp_path)
        agree(target, drafter, lengths, plain)
    finally:
        mtp_heads.mtp.cache_clear(), dflash_models.dflash.cache_clear()


@pytest.mark.parametrize("kind", ["draft", "hybrid"])
def test_requests_that_come_and_go(kind: str, tmp_path: Path) -> None:
    target, draft = models.llama(), models.llama(seed=3)
    plain = {n: target.generate(**models.prompts([n]), **OPTIONS)[0, n:].tolist() for n in (7, 4)}
    target, draft = (offloaded(model, "cpu", tmp_path) for model in (target, draft))
    with BatchDecoder(target, MAKES[kind](target, draft), max_rows=2) as decoder:
        ids = {n: models.prompts([n])["input_ids"] for n in plain}
        answers = {n: decoder.submit(prompt, max_new_tokens=16, do_sample=False) for n, prompt in ids.items()}
        assert {n: answer.result(60) for n, answer in answers.items()} == plain


@pytest.mark.set_times
def test_pearl_keeps_such_a_draft_in_the_process(tmp_path: Path) -> None:
    target, draft = models.llama(), offloaded(models.llama(seed=3), "cpu", tmp_path)
    plain = target.generate(**models.prompts([7]), **OPTIONS)
    agree(target, PearlDrafter(draft, window=3), [7], plain)
    drafter = PearlDrafter(draft, window=3, worker="process")
    with drafter, pytest.warns(UserWarning, match='cannot be sent to a process .* use worker="thread"'):
        assert torch.equal(target.generate(**models.prompts([7]), **OPTIONS, assistant_model=drafter), plain)


def test_instruments(tmp_path: Path) -> None:
    target, draft = models.llama(), models.llama(seed=3)
    ids = models.prompts([7])["input_ids"]
    plain = target.generate(ids, **OPTIONS)[0, 7:].tolist()
    target, draft = (offloaded(model, "cpu", tmp_path) for model in (target, draft))
    found = Audit(target, ids, plain).difference([*plain[:5], (plain[5] + 1) % models.VOCAB])
    assert found is not None and found.position == 5
    with metered(target, draft) as meter:
        target.generate(ids, **OPTIONS, assistant_model=DraftModelDrafter(draft, num_draft_tokens=3))
    assert meter.of("target") and meter.of("draft")


def test_where_inputs_go() -> None:
    model = models.llama()
    assert input_device(model) == torch.device("cpu")
    assert input_device(cpu_offload(model, execution_device=torch.device("cpu"))) == torch.device("cpu")
    assert input_device(model.model.layers[1]) == input_device(model.lm_head) == torch.device("cpu")
    assert input_device(models.llama().to("meta")).type == "meta"  # nobody brings its weights
