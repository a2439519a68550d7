"""DISCO's tables on a tiny pair: all rules in one run, the window of validation beside the best one in hindsight."""

from collections import Counter
from typing import Any

import pytest
import torch
from close_drafts import close_to
from disco_models import classifier
from laboratory import script
from models import llama, tokenizer

from hf_specdec import DiscoDrafter, SpeculationError
from hf_specdec.tools.bench.method import Method
from hf_specdec.train.disco.fitting import f1
from hf_specdec.train.disco.records import Record

disco_table, windows, Way = script("disco_table"), script("disco_windows"), script("shared").Way


def way(seconds: float = 1.0, steps: int = 0, lengths: list[int] | None = None) -> Way:
    lengths = lengths or []
    verified = Counter(i for length in lengths for i in range(length))
    return Way(method=Method(""), tokens=10, seconds=seconds, steps=steps or len(lengths), verified=verified)


@pytest.mark.parametrize(
    ("lengths", "shown"),
    [([3, 3, 3], "3.0 ± 0.0"), ([0, 4], "2.0 ± 2.0"), ([1, 2, 3, 4], "2.5 ± 1.1"), ([], "0.0 ± 0.0")],
)
def test_the_spread_of_windows(lengths, shown):
    assert disco_table.spread(way(lengths=lengths)) == shown


def test_the_fastest_window_has_most_tokens_per_second():
    assert disco_table.fastest({1: way(3.0), 2: way(1.0), 3: way(2.0)}) == 2


def a_text(accepted: str) -> Record:
    """One whose tokens a draft gets right ("y") or wrong ("n")."""
    right = torch.tensor([mark == "y" for mark in accepted])
    return Record(torch.zeros(len(right), 10), right.float(), right)


@pytest.mark.parametrize(
    ("accepted", "found"),
    [("yyn", [2]), ("nny", [0, 0, 1]), ("yynyyyn", [2, 3]), ("y", [1]), ("n", [0]), ("ynyy", [1, 2])],
)
def test_an_oracle_drafts_what_will_be_accepted(accepted, found):
    assert windows.oracle_windows([a_text(accepted)]) == found
    assert windows.oracle_windows([a_text(accepted), a_text("n")]) == [*found, 0], "a text begins a round"
    # Each round adds the target's own token, but for one that the text's end cuts.
    assert sum(found) + len(found) == len(accepted) + accepted.endswith("y")


@pytest.mark.parametrize(("gamma", "drafted"), [(1, "ynynyynyn"), (2, "yynyyyyny"), (4, "yyyyyyyyy"), (9, "yyyyyyyyy")])
def test_a_fixed_window_expects_what_it_drafts(gamma, drafted):
    accepted = a_text("yyynnyyyy").accepted.tolist()
    assert windows.drafted_by(gamma, accepted) == a_text(drafted).accepted.tolist()


def test_the_f1_of_fixed_windows_ends_where_all_is_expected():
    records = [a_text("yyynnyyyy"), a_text("nyynyyyyyn")]
    found, whole = windows.f1_of_windows(records, 12), torch.cat([record.accepted for record in records])
    assert found[12] == f1(torch.ones_like(whole), whole) > found[1]
    assert windows.f1_of_windows([a_text("ynyn")], 1) == {1: 1.0}
    assert f1(whole, whole) == 1.0


@pytest.fixture
def settings(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    target = llama(seed=1)
    draft = close_to(target, 0.05)
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    DiscoDrafter(draft, classifier(), rule="token").save_pretrained(tmp_path / "disco")
    DiscoDrafter(llama(seed=2), classifier()).save_pretrained(tmp_path / "other")
    (tmp_path / "here.txt").write_text("ab cd\nefgh")
    (tmp_path / "before.txt").write_text("abab\nghi")
    names = {"target": "target", "draft": "draft", "trained": "disco", "records": "records"}
    lists = {"validation": [str(tmp_path / "before.txt")], "prompts": [str(tmp_path / "here.txt")], "windows": [1, 3]}
    paths = {option: str(tmp_path / name) for option, name in names.items()}
    return paths | lists | {"dtype": "float32", "max_new_tokens": 8}


@pytest.mark.parametrize("candidates", [1, 2])
def test_all_rules_are_compared_with_as_many_candidates(settings, candidates, monkeypatch, capsys):
    shown: list[tuple[Any, list[Any]]] = []
    monkeypatch.setattr(disco_table, "show", lambda header, rows: shown.append((header, [list(row) for row in rows])))
    monkeypatch.setattr(disco_table, "fastest", lambda windows: 3)
    disco_table.main(disco_table.TableSettings(**settings, candidates=candidates))
    (header, (line,)), (_, methods) = shown
    names = ["plain", "γ = 1", "γ = 3", "the draft's own chances", "DISCO, budget"]
    if candidates == 1:  # the others draft chains
        names += ["hf-assisted:num_assistant_tokens_schedule=heuristic", "hf-confidence"]
        names += ["DISCO, token"]
    assert [row[0] for row in methods] == names
    by_name = {row[0]: row for row in methods}
    assert by_name["plain"][1:4] == ["1.00", "1.00", "0.0 ± 0.0"] and by_name["γ = 3"][4:6] == ["1.00", "1.00"]
    assert all(row[-1] == "2" for row in methods), "every text is plain decoding's"
    assert line[0] == "here" and 0 < float(line[2]) <= 1 and header[2].startswith("γ = ")
    assert "γ = 3 was fastest on before" in capsys.readouterr().out


def test_counted_tables_ask_no_clock(settings, monkeypatch):
    shown: list[tuple[Any, list[Any]]] = []
    monkeypatch.setattr(disco_table, "show", lambda header, rows: shown.append((header, [list(row) for row in rows])))
    monkeypatch.setattr(Way, "speed", property(lambda way: pytest.fail("the clock was asked")))
    disco_table.main(disco_table.TableSettings(**settings, counted=True))
    (_, (line,)), (header, methods) = shown
    assert line[0] == "here" and header == ("", "tokens/call", "window")
    assert [row[0] for row in methods[:2]] == ["γ = 1", "γ = 3"] and methods[-1][0] == "DISCO, token"
    assert not any("budget" in row[0] for row in methods), "the budget goes by measured times"
    assert float(methods[-1][2].split()[0]) >= 1, "no round is paused"


def test_what_cannot_be_compared_is_said(settings):
    with pytest.raises(SpeculationError, match="--draft"):
        disco_table.main(disco_table.TableSettings(**settings | {"draft": None}))
    with pytest.raises(SpeculationError, match="another draft"):
        disco_table.main(
            disco_table.TableSettings(**settings | {"trained": settings["trained"].replace("disco", "other")})
        )
