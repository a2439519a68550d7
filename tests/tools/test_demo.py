"""What the demo and `generate` show is the truth: the text in view is the one that was decoded, token for token."""

import io
import math
import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hf_specdec import clock
from hf_specdec.drafters import PromptLookupDrafter
from hf_specdec.errors import SpeculationError
from hf_specdec.stats import SpeculationStats
from hf_specdec.target.devices import cpu_capabilities, cpu_dtype
from hf_specdec.tools.bench.decoding import Generation, decode
from hf_specdec.tools.bench.measure import Bench
from hf_specdec.tools.bench.method import Method
from hf_specdec.tools.bench.methods import PLAIN
from hf_specdec.tools.bench.plan import Unit, settings_of
from hf_specdec.tools.demo import DemoSettings, GenerateSettings, run, run_demo, run_generate, turns
from hf_specdec.tools.demo.live import LiveText
from hf_specdec.tools.demo.prompts import BATCH, SAMPLES
from hf_specdec.tools.demo.table import said_of_texts, table
from hf_specdec.tools.demo.talk import Conversation, common
from hf_specdec.tools.demo.turns import Turns
from hf_specdec.tools.instruments.audit import Difference
from hf_specdec.tools.instruments.meter import Meter
from hf_specdec.tools.instruments.recording import RecordingDrafter
from hf_specdec.tools.loading.drafters import load_drafter
from hf_specdec.tools.loading.models import Pair, TargetSettings, load_model, load_tokenizer
from hf_specdec.tools.loading.prompts import Prompt

PAIR = Path(__file__).parents[1] / "pair"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTS = {
    "code": 'def list_files(path, suffix=".txt"):\n    result = []\n    for',
    "a sum": "Question: A baker makes 24 rolls and sells 50 of them. How many are left?\nAnswer:",
}


@pytest.fixture(scope="module")
def pair():
    return [load_model(TargetSettings(target=str(PAIR / name), dtype="float32")) for name in ("target", "draft")]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TargetSettings(target=str(PAIR / "target")))


@pytest.fixture
def talkative(pair):
    """The pair with a chat template."""
    tokenizer = load_tokenizer(TargetSettings(target=str(PAIR / "target")))
    tokenizer.chat_template = TEMPLATE
    return Pair(tokenizer, pair[0], pair[1])


def inputs_of(tokenizer, text):
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.grid
@pytest.mark.parametrize("spec", ["draft_model:num_draft_tokens=5", "draft_model", "prompt_lookup"])
@pytest.mark.parametrize("name", list(PROMPTS))
@pytest.mark.parametrize("coloured", [False, True])
def test_what_is_shown_is_the_text(pair, tokenizer, name, spec, coloured):
    """Live and afterwards; with colours the rejected tokens are in it, too, without them it is the bare text."""
    out = io.StringIO()
    colours = {"force_terminal": True, "color_system": "truecolor"} if coloured else {}
    console = Console(file=out, highlight=False, width=100, **colours)
    live = LiveText(console, tokenizer)
    pieces, show = [], live._print
    live._print = lambda text, kind: (pieces.append((kind, text)), show(text, kind))
    recorder = RecordingDrafter(load_drafter(spec, pair[1]), live.told)
    inputs = inputs_of(tokenizer, PROMPTS[name])
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = decode(pair[0], Method(PLAIN), inputs, **options)
    ours = decode(
        pair[0], Method("ours", {"assistant_model": recorder, "streamer": live}, None, recorder), inputs, **options
    )
    assert plain.rows == ours.rows and plain.stats.mean_acceptance_length == 1
    text = tokenizer.decode(ours.rows[0])
    assert "".join(piece for kind, piece in pieces if kind != "rejected") == text
    assert sum(r.accepted for r in recorder.rounds) == recorder.last_stats.accepted_tokens
    replaced = [r.rejected for r in recorder.rounds if r.rejected is not None and r.tokens[r.accepted :]]
    assert sum(kind == "rejected" and piece != "" for kind, piece in pieces) <= len(replaced)
    assert any(kind == "rejected" for kind, _ in pieces) or not replaced
    shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert live.written.plain == "".join(piece for _, piece in pieces)
    assert shown == (live.written.plain if coloured else text) + "\n"


def test_text_of_a_drafter_that_fails_is_shown_to_its_end(pair, tokenizer):
    class Failing(PromptLookupDrafter):
        def start(self, context):
            session = super().start(context)
            session.propose = lambda *_: 1 / 0
            return session

    out = io.StringIO()
    live = LiveText(Console(file=out, width=100), tokenizer)
    recorder = RecordingDrafter(Failing(), live.told)
    method = Method("ours", {"assistant_model": recorder, "streamer": live}, None, recorder)
    with pytest.warns(UserWarning, match="drop"):
        found = decode(pair[0], method, inputs_of(tokenizer, PROMPTS["code"]), max_new_tokens=70, do_sample=False)
    assert out.getvalue() == tokenizer.decode(found.rows[0]) + "\n"


def test_generate_answers_with_any_pair(capsys):
    pair = {"target": str(PAIR / "target"), "draft": str(PAIR / "draft"), "dtype": "float32"}
    run_generate(GenerateSettings(prompt="def add(a, b):", **pair, max_new_tokens=8, compare=True))
    printed = capsys.readouterr().out
    assert printed.startswith("def add(a, b):") and " all\n" in printed and "estimated" not in printed
    assert told_twice("auto", printed)
    run_generate(GenerateSettings(prompt="def add(a, b):", **pair, max_new_tokens=8))
    assert "same" not in capsys.readouterr().out


@pytest.mark.grid
@pytest.mark.parametrize("tokens", [1, 2, 24])
def test_a_comparison_copies_no_answer_of_its_own(tokens, capsys):
    """A drafter that remembers past outputs has seen the answer in the repetition before."""
    spec = "suffix"
    told = {"target": str(PAIR / "target"), "dtype": "float32", "drafter": spec, "max_new_tokens": tokens}
    run_generate(GenerateSettings(prompt="def add(a, b):", **told, compare=True))
    compared = told_twice(spec, capsys.readouterr().out)
    run_generate(GenerateSettings(prompt="def add(a, b):", **told))
    (alone,) = re.findall(r"^tokens per call +([\d.]+)$", capsys.readouterr().out, re.M)
    assert compared == alone


def told_twice(method: str, printed: str) -> str:
    """Tokens per call, which the table and the line below it say; and so the speed-up. One number for one thing."""
    ((speed_up, calls),) = re.findall(rf"^{method} +[\d.]+ +([\d.]+) +([\d.]+) ", printed, re.M)
    (said,) = re.findall(rf"^{speed_up}x: ([\d.]+) tokens per call", printed, re.M)
    assert said == f"{float(calls):.1f}"
    return calls


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": None},
        {"prompt": "  "},
        {"max_new_tokens": 0},
        {"temperature": -0.5},
        {"chat": True, "raw": True},
        {"chat": True, "compare": True},
        {"raw": True, "system": "Be brief."},
    ],
)
def test_generate_refuses_what_it_cannot_do(wrong):
    with pytest.raises(SpeculationError, match=next(reversed(wrong)) if len(wrong) == 1 else "leave one of them out"):
        run_generate(GenerateSettings(**({"target": "nowhere", "prompt": "Hello"} | wrong)))


@pytest.mark.parametrize("dtype", [torch.float32])
def test_a_conversation_reads_only_what_is_new(talkative, dtype):
    """Each answer is what plain `generate` gives for the whole conversation; the cache saves its beginning."""
    chat = Conversation(talkative, load_drafter("draft_model:num_draft_tokens=3", talkative.draft))
    tokenizer, target = talkative.tokenizer, talkative.target
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    for question in ("How many seats are there?", "And with one more?", "Write it as code."):
        read = len(chat.held)
        ids = tokenizer.apply_chat_template(
            [*chat.messages, {"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(ids, return_tensors="pt", add_special_tokens=False)["input_ids"]
        plain = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
        answer = chat.answer(question, **options)
        assert answer == tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True).strip()
        assert chat.held == plain[0, :-1].tolist()
        assert chat.cache.get_seq_length() == len(chat.held) > read
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 3


def test_a_conversation_goes_on_after_an_interruption(talkative):
    chat = Conversation(talkative, PromptLookupDrafter(), system="Be brief.")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": talkative.tokenizer.pad_token_id}
    chat.answer("What is 2 + 2?", **options)
    before = list(chat.messages)

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.answer("And 3 + 3?", stopping_criteria=[interrupt], **options)
    assert chat.messages == before and chat.cache is None
    again = Conversation(talkative, PromptLookupDrafter())
    again.messages = list(before)
    assert chat.answer("And 3 + 3?", **options) == again.answer("And 3 + 3?", **options)


def test_common_beginnings():
    assert common([1, 2, 3], [1, 2, 4]) == 2 and common([], [1]) == 0 and common([1, 2], [1, 2, 3]) == 2


def test_chat_in_the_terminal(talkative, monkeypatch, capsys):
    lines = iter(["What is 2 + 2?", "", "/new", "And 3 + 3?", "/exit"])
    monkeypatch.setattr(Console, "input", lambda *_: next(lines))
    monkeypatch.setattr(GenerateSettings, "load", lambda _: talkative)
    run_generate(GenerateSettings(target="pair", chat=True, max_new_tokens=6))
    assert len(re.findall("tokens per call", capsys.readouterr().out)) == 2


def test_the_demo_on_any_pair(talkative, monkeypatch, capsys):
    monkeypatch.setattr(DemoSettings, "load", lambda _: talkative)
    monkeypatch.setattr(turns, "cycle", iter)  # each prompt once
    ours = "draft_model:num_draft_tokens=3"
    run_demo(DemoSettings(target="pair", drafter=ours, beside=["prompt_lookup"], max_new_tokens=8, seconds=1e6))
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("prompt_lookup ")]
    assert len(rows) == 1 and "4 of 4" in rows[0] and "refused" not in rows[0]
    assert "\x1b" not in printed and "[-" not in printed and "{+" not in printed
    for question in SAMPLES.values():
        assert question.splitlines()[0][:60] in printed
    assert all(question in printed for question in BATCH)
    assert re.search("hf assisted .* refused .* 3 of 3", printed)
    assert "hf_specdec" in printed.splitlines()[-1] or "generate(" in printed


def test_the_picture_holds_what_was_said_and_nothing_that_turned(talkative, monkeypatch, tmp_path):
    monkeypatch.setattr(DemoSettings, "load", lambda _: talkative)
    monkeypatch.setattr(run, "SAMPLES", {"chat": SAMPLES["chat"]})
    picture = tmp_path / "demo.svg"
    run_demo(DemoSettings(target="pair", drafter="prompt_lookup", max_new_tokens=4, seconds=0.001, output=picture))
    text = picture.read_text()
    assert "hf_specdec" in text and "chat" in text
    assert not any(word in text for word in ("loading", "warming", "comparing"))
    assert BATCH[0] not in text.replace("&#160;", " ")  # what is no part of the picture


TIMES = {PLAIN: 4.0, "ours": 2.0, "slow": 10.0}


class Played:
    """A bench whose methods write ten tokens in set times, by method or by method and kind of prompt."""

    def __init__(self, times: dict[Any, float], refuses: tuple[str, ...] = ()) -> None:
        names = dict.fromkeys(key if isinstance(key, str) else key[0] for key in times)
        self.times, self.passes = times, [[Method(name, single_row=name in refuses) for name in names]]
        self.now, self.left = 0.0, math.inf
        """`left`: calls until somebody presses Ctrl-C"""

    def tokenize(self, unit: Unit) -> dict[str, torch.Tensor]:
        return {}

    def warm_up(self, unit: Unit, methods: Iterable[Method]) -> None:
        pass

    def generate(self, method: Method, unit: Unit, inputs: dict[str, torch.Tensor]) -> Generation:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        seconds = self.times.get((method.name, unit.dataset), self.times.get(method.name))
        self.now += seconds
        stats = SpeculationStats(row_steps=5, accepted_per_position=Counter({0: 5}), emitted_tokens=10)
        stats.total_seconds = seconds
        return Generation(method=method, rows=[[1] * 10], meter=Meter(), stats=stats)

    def turns(self, seconds: float, kinds: Sequence[str] = ("chat",)) -> Turns:
        """Those that were taken in so many seconds, or until Ctrl-C."""
        units = [Unit(kind, 0, 2 if kind.startswith("batch") else 1, 0.0, []) for kind in kinds]
        with clock.use(lambda: self.now):
            played = Turns(self, seconds)
            with suppress(KeyboardInterrupt):
                list(played.take(units))
        return played

    def rows(self, turns: Turns) -> dict[str, list[str]]:
        """The table, by the first word of its lines."""
        out = io.StringIO()
        Console(file=out, width=120).print(table(self.passes[0], turns.taken))
        return {line.split()[0]: line.split()[1:] for line in out.getvalue().splitlines() if line.strip()}


@pytest.mark.parametrize(("seconds", "taken"), [(0.5, 1), (6, 1), (11.9, 1), (12, 2), (59, 9), (60, 10)])
def test_as_many_turns_are_taken_as_fit(seconds: float, taken: int) -> None:
    """Plain decoding and ours take one however short the time is, and none that would end after it."""
    bench = Played({PLAIN: 4.0, "ours": 2.0})
    turns = bench.turns(seconds).taken
    assert len(turns) == taken and all(list(turn.made) == [PLAIN, "ours"] for turn in turns)
    assert bench.now == 6 * taken <= max(seconds, 6)


@pytest.mark.parametrize(("seconds", "taken"), [(9, 0), (10, 1), (25, 1), (31, 1), (32, 2), (48, 3)])
def test_another_method_takes_part_only_while_it_fits(seconds: float, taken: int) -> None:
    """At first it is believed to take as long as plain decoding; that may be wrong once."""
    bench = Played(TIMES)
    turns = bench.turns(seconds).taken
    assert sum("slow" in turn.made for turn in turns) == taken
    assert all({PLAIN, "ours"} <= turn.made.keys() for turn in turns)
    assert bench.now <= max(seconds, 16)


def test_what_a_kind_of_prompt_takes_is_known_from_its_own_turn() -> None:
    times = {(PLAIN, "short"): 1.0, ("ours", "short"): 1.0, (PLAIN, "long"): 5.0, ("ours", "long"): 5.0}
    taken = [turn.unit.dataset for turn in Played(times).turns(23, ["short", "long"]).taken]
    assert taken == ["short", "long", "short"]  # a second long one would end after 24 seconds


def test_a_method_is_compared_with_plain_decoding_in_its_own_turns() -> None:
    times = {(PLAIN, "chat"): 4.0, (PLAIN, "code"): 6.0, ("ours", "chat"): 2.0, ("ours", "code"): 2.0, "slow": 8.0}
    bench = Played(times)
    turns = bench.turns(22, ["chat", "code"])
    rows = bench.rows(turns)
    assert rows["ours"] == ["2.00x", "3.00x", "2.50x", "2.00-3.00", "2.00", "2", "of", "2"]
    assert rows["slow"] == ["0.50x", "-", "0.50x", "0.50-0.50", "2.00", "1", "of", "1"]
    assert rows["2"][0] == "turns;"


@pytest.mark.parametrize("calls", range(6))
def test_what_was_measured_before_an_interruption_counts(calls: int) -> None:
    bench = Played(TIMES)
    bench.left = calls
    turns = bench.turns(60)
    assert sum(len(turn.made) for turn in turns.taken) == calls
    rows = bench.rows(turns)
    assert str((calls + 1) // 3) in rows  # of the caption
    assert ("2.00x" in rows["ours"]) == (calls >= 2)


def test_an_interruption_prints_the_table(talkative, monkeypatch, capsys):
    monkeypatch.setattr(DemoSettings, "load", lambda _: talkative)
    generate, calls = Bench.generate, []

    def interrupted(bench, method, unit, inputs, **options):
        calls.append(method.name)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return generate(bench, method, unit, inputs, **options)

    monkeypatch.setattr(Bench, "generate", interrupted)
    run_demo(DemoSettings(target="pair", drafter="prompt_lookup", max_new_tokens=4))
    printed = capsys.readouterr().out
    assert "stopped" in printed and re.search(r"^hf_specdec .* 1 of 1", printed, re.M) and "1 turn;" in printed


@pytest.mark.set_times
def test_no_answer_is_copied_from_an_earlier_turn(talkative):
    """Whoever asks a question does not know the answer."""
    drafter = load_drafter("suffix", None)
    method = Method("ours", {"assistant_model": drafter}, None, drafter)
    bench = Bench(settings_of(DemoSettings(target="pair"), max_new_tokens=8), talkative, [[Method(PLAIN), method]])
    units = [Unit("chat", 0, 1, 0.0, [Prompt((SAMPLES["chat"],), chat=True)])]
    answers = Turns(bench, clock.now() + 1e6).take(units)
    made = [next(answers) for _ in range(4)]
    assert made[1].stats.drafted_per_position == made[3].stats.drafted_per_position and len(drafter.store) > 0


@pytest.mark.parametrize("seconds", [0, -1.0, math.inf, math.nan])
def test_the_demo_refuses_a_time_in_which_nothing_ends(seconds: float) -> None:
    with pytest.raises(SpeculationError, match=f"seconds must be above 0 and finite, got {seconds}; give"):
        run_demo(DemoSettings(target="nowhere", seconds=seconds))


def test_the_table_counts_what_all_methods_decoded():
    times = {PLAIN: 1.0, "ours": 0.5, ("ours", "batch 2"): 0.1, "other": 2.0}
    bench = Played(times, refuses=("other",))
    turns = bench.turns(5.0, ["chat", "batch 2"])
    turns.taken[0].made["other"].rows[0][3] = 2
    rows = bench.rows(turns)
    assert rows["ours"] == ["2.00x", "10.00x", "2.00x", "2.00-2.00", "2.00", "2", "of", "2"]
    assert rows["other"] == ["0.50x", "refused", "0.50x", "0.50-0.50", "2.00", "0", "of", "1"]


def test_near_ties_are_summed_up_and_what_rounding_does_not_explain_is_not():
    tie, wrong = Difference(3, 1, 2, 0.0, 1.0, True), Difference(7, 1, 2, 9.0, 1.0, True)
    (line,) = said_of_texts([("ours", "chat", tie)])
    assert line.startswith("Texts that leave") and ": 1." in line
    assert list(said_of_texts([("ours", "chat", wrong)])) == ["WRONG: ours, chat: differs at new token 7"]


AVX512 = {"avx2": True, "avx512_f": True, "avx512_bw": True, "avx512_vnni": True}


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({}, "float32"),  # an older torch, which does not say
        ({"avx2": True, "avx512_f": False, "avx512_bf16": False, "amx_bf16": False}, "float32"),
        (AVX512 | {"avx512_bf16": False, "amx_bf16": False}, "float32"),  # Skylake to Ice Lake
        (AVX512 | {"avx512_bf16": True, "amx_bf16": False}, "bfloat16"),
        (AVX512 | {"avx512_bf16": True, "amx_bf16": True}, "bfloat16"),
        ({"avx2": True, "amx_tile": True, "amx_int8": True, "amx_bf16": False}, "float32"),
        ({"avx2": True, "amx_tile": True, "amx_bf16": True}, "bfloat16"),
    ],
)
def test_bfloat16_only_where_the_cpu_computes_in_it(capabilities, dtype):
    assert cpu_dtype(capabilities) == dtype


def test_the_demo_asks_torch_for_what_the_cpu_can_do(monkeypatch):
    if hasattr(torch.cpu, "get_capabilities"):
        assert {"avx512_bf16", "amx_bf16"} <= set(cpu_capabilities()) or platform.machine() not in ("x86_64", "AMD64")
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert cpu_capabilities() == {}


@pytest.mark.parametrize(("limit", "kept"), [("avx512_core", False), ("AVX512_CORE_BF16", True), ("DEFAULT", True)])
def test_a_cpu_that_pretends_to_know_less_is_believed(limit: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True, "amx_bf16": True, "avx2": True})
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert cpu_dtype(cpu_capabilities()) == ("bfloat16" if kept else "float32") and cpu_capabilities()["avx2"]


def test_generate_samples_the_same_for_one_seed(capsys):
    said = []
    for seed in (1, 2, 1):
        settings = {"target": str(PAIR / "target"), "dtype": "float32", "device": "cpu", "threads": 1}
        run_generate(
            GenerateSettings(prompt="def add(a, b):", **settings, max_new_tokens=8, temperature=1.0, seed=seed)
        )
        said.append(capsys.readouterr().out.splitlines()[:3])
    assert said[0] == said[2] != said[1]
