"""What is shown is what was measured: figures by hand count, and rounds token by token."""

import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from measured import measurement
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_specdec import theory
from hf_specdec.cli import app
from hf_specdec.drafters.trees import TreeSession
from hf_specdec.errors import SpeculationError
from hf_specdec.tools.bench.report import write_report
from hf_specdec.tools.bench.results import Measurement, Results
from hf_specdec.tools.bench.run import summary_tables
from hf_specdec.tools.bench.summary import median_repeats, ratio_interval, summarize, total
from hf_specdec.tools.bench.tables import figures
from hf_specdec.tools.explain.reading import Explanation, explain
from hf_specdec.tools.explain.showing import print_explanation
from hf_specdec.tools.loading.drafters import DrafterSettings
from hf_specdec.tools.loading.models import Pair

DEMO = Path(__file__).parents[1] / "pair"


def sample() -> list[Measurement]:
    """Two methods, three prompts, three repetitions of different speed."""
    return [
        measurement(method, prompt, repeat, 10 * (prompt + 1), base * (prompt + 1) * (1 + 0.1 * (repeat - 1)))
        for prompt in range(3)
        for repeat in range(3)
        for method, base in (("plain", 1.0), ("fast", 0.5))
    ]


def test_figures_match_a_hand_count() -> None:
    plain, fast = summarize(sample())
    # The median repetition is the one with factor 1: 10 + 20 + 30 tokens in (1 + 2 + 3) · base seconds.
    assert (plain["name"], fast["name"]) == ("plain", "fast")
    assert (fast["tokens"], fast["seconds"], fast["tokens_per_second"]) == (60, 3.0, 20.0)
    assert fast["speedup"] == 2.0 and fast["speedup_interval"] == (2.0, 2.0)
    assert fast["ratios"]["plain"]["ratio"] == 2.0 and plain["ratios"]["fast"]["ratio"] == 0.5
    assert fast["tokens_per_second_by_repeat"] == pytest.approx([20 / 0.9, 20, 20 / 1.1])
    assert fast["mean_acceptance_length"] == 1 + 27 / 27 and fast["draft_acceptance_rate"] == 27 / 54
    assert fast["acceptance_per_position"] == pytest.approx([6 / 9, 3 / 9])
    assert (fast["alpha"], fast["gamma"]) == (0.8, 2.0)
    c = (3 * 0.2 / 60) / (3 * 0.3 / 27)  # a draft step over a step of plain decoding, the prompts' forwards left out
    assert fast["c"] == pytest.approx(c) and plain["c"] == 0
    assert fast["predicted_speedup"] == pytest.approx(theory.improvement_factor(0.8, 2, c))
    assert fast["overhead_seconds"] == pytest.approx(3.0 - 3 * (0.1 + 0.2 + 0.3))
    assert plain["mean_acceptance_length"] == 1 and plain["alpha"] is None and plain["predicted_speedup"] is None
    assert fast["target_calls"] == 30 and fast["draft_calls"] == 60


def test_medians_and_intervals() -> None:
    repeats = [measurement("m", 0, i, 10, seconds) for i, seconds in enumerate([3.0, 1.0, 2.0])]
    assert [m.stats.total_seconds for m in median_repeats(repeats)] == [2.0]
    one = [measurement("m", 0, 0, 10, 1.0)]
    assert ratio_interval(one, one) is None
    noisy = [measurement("m", i, 0, 10, 1.0 + 0.2 * (i % 3)) for i in range(12)]
    steady = [measurement("p", i, 0, 10, 2.0) for i in range(12)]
    low, high = ratio_interval(noisy, steady)
    assert low < total(m.stats for m in noisy).tokens_per_second / 5 < high
    assert (low, high) == ratio_interval(noisy, steady)


def result_file(folder: Path) -> Path:
    settings = {"dtype": "float32", "target": "t", "pad_target_mlp": 6000}
    versions = {"torch": "2", "transformers": "5"}
    about = {"settings": settings, "versions": versions, "device": "CPU", "threads": 1, "time": "now", "command": "x"}
    measurements = sample() + [
        measurement(m.method, m.prompt, m.repeat, tokens, seconds, temperature=1.0, same_text=None)
        for m in sample()
        for tokens, seconds in [(m.stats.emitted_tokens, m.stats.total_seconds)]
    ]
    path = folder / "out.json"
    Results(about, measurements, summarize(measurements)).save(path)
    return path


def test_the_terminals_table_holds_whole_names_and_figures_in_80_columns() -> None:
    names = ["draft_model:num_draft_tokens=5", "hf-prompt-lookup", "ngram-drafters/of-mine/trained-on-code-and-text"]
    measurements = [
        measurement(name, prompt, repeat, 10, 0.5 + 0.01 * prompt)
        for name in ("plain", *names)
        for prompt in range(3)
        for repeat in range(3)
    ]
    runs = summarize(measurements)
    (table,) = summary_tables(runs)
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    printed = console.file.getvalue()
    assert "…" not in printed and max(map(len, printed.splitlines())) <= 80
    letters = "".join(line[:20].strip() for line in printed.splitlines())
    assert all(name in letters for name in names)
    for name, run in zip(names, runs[1:], strict=True):
        assert figures(run)["speed-up"] in printed and figures(run)["method"] == name


def parted(position: int, gap: float | None, near_tie: bool, other: int | None = 8) -> dict:
    """A first difference as a result file holds it."""
    tokens = {"plain_token": 7, "other_token": other, "top_two": near_tie}
    return {
        "position": position,
        "gap": gap,
        "rounding": None if gap is None else 0.0625,
        "near_tie": near_tie,
    } | tokens


def with_differences() -> list[Measurement]:
    """`fast` parts from plain decoding's text in all prompts: at a near-tie, not at one, and by ending before it."""
    found = {0: parted(5, 0.03125, True), 1: parted(0, 1.5, False), 2: parted(9, None, False, other=None)}
    measurements = sample()
    for m in measurements:
        if m.method == "fast":
            m.same_text, m.difference = False, found[m.prompt] if m.repeat == 0 else None
    return measurements


def test_first_differences_are_shown_with_their_gaps(tmp_path: Path) -> None:
    runs = summarize(with_differences())
    assert [figures(run)["same text"] for run in runs] == ["all", "0/3 (1 tie)"]
    console = Console(width=80, file=io.StringIO())
    for table in summary_tables(runs):
        console.print(table)
    printed = console.file.getvalue()
    assert "0/3" in printed and "(1 tie)" in printed and "where texts first differ" in printed
    assert max(map(len, printed.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "fast set 0 5 7 / 8 0.0312 0.0625 yes" in lines
    assert "fast set 1 0 7 / 8 1.5 0.0625 no" in lines
    assert "fast set 2 9 7 / (ended) - - no" in lines

    path = result_file(tmp_path)
    results = Results.load(path)
    results.measurements, results.runs = with_differences(), runs
    results.save(path)
    write_report([path], tmp_path / "report")
    markdown = (tmp_path / "report" / "report.md").read_text()
    assert "| fast | set 0 | 5 | 7 / 8 | 0.0312 | 0.0625 | yes |" in markdown
    assert "0/3 (1 tie)" in markdown and "| fast | set 1 | 0 | 7 / 8 | 1.5 |" in markdown


def test_a_text_that_parts_in_a_later_repetition_or_in_a_batch_is_not_called_the_same() -> None:
    plain, fast = summarize([replace(m, same_text=m.repeat == 0) for m in sample()])
    assert figures(fast)["same text"] == figures(plain)["same text"] == "not all"
    batches = summarize([replace(m, batch_size=4, same_text=False) for m in sample()])
    assert figures(batches[1])["same text"] == "not all"


def test_a_terminal_shows_some_differences_and_says_where_the_others_are() -> None:
    many = [replace(with_differences()[1], prompt=i) for i in range(40)]
    plain = [replace(sample()[0], prompt=i) for i in range(40)]
    console = Console(width=80, file=io.StringIO())
    for table in summary_tables(summarize(plain + many)):
        console.print(table)
    assert "30 more in `hf-specdec report`" in " ".join(console.file.getvalue().split())
    assert console.file.getvalue().count("0.0312") == 10


def test_report_writes_tables_and_a_picture(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(result_file(tmp_path)), "--output", str(tmp_path / "report")])
    assert result.exit_code == 0, result.output
    markdown = (tmp_path / "report" / "report.md").read_text()
    assert "| fast | 20.0 | 2.00 (2.00-2.00) | - | 2.00 | 50% | 0.80 | 0.30 |" in markdown
    assert "## set, batch 1, T=1" in markdown
    assert "| speed-up | set, batch 1, T=0 | set, batch 1, T=1 |" in markdown and "| fast | 2.00 | 2.00 |" in markdown
    assert (tmp_path / "report" / "speedup.png").read_bytes().startswith(b"\x89PNG")


def test_report_names_the_file_where_two_measured_the_same(tmp_path: Path) -> None:
    first = result_file(tmp_path)
    second = first.rename(tmp_path / "other.json")
    write_report([result_file(tmp_path), second], tmp_path / "report")
    markdown = (tmp_path / "report" / "report.md").read_text()
    assert "## out: set, batch 1, T=0" in markdown and "## other: set, batch 1, T=1" in markdown


def test_report_refuses_what_it_cannot_show(tmp_path: Path) -> None:
    with pytest.raises(SpeculationError, match="cannot read"):
        write_report([tmp_path / "absent.json"], tmp_path / "report")
    Results({}).save(tmp_path / "empty.json")
    with pytest.raises(SpeculationError, match="no finished prompt"):
        write_report([tmp_path / "empty.json"], tmp_path / "report")
    (tmp_path / "file").write_text("")
    with pytest.raises(SpeculationError, match="cannot write to the folder"):
        write_report([result_file(tmp_path)], tmp_path / "file")


@pytest.fixture(scope="module")
def pair():
    models = [AutoModelForCausalLM.from_pretrained(DEMO / name, dtype=torch.float32) for name in ("target", "draft")]
    return Pair(AutoTokenizer.from_pretrained(DEMO / "target"), *models)


def explained(pair: Pair, spec: str, prompt: str, tokens: int, temperature: float = 0.0, **more) -> Explanation:
    return explain(
        DrafterSettings(target="t", drafter=spec, dtype="float32", **more), pair, prompt, tokens, temperature
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_explain_accounts_for_every_token(pair, temperature: float) -> None:
    found = explained(pair, "draft_model:num_draft_tokens=4", "def add(a, b):\n    return", 24, temperature)
    kept = [token for line in found.lines for token in line if token.kind in ("first", "accepted", "own")]
    assert len(kept) == found.ours.stats.emitted_tokens <= 24
    assert sum(r.accepted for r in found.rounds) == found.stats.accepted_tokens
    assert len(found.rejections) <= 10
    assert found.rejections == sorted(found.rejections, key=lambda r: -r.wasted_seconds)
    if temperature == 0:
        assert "every token" in found.exactness
        assert all(r.target_top[0][0] == r.replaced_by != r.drafted for r in found.rejections)
        assert all(r.draft_top[0][0] == r.drafted for r in found.rejections)
    else:
        assert "not compared" in found.exactness


@pytest.mark.parametrize("suffix", ["html", "svg"])
def test_explain_writes_what_it_prints(tmp_path: Path, suffix: str) -> None:
    page = tmp_path / f"page.{suffix}"
    arguments = ["explain", "--target", str(DEMO / "target"), "--drafter", "prompt_lookup", "--prompt", "1 2 3 1 2 3 1"]
    more = ["--max-new-tokens", "12", "--dtype", "float32", "--threads", "1", "--output", str(page)]
    result = CliRunner().invoke(app, arguments + more)
    assert result.exit_code == 0, result.output
    written = page.read_text().replace("&#160;", " ")
    for said in ("target calls", "drafted and accepted", "% busy", "the target waited for", "every token is plain"):
        assert said in result.output and said in written


DRAFTING = ["draft_model:num_draft_tokens=4", "prompt_lookup", "suffix:num_branches=3", "pearl:window=3,worker=thread"]
DRAFTERS = [*DRAFTING, "draft_model"]  # the last may find that no draft pays


@pytest.mark.grid
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("spec", DRAFTERS)
def test_explain_shows_the_whole_text_wherever_it_ends(pair, spec: str, max_new_tokens: int) -> None:
    target, tokenizer, prompt = pair.target, pair.tokenizer, "1 2 3 1 2 3 1 2"
    found = explained(pair, spec, prompt, max_new_tokens)
    kept = [token.text for line in found.lines for token in line if token.kind in ("first", "accepted", "own")]
    ids = tokenizer(prompt, return_tensors="pt")
    plain = target.generate(**ids, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)
    assert kept == [tokenizer.decode([token]) for token in plain[0, ids["input_ids"].shape[1] :]]
    assert len(found.lines) == 1 + len(found.rounds) == found.stats.target_calls
    assert [len(line) for line in found.lines][:1] == [1]


@pytest.mark.parametrize("spec", ["prompt_lookup:num_branches=3", "suffix:num_branches=3"])
def test_explain_shows_what_was_rejected_of_trees(pair, spec: str) -> None:
    found = explained(replace(pair, draft=None), spec, "a b a c a b a d a b a", 16)
    wrong = {i for i, r in enumerate(found.rounds, start=1) if r.drafted and not r.accepted}
    assert wrong and wrong <= {rejection.round for rejection in found.rejections}
    assert len(found.timeline.draft) == sum(r.drafted > 0 for r in found.rounds)


def test_explain_shows_what_the_target_wrote_after_the_drafter_was_given_up(pair, monkeypatch) -> None:
    def propose(*_):
        raise ValueError("planted")

    monkeypatch.setattr(TreeSession, "propose", propose)
    with pytest.warns(UserWarning, match="planted"):
        found = explained(pair, "prompt_lookup", "a b a b", 5)
    assert found.rounds == [] and [[token.kind for token in line] for line in found.lines] == [["first"], ["own"] * 4]
    assert "every token" in found.exactness


@pytest.mark.set_times
@pytest.mark.parametrize("spec", DRAFTING)
def test_every_drafter_has_a_timeline(pair, spec: str) -> None:
    found = explained(pair, spec, "1 2 3 1 2 3 1 2", 12)
    spans, use = found.timeline.target + found.timeline.draft, found.timeline.utilisation()
    assert len(found.timeline.target) == len(found.rounds) == len(found.timeline.tests)
    assert found.timeline.draft and all(began <= ended for began, ended in spans)
    assert all(0 <= share <= 1 for share in use.values())
    if not spec.startswith("pearl"):  # one after the other
        spans.sort()
        assert not [(a, b) for a, b in pairwise(spans) if a[1] - b[0] > 1e-9]  # seconds
        assert use["target"] + use["draft"] <= 1 + 1e-9


@pytest.mark.parametrize("terminal", [{"color_system": None}, {"color_system": "truecolor", "no_color": True}], ids=str)
def test_explain_without_colour_marks_what_was_rejected(pair, terminal: dict) -> None:
    found = explained(pair, "draft_model:num_draft_tokens=4", "def add(a, b):", 24)
    console = Console(record=True, width=200, force_terminal=True, file=io.StringIO(), **terminal)
    print_explanation(found, console)
    printed = console.export_text()
    kinds = [token.kind for line in found.lines for token in line]
    rounds = "".join(printed.splitlines()[: len(found.lines)])
    for kind, (opening, closing) in {"rejected": ("[-", "-]"), "own": ("{+", "+}"), "dropped": ("(-", "-)")}.items():
        assert rounds.count(opening) == rounds.count(closing) == kinds.count(kind) > 0
        assert printed.count(opening) == kinds.count(kind) + 1  # and the legend


def test_explain_refuses_a_page_of_another_kind(tmp_path: Path) -> None:
    arguments = ["explain", "--target", "t", "--prompt", "import os", "--output", str(tmp_path / "timeline.png")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "output must be a page (.html) or a picture (.svg)" in result.output
