"""PEARL's paced table, on a tiny pair: its bounds by hand, and what it holds is shown and not run again."""

import json

import pytest
import torch
from close_drafts import close_to
from laboratory import script
from models import llama, tokenizer

from hf_specdec.drafters.pearl import Timeline
from hf_specdec.theory import tokens_per_second
from hf_specdec.tools.instruments.recording import Round

bounds, pearl_table = script("pearl_bounds"), script("pearl_table")


def test_serial_decoding_without_overhead_is_counted_by_hand():
    # Window 2, target 3 steps: x x | - | x x + its own: rounds of 2, 2 and 1 drafted tokens, and a draft prefill.
    yes_and_no = [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert bounds.serial_seconds([yes_and_no], 2, 3.0, 1.0) == 1 + (2 + 3) + (2 + 3) + (1 + 3)
    assert bounds.serial_seconds([yes_and_no] * 2, 2, 3.0, 0.5) == bounds.serial_seconds([yes_and_no], 2, 3.0, 1.0)


def test_what_a_run_accepted_is_known_but_for_the_targets_own_tokens():
    passed = Round(draft=[5, 6], drafted=2, accepted=2, tokens=[5, 6, 7], draft_seconds=0.0)
    corrected = Round(draft=[5, 6], drafted=2, accepted=1, tokens=[5, 8], draft_seconds=0.0)
    overlapped = Round(draft=[5], drafted=1, accepted=1, tokens=[5], draft_seconds=0.0)
    ended = Round(draft=[5, 6], drafted=2, accepted=1, tokens=[5], draft_seconds=0.0)
    chances = [0.1 * i for i in range(7)]
    assert bounds.outcomes([passed, corrected, overlapped, ended], chances) == [1, 1, chances[2], 1, 0, 1, 1]


@pytest.mark.parametrize(("alpha", "window"), [(0.5, 2), (0.8, 4)])
def test_sampled_text_is_counted_as_theory_has_it(alpha, window):
    tokens = 2000
    seconds = bounds.serial_seconds([[alpha] * tokens], window, 3.0, 1.0)
    assert tokens / seconds == pytest.approx(tokens_per_second(alpha, window, lambda width: 3.0, 1.0), rel=0.02)


def test_an_overlapped_round_waits_for_what_it_goes_on_with():
    line = Timeline(tests=[(1, 1), (4, 4), (4, 2), (1, 0)], corrections=[(0, 0), (0, 0), (1, 1), (1, 0)])
    assert bounds.pearl_seconds(line, 4, 3.0, 1.0) == 1 + 4 + 4 + 4 + 3


def test_the_overview_has_a_line_for_each_cell():
    def row(ratio, method, seconds, bound, serial):
        return pearl_table.Row(
            "p", 0.0, ratio, method, 10, seconds, bound, serial, None, True, corrections=4, foreseen=1
        )

    lines = pearl_table.overview(
        [row(3, "serial, best window 4", 2.0, 1.0, 1.0), row(3, "PEARL, auto", 1.0, None, 1.5), row(5, "w/o", 1, 1, 1)]
    ).splitlines()
    assert lines[2:] == ["| p | 0 | 3 | 5.00, -50% (50%), γ = 4 | - | - | 10.00, +50% | - |"]


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_schedules_are_measured_once(temperature, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    target = llama(seed=1)
    for name, model in (("target", target), ("draft", close_to(target, 0.05))):
        model.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "prompts.txt").write_text("ab cd\nefgh")
    table = {
        "target": str(tmp_path / "target"),
        "draft": str(tmp_path / "draft"),
        "prompts": [tmp_path / "prompts.txt"],
        "json_file": tmp_path / "rows.json",
        "ratio": [2.0],
        "temperature": [temperature],
        "coupled": temperature > 0,
        "max_new_tokens": 8,
        "draft_milliseconds": 8.0,
    }
    pearl_table.main(**table)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["method"].split(",")[0] for row in rows] == [
        "serial",
        *["PEARL"] * 3,
        "w/o pre-verify",
        "w/o post-verify",
    ]
    assert all(row["same_text"] and row["tokens"] == 14 for row in rows)
    assert all(0 < row["bound"] <= row["seconds"] for row in rows if row["bound"])
    shown = capsys.readouterr().out.splitlines()[-1]
    monkeypatch.setattr(pearl_table.Table, "run", lambda *_: pytest.fail("it was measured already"))
    pearl_table.main(**table)
    assert capsys.readouterr().out.splitlines()[-1] == shown
