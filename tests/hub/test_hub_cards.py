"""Model cards: whose figures they take, on which target, how texts compare, and what was trained on what."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_tools import ROOT, drafter_of, tiny_model
from huggingface_hub import ModelCard
from transformers import PreTrainedModel
from typer.testing import CliRunner

from hf_specdec import Drafter, DraftModelDrafter, SpeculationError
from hf_specdec.cli import app
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.hub.cards import MEASURED, REPO_PLACEHOLDER, draft_sentence, make_card, with_license
from hf_specdec.hub.measured import compared_texts, facts
from hf_specdec.hub.tokenizer import public_name
from hf_specdec.tools.bench.plan import Settings
from hf_specdec.tools.bench.run import run_bench

torch.set_num_threads(1)

TARGET = {"name": "org/target", "vocab_size": 40, "hidden_size": 8, "tokenizer_hash": "0" * 64}
TIE = {"prompt": 3, "position": 17, "plain_token": 5, "other_token": 6, "gap": 0.0125, "rounding": 0.03125}
TIE |= {"top_two": True, "near_tie": True}


def run_of(name: str, **more: Any) -> dict[str, Any]:
    """A row of a result file, as far as cards read it."""
    row = {
        "name": name,
        "dataset": "gsm8k",
        "batch_size": 1,
        "temperature": 0.0,
        "prompts": 40,
        "tokens_per_second": 12.34,
        "speedup": 1.5,
        "speedup_interval": [1.4, 1.6],
        "mean_acceptance_length": 2.25,
        "draft_acceptance_rate": 0.5,
        "identical": True,
        "differences": [],
    }
    return row | more


def results(folder: Path, *runs: dict[str, Any], **provenance: Any) -> Path:
    path = folder / "results.json"
    path.write_text(json.dumps({"provenance": {"device": "CPU"} | provenance, "runs": runs}))
    return path


def table_of(card: str) -> list[str]:
    """The rows of the measured table, without its head."""
    return [line for line in card.split(MEASURED)[1].splitlines() if line.startswith("| ")][2:]


def saved(drafter: Drafter, path: Path, folder: Path, **more: Any) -> str:
    """The card of a drafter saved with these results."""
    drafter.save_pretrained(str(folder), results=path, **more)
    return (folder / "README.md").read_text()


# ------------------------------------------------------------------ whose figures


def test_only_figures_of_this_drafter_are_taken(tmp_path: Path) -> None:
    drafter = DraftModelDrafter(tiny_model(1), num_draft_tokens=5)
    for name in ("prompt_lookup", "draft_model", "draft_model:num_draft_tokens=4", "pearl:num_draft_tokens=5"):
        with pytest.raises(SpeculationError, match=r"has no row of this drafter.*hf-specdec bench"):
            saved(drafter, results(tmp_path, run_of("plain"), run_of(name)), tmp_path / "x")
    assert not (tmp_path / "x").exists()
    mine = run_of("draft_model:num_draft_tokens=5", tokens_per_second=18.51, speedup=1.25, speedup_interval=None)
    runs = run_of("plain"), run_of("suffix", tokens_per_second=77.7, identical=False, differences=[TIE]), mine
    card = saved(drafter, results(tmp_path, *runs), tmp_path / "x")
    assert table_of(card) == ["| gsm8k | 40 | 12.3 | 18.5 | 1.25x | 2.25 |"]
    assert "77.7" not in card and "all 40 equal" in card


def test_each_row_stands_beside_plain_decoding_of_the_same_setting(tmp_path: Path) -> None:
    settings = [{}, {"temperature": 1.0}, {"batch_size": 4}, {"dataset": "humaneval"}]
    speeds = dict(enumerate(settings, start=1))
    runs = [run_of("plain", tokens_per_second=speed, **more) for speed, more in list(speeds.items())[:3]]
    runs += [run_of("prompt_lookup", tokens_per_second=10 * speed, **more) for speed, more in speeds.items()]
    card = saved(PromptLookupDrafter(), results(tmp_path, *runs), tmp_path / "drafter")
    assert [line.split(" | ")[:4] for line in table_of(card)] == [
        ["| gsm8k", "40", "1.0", "10.0"],
        ["| gsm8k, T=1", "40", "2.0", "20.0"],
        ["| gsm8k, batch of 4", "40", "3.0", "30.0"],
        ["| humaneval", "40", "-", "40.0"],
    ]


def test_a_file_that_tells_its_drafters_options_is_believed_rather_than_the_spec(tmp_path: Path) -> None:
    drafter = PromptLookupDrafter(max_match=5)
    told = {"mine": facts(PromptLookupDrafter(max_match=5).config)}
    assert len(table_of(saved(drafter, results(tmp_path, run_of("mine"), drafters=told), tmp_path / "a"))) == 1
    for other in (PromptLookupDrafter(max_match=6), DraftModelDrafter(tiny_model(1))):
        with pytest.raises(SpeculationError, match="no row"):
            saved(other, results(tmp_path, run_of("mine"), drafters=told), tmp_path / "b")


def test_an_option_that_a_file_does_not_know_was_at_its_default(tmp_path: Path) -> None:
    told = {"mine": facts(PromptLookupDrafter().config)}
    assert told["mine"].pop("num_branches") == 1
    path = results(tmp_path, run_of("mine"), drafters=told)
    assert len(table_of(saved(PromptLookupDrafter(), path, tmp_path / "a"))) == 1
    with pytest.raises(SpeculationError, match="no row"):
        saved(PromptLookupDrafter(num_branches=2), path, tmp_path / "b")


def test_a_folder_that_was_measured_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    command = f"hf-specdec bench --drafter {folder} --json {tmp_path}/results.json"
    card = saved(PromptLookupDrafter(), results(tmp_path, run_of(str(folder)), command=command), folder)
    assert len(table_of(card)) == 1 and "`hf-specdec bench --drafter drafter --json results.json`" in card
    assert str(tmp_path) not in card


# ------------------------------------------------------------------ on which target


@pytest.mark.parametrize("entry", ["vocab_size", "hidden_size", "tokenizer_hash", "name"])
def test_figures_of_another_target_are_refused(entry: str, tmp_path: Path) -> None:
    drafter = DraftModelDrafter(tiny_model(1))
    drafter.config.target = TARGET
    same = results(tmp_path, run_of("draft_model"), target=TARGET | {"name": "/models/target"})
    assert "target `target`" in saved(drafter, same, tmp_path / "good")
    other = {"name": "org/target-instruct", "tokenizer_hash": "1" * 64}.get(entry, 41)
    path = results(tmp_path, run_of("draft_model"), target=TARGET | {entry: other})
    with pytest.raises(SpeculationError, match=f"measured another target: its {entry} is"):
        saved(drafter, path, tmp_path / "bad")


def test_older_files_tell_the_targets_name_alone(tmp_path: Path) -> None:
    drafter = DraftModelDrafter(tiny_model(1))
    drafter.config.target = TARGET
    path = results(tmp_path, run_of("draft_model"), settings={"target": "/home/somebody/target"})
    card = saved(drafter, path, tmp_path / "a")
    assert "target `target`" in card and "somebody" not in card
    for settings, words in (({"target": "org/other"}, "another target"), ({}, "does not say which target")):
        with pytest.raises(SpeculationError, match=words):
            saved(drafter, results(tmp_path, run_of("draft_model"), settings=settings), tmp_path / "b")
    saved(PromptLookupDrafter(), results(tmp_path, run_of("prompt_lookup")), tmp_path / "c")  # for any target


def test_the_names_of_models() -> None:
    commit = "0123456789" * 4
    assert public_name(f"/cache/hub/models--org--name/snapshots/{commit}") == "org/name"
    assert public_name("org/name") == "org/name" and public_name("") is None and public_name(None) is None
    assert public_name(str(ROOT / "tests" / "pair" / "target")) == "target"


# ------------------------------------------------------------------ texts


def said_of(*runs: dict[str, Any]) -> str:
    return compared_texts(runs)


def test_near_ties_are_counted_and_other_differences_named() -> None:
    end = TIE | {"prompt": 9, "other_token": None, "gap": None, "rounding": None, "near_tie": False}
    ties = {"identical": False, "differences": [TIE, TIE | {"prompt": 4}]}
    tied = "near ties, where rounding decides"
    assert said_of(run_of("suffix"), run_of("suffix", dataset="mbpp", **ties)) == (
        f"Greedy texts: 78 of 80 equal plain decoding's; differences start at {tied}."
    )
    assert said_of(run_of("suffix", identical=False, differences=[TIE, end])) == (
        f"Greedy texts: 38 of 40 equal plain decoding's; differences start at {tied}, except for gsm8k 9 (token 17)."
    )
    assert said_of(run_of("suffix", identical=False, differences=[end | {"turn": 1}])) == (
        "Greedy texts: 39 of 40 equal plain decoding's; no near tie explains gsm8k 9, turn 2 (token 17)."
    )


def test_texts_that_were_not_compared_one_by_one_are_not_called_equal() -> None:
    assert said_of(run_of("pearl", temperature=1.0, identical=None)) == ""
    assert said_of(run_of("pearl", batch_size=4)) == "Greedy texts equal plain decoding's."
    assert said_of(run_of("pearl", batch_size=4, identical=False)) == (
        "Not all texts are equal in gsm8k, batch of 4, and where they part is not recorded."
    )
    later = run_of("pearl", dataset="mbpp", identical=False)  # in a later repetition
    assert said_of(run_of("pearl"), later) == (
        "Greedy texts: all 40 equal plain decoding's; not all texts are equal in mbpp, and where they part is not "
        "recorded."
    )


def test_a_card_counts_its_own_drafters_texts(tmp_path: Path) -> None:
    rows = run_of("prompt_lookup", identical=False, differences=[TIE]), run_of("suffix"), run_of("plain")
    card = saved(PromptLookupDrafter(), results(tmp_path, *rows), tmp_path / "drafter")
    assert "Greedy texts: 39 of 40 equal plain decoding's; differences start at near ties" in card
    assert "Greedy texts" not in saved(
        PromptLookupDrafter(), results(tmp_path, run_of("prompt_lookup", identical=None)), tmp_path / "sampled"
    )


# ------------------------------------------------------------------ what bench writes


def test_what_bench_has_written_fills_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("def add(a, b):\ndef sub(a, b):\n")
    folder, path = tmp_path / "mine", tmp_path / "results.json"
    PromptLookupDrafter(max_match=4).save_pretrained(str(folder))
    demo = ROOT / "tests" / "pair" / "target"
    settings = Settings(target=str(demo), prompts=[str(tmp_path / "prompts.txt")], drafters=[str(folder)])
    settings.baselines, settings.max_new_tokens, settings.repeats, settings.dtype = [], 6, 1, "float32"
    settings.threads = 1
    assert run_bench(settings, path) == 0
    about = json.loads(path.read_text())["provenance"]
    assert about["target"]["vocab_size"] == 8192 and about["target"]["name"] == "target"
    assert about["drafters"] == {str(folder): facts(PromptLookupDrafter(max_match=4).config)}

    card = saved(Drafter.from_pretrained(folder), path, folder)
    assert table_of(card)[0].startswith("| prompts | 2 |")
    with pytest.raises(SpeculationError, match="no row"):
        saved(PromptLookupDrafter(), path, tmp_path / "other")
    drafter = PromptLookupDrafter(max_match=4)
    with pytest.raises(SpeculationError, match="another target"):
        saved(drafter, path, tmp_path / "other", target=tiny_model())


def test_the_push_command_refuses_figures_of_something_else(tmp_path: Path) -> None:
    path = results(tmp_path, run_of("suffix"))
    folder = str(ROOT / "hub_configs" / "prompt_lookup")
    done = CliRunner().invoke(app, ["push", folder, "--repo-id", "org/drafter", "--results", str(path)])
    assert done.exit_code == 2 and "no row of this drafter" in done.output


# ------------------------------------------------------------------ the rest of a card


def card_of(drafter_type: str, **config: Any) -> str:
    return make_card({"drafter_type": drafter_type} | config)


def test_a_card_uses_the_targets_name() -> None:
    card = ModelCard(card_of("prompt_lookup", target=TARGET))
    assert 'AutoModelForCausalLM.from_pretrained("org/target")' in card.text and card.data.base_model == "org/target"
    assert 'from_pretrained("your/target")' in card_of("prompt_lookup")
    assert 'from_pretrained("your/target")' in card_of("prompt_lookup", target={"name": "target"})


def test_a_card_says_whom_an_ngram_model_serves_and_never_that_it_was_trained_on_nothing() -> None:
    card = card_of("ngram", tokenizer={"name": "org/target"})
    assert "Targets with the tokenizer of `org/target`; others are refused." in card
    assert "Nothing: " not in card and "Not stated" in card
    assert "Any target." in card_of("suffix") and "Nothing: this drafter has no weights" in card_of("suffix")
    named = {"repo_id": "org/draft", "revision": "0" * 40}
    assert "only the draft model is trained" in card_of("pearl", draft_model=named)
    assert "Not stated" in card_of("disco", draft_model=named)
    assert "Not stated" in card_of("pearl", draft_model={"subfolder": "draft_model"})


def test_a_card_has_the_options_that_a_user_may_set() -> None:
    assert "- `tau_sampled` (0.4): τ in sampling\n" in card_of("disco") and "`hidden`" not in card_of("disco")
    assert "- `max_draft_tokens` (8): " in card_of("prompt_lookup", max_draft_tokens=8)
    assert '- `num_draft_tokens` ("auto"): ' in card_of("draft_model", num_draft_tokens="auto")
    assert "## Options" not in card_of("mtp")


OPTIONS = re.compile(r"^## Options\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
"""the section of a shipped card that `WRITE_DOCS=1 pytest tests/hub/test_hub_cards.py -k shipped` writes"""
SHIPPED = sorted((ROOT / "hub_configs").glob("**/README.md"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.relative_to(ROOT / "hub_configs").as_posix())
def test_a_shipped_card_is_short_and_says_what_its_config_says(path: Path) -> None:
    text, config = path.read_text(), json.loads((path.parent / "config.json").read_text())
    if (shown := OPTIONS.search(text)) is not None:
        made = OPTIONS.search(make_card(config))
        assert made is not None
        if os.environ.get("WRITE_DOCS"):
            path.write_text(text := text.replace(shown[0], made[0]))
        assert made[0] in text
    assert len(text.split()) < 380 and REPO_PLACEHOLDER in text
    assert (draft_sentence(config["draft_model"]) in text) if "draft_model" in config else "## Draft model" not in text
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(block, str(path), "exec")


@pytest.mark.parametrize("name", ["ngram", "prompt_lookup"])
def test_a_licence_is_filled_in(name: str, tmp_path: Path) -> None:
    drafter_of(name).save_pretrained(str(tmp_path))
    text = (tmp_path / "README.md").read_text()
    assert ModelCard(text).data.license is None
    changed = ModelCard(with_license(text, "apache-2.0"))
    assert changed.data.license == "apache-2.0" and changed.data.tags == ModelCard(text).data.tags
    assert changed.text == ModelCard(text).text


def test_no_target_is_taken_for_the_one_that_a_drafter_is_made_for(target: PreTrainedModel, tmp_path: Path) -> None:
    DraftModelDrafter(tiny_model(1)).save_pretrained(str(tmp_path), target=target)
    path = results(tmp_path, run_of("draft_model"), target={"vocab_size": 40, "hidden_size": 16})
    with pytest.raises(SpeculationError, match="its hidden_size is 16"):
        saved(Drafter.from_pretrained(tmp_path), path, tmp_path / "again")


@pytest.fixture
def target() -> PreTrainedModel:
    return tiny_model()
