"""The table of PEARL's windows is counted, not timed: Theorem 1 and Table 5 in set times, on a tiny pair."""

from typing import Any

import pytest
import torch
from laboratory import script
from models import llama, tokenizer

from hf_specdec.theory import pearl_tokens_per_second

pearl_windows = script("pearl_windows")
WINDOWS = [2, 3, 4, 5, 6]


def shown(folder: Any, capsys: Any, acceptance: float) -> list[list[str]]:
    """The cells of the table's lines."""
    pearl_windows.main(
        target=str(folder),
        draft=str(folder),
        prompts=[str(folder / "prompts.txt")],
        ratio=[3, 5],
        window=WINDOWS,
        acceptance=acceptance,
        max_new_tokens=120,
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()[2:]]


@pytest.mark.grid
@pytest.mark.parametrize("acceptance", [0.9, 0.97])
def test_the_fastest_window_is_the_ratio(acceptance: float, tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    llama(seed=1).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "prompts.txt").write_text("ab cd\nefgh\nhi\nbad cab")
    lines = shown(tmp_path, capsys, acceptance)
    assert [int(line[1]) for line in lines] == [3, 5]
    for line in lines:
        c, speeds = int(line[1]), [float(cell) for cell in line[2:-2]]
        assert WINDOWS[speeds.index(max(speeds))] == c
        assert max(speeds) > float(line[-2].split()[0])  # of serial decoding
        for gamma, speed in zip(WINDOWS, speeds, strict=True):  # 480 tokens: a rejection more or less is a few percent
            assert speed == pytest.approx(c * pearl_tokens_per_second(acceptance, gamma, c, 1.0), rel=0.15)
