"""Where prompts and texts come from: files, the sets of the package, and data sets of the Hub by name."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_specdec import SpeculationError
from hf_specdec.tools.bench.plan import Settings, plan
from hf_specdec.tools.loading.prompts import load_prompts, sample_examples
from hf_specdec.tools.loading.rows import SETS, read_rows, set_name


def test_each_set_of_the_package_has_twelve_prompts():
    assert sorted(SETS) == ["chat", "code", "maths", "sentences", "sql", "summaries"]
    for name in SETS:
        assert len(load_prompts(name)) == 12, name
    assert load_prompts("chat")[0].chat and not load_prompts("code")[0].chat


def test_a_file_goes_before_a_set_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("chat").write_text("Mine.\n")
    assert [prompt.turns for prompt in load_prompts("chat")] == [("Mine.",)]


@pytest.fixture
def data_sets(tmp_path, monkeypatch):
    """Folders that the library `datasets` reads as it reads a repo of the Hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name, split, rows in (
        ("openai/gsm8k", "test", [{"question": "1 + 1?", "answer": "2"}, {"question": "2 + 2?", "answer": "4"}]),
        ("openai/gsm8k", "train", [{"question": "3 + 3?", "answer": "6"}]),
        ("HuggingFaceH4/mt_bench_prompts", "train", [{"prompt": ["Hello.", "And now?"], "category": "writing"}]),
        ("tuetschek/e2e_nlg", "train", [{"meaning_representation": "name[A]", "human_reference": "It is A."}]),
    ):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_data_sets_are_read_by_name_and_split(data_sets):
    assert [prompt.turns[0] for prompt in load_prompts("openai/gsm8k")] == [
        "Question: 1 + 1?\nAnswer:",
        "Question: 2 + 2?\nAnswer:",
    ]
    assert len(load_prompts("openai/gsm8k:train")) == 1
    (talk,) = load_prompts("HuggingFaceH4/mt_bench_prompts")  # which has one split alone, not called test
    assert talk.chat and talk.turns == ("Hello.", "And now?")
    ((prompt, answer),) = sample_examples("tuetschek/e2e_nlg", None, 0)
    assert prompt.turns == ("Meaning: name[A]\nText:",) and answer == "It is A."
    assert set_name("HuggingFaceH4/mt_bench_prompts:train") == "mt_bench_prompts-train"
    assert set_name("org/x-0.1") == "x-0.1" and set_name("folder/x.1.jsonl") == "x.1"
    assert [answer for _, answer in sample_examples("openai/gsm8k", None, 0)] == ["6"]  # of its train split


def test_bench_calls_a_data_set_by_its_name(data_sets):
    units = plan(Settings(target="none", prompts=["openai/gsm8k:test", "maths"], limit=1))
    assert [unit.dataset for unit in units] == ["gsm8k-test", "maths"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("openai/gsm8k:dev", "no split 'dev'; it has"),
        ("nobody/absent", "cannot read the data set nobody/absent.*ORG/NAME"),
        ("absent.jsonl", "no such file.*chat, code, maths.*ORG/NAME"),
        ("folder/absent.jsonl", "no such file"),
        ("poems", "no such file.*a set of this package"),
        ("openai/gsm9k", "no such file.*ORG/NAME"),  # beside a folder that is there
        ("openai", "it is a folder"),
        ("x" * 300, "cannot read x+: "),
    ],
)
def test_a_source_that_is_not_there(data_sets, source, message):
    with pytest.raises(SpeculationError, match=message):
        list(read_rows(source))


def test_without_the_library_its_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SpeculationError, match=r"pip install 'hf-specdec\[data\]'"):
        list(read_rows("openai/gsm8k"))


def test_what_a_script_would_make_is_read_from_the_hubs_own_copy(tmp_path, monkeypatch):
    """Scripts of data sets are never run."""
    asked = []

    def names(repo, revision=None):
        asked.append(revision)
        if revision is None:
            raise RuntimeError("Dataset scripts are no longer supported")
        return ["plain"]

    stand_in = SimpleNamespace(
        get_dataset_config_names=names,
        get_dataset_split_names=lambda repo, name, revision: ["validation"],
        load_dataset=lambda repo, name, split, revision: [{"prompt": f"{name}, {split}, {revision}"}],
    )
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    monkeypatch.chdir(tmp_path)
    assert load_prompts("org/scripted")[0].turns == ("plain, validation, refs/convert/parquet",)
    assert asked == [None, "refs/convert/parquet"]
