"""Prompts that are chats: read from files, put into the template, and played turn by turn."""

import json
import re
from pathlib import Path

import pytest
from chats import TEMPLATE, save_pair, talking_tokenizer
from measured import measurement
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.errors import SpeculationError, SpeculationWarning
from hf_specdec.tools.bench.measure import Bench
from hf_specdec.tools.bench.plan import Settings, plan
from hf_specdec.tools.bench.results import Results
from hf_specdec.tools.bench.run import run_bench
from hf_specdec.tools.bench.summary import ratio_interval
from hf_specdec.tools.loading.chat import ask, batch, prompt_ids
from hf_specdec.tools.loading.models import Pair
from hf_specdec.tools.loading.prompts import Prompt, load_prompts
from hf_specdec.train.disco import answers

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO, HI, MORE = (
    {"role": role, "content": content}
    for role, content in (("user", "Hello."), ("assistant", "Hi."), ("user", "Tell me more."))
)


def prompts_file(folder: Path, *rows: object, name: str = "chats.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ------------------------------------------------------------------ lines


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"turns": ["Compose.", "Again."]}, Prompt(("Compose.", "Again."), chat=True)),
        ({"messages": [HELLO]}, Prompt(("Hello.",), chat=True)),
        ({"messages": [SYSTEM, HELLO]}, Prompt(("Hello.",), (("system", "Be brief."),), chat=True)),
        ({"messages": [HELLO, MORE]}, Prompt(("Hello.", "Tell me more."), chat=True)),
        (
            {"messages": [SYSTEM, HELLO, MORE]},
            Prompt(("Hello.", "Tell me more."), (("system", "Be brief."),), chat=True),
        ),
        (
            {"messages": [SYSTEM, HELLO, HI, MORE]},
            Prompt(("Tell me more.",), (("system", "Be brief."), ("user", "Hello."), ("assistant", "Hi.")), chat=True),
        ),
        ({"prompt": "def f():", "messages": [HELLO]}, Prompt(("def f():",))),
    ],
)
def test_a_line_is_a_text_a_history_or_a_conversation_to_be_played(tmp_path, row, prompt):
    assert load_prompts(prompts_file(tmp_path, row, row)) == [prompt]  # the second is the same


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "does not fit the messages template: messages must end with a user's, got none"),
        ({"messages": [HELLO, HI]}, "must end with a user's, got assistant"),
        ({"messages": [SYSTEM]}, "must end with a user's, got system"),
        ({"messages": [HELLO, SYSTEM, MORE]}, "a system message must be the first"),
        ({"messages": [SYSTEM, SYSTEM, MORE]}, "there can be only one"),
        ({"messages": ["Hello."]}, "message 1 has the role None"),
        ({"messages": [HELLO, {"role": "tool", "content": "4"}]}, "message 2 has the role 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "message 1 has the content"),
        ({"messages": [{"role": "user", "content": " "}]}, "empty prompt"),
        ({"turns": []}, "does not fit the spec_bench template: there are no turns"),
        ({"turns": ["Compose.", 3]}, "empty prompt"),
        ({"turns": ["Compose.", ""]}, "empty prompt"),
    ],
)
def test_a_bad_line_is_named_in_one_line(tmp_path, row, message):
    path = prompts_file(tmp_path, {"prompt": "a"}, row)
    with pytest.raises(SpeculationError, match=re.escape(message)) as caught:
        load_prompts(path)
    assert str(caught.value).startswith(f"{path}, line 2 ") and "\n" not in str(caught.value)


# ------------------------------------------------------------------ token ids


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_ids_are_those_of_the_chat_template(system):
    tokenizer = talking_tokenizer()
    before = [SYSTEM] if system else []
    conversation = Prompt(("Hello.", "Tell me more."), chat=True)

    def expected(*messages):
        made = tokenizer.apply_chat_template([*before, *messages], add_generation_prompt=True)
        return made["input_ids"]

    first = prompt_ids(tokenizer, conversation, system=system)
    assert first == expected(HELLO) == ask(tokenizer, "Hello.", system)
    assert first.count(tokenizer.bos_token_id) == 1
    assert prompt_ids(tokenizer, conversation.after("Hi."), system=system) == expected(HELLO, HI, MORE)


def test_a_system_message_of_the_line_stays():
    tokenizer, prompt = talking_tokenizer(), Prompt(("Hello.",), (("system", "Be brief."),), chat=True)
    assert prompt_ids(tokenizer, prompt, system="Be long.") == prompt_ids(tokenizer, prompt)


def test_texts_and_raw_chats_go_without_the_template():
    tokenizer, text = talking_tokenizer(), "Hello.\n\nHi.\n\nTell me more."
    chat = Prompt(("Hello.", "Tell me more."), chat=True).after("Hi.")
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert prompt_ids(tokenizer, Prompt((text,)), system="Be brief.") == ids
    assert prompt_ids(tokenizer, chat, raw=True) == ids == prompt_ids(talking_tokenizer(None), chat)


def test_what_a_template_refuses_is_an_error_of_ours():
    tokenizer = talking_tokenizer("{{ raise_exception('System role not supported') }}")
    with pytest.raises(SpeculationError, match="does not accept messages of system, user: System role not supported"):
        ask(tokenizer, "Hello.", "Be brief.")


def test_uneven_prompts_pad_left():
    inputs = batch([[5, 6, 7], [8]], 0)
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch([[5], [6, 7]], None)["attention_mask"].tolist() == [[0, 1], [1, 1]]


# ------------------------------------------------------------------ conversations, played and measured

CONVERSATIONS = (
    {"turns": ["Hello.", "Tell me more.", "Thanks."]},
    {"messages": [SYSTEM, HELLO]},
    {"turns": ["Who are you?", "Why?"]},
)


def bench_of(folder: Path, *rows: object, template: str | None = TEMPLATE, model: dict | None = None, **more) -> Bench:
    path = prompts_file(folder, *(rows or CONVERSATIONS))
    small = {"dtype": "float32", "max_new_tokens": 6, "threads": 1, "repeats": 2, "baselines": ["plain"]}
    drafters = ["draft_model:num_draft_tokens=2"]
    pair = save_pair(folder, template, **model or {})
    return Bench.load(Settings(**pair, prompts=[str(path)], drafters=drafters, **small | more))


def listen(bench: Bench, monkeypatch) -> list[tuple[str, int, list[list[int]], list[list[int]]]]:
    """Method, turn, prompts and answers (without padding) of every measured call."""
    heard, honest = [], bench.generate

    def generate(method, unit, inputs):
        made = honest(method, unit, inputs)
        pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        heard.append((method.name, unit.turn, [ids[m == 1].tolist() for ids, m in pairs], made.rows))
        return made

    monkeypatch.setattr(bench, "generate", generate)
    return heard


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("raw", [False, True])
def test_each_turn_is_asked_behind_plain_decodings_answers(tmp_path, monkeypatch, temperature, raw):
    more = {"temperatures": (temperature,), "baselines": ["plain", "hf-assisted"]}
    bench = bench_of(tmp_path, raw=raw, system="Be kind.", **more)
    heard = listen(bench, monkeypatch)
    tokenizer, unit = bench.tokenizer, plan(bench.settings)[0]
    measured = bench.measure(unit)
    prompt = unit.prompts[0]
    for turn in range(3):
        calls = [call for call in heard if call[1] == turn]
        assert len(calls) == 6 and {call[0] for call in calls} == {method.name for method in bench.passes[0]}
        assert all(call[2] == [prompt_ids(tokenizer, prompt, raw, "Be kind.")] for call in calls), "the same for all"
        (answer,) = next(call[3] for call in calls if call[0] == "plain")
        prompt = prompt.after(tokenizer.decode(answer, skip_special_tokens=True))
    assert len(measured) == 6 and {m.unit for m in measured} == {unit.key}
    assert all(m.same_text for m in measured) or temperature


def test_an_answer_is_put_into_the_template_without_the_tokens_that_end_it(tmp_path, monkeypatch):
    bench = bench_of(tmp_path)
    letter = bench.tokenizer("a")["input_ids"][-1]
    bench.target.generation_config.eos_token_id = [letter, 2]
    assert bench._text([letter - 1, letter]) == bench.tokenizer.decode([letter - 1])


def test_in_a_batch_those_with_more_turns_go_on(tmp_path, monkeypatch):
    bench = bench_of(tmp_path, batch_sizes=(3,), repeats=1)
    heard = listen(bench, monkeypatch)
    (unit,) = plan(bench.settings)
    measured = bench.measure(unit)
    rows = {call[1]: call[2] for call in heard if call[0] == "plain"}
    answers = {call[1]: call[3] for call in heard if call[0] == "plain"}
    assert {turn: len(prompts) for turn, prompts in rows.items()} == {0: 3, 1: 2, 2: 1}
    assert rows[0] == [prompt_ids(bench.tokenizer, prompt) for prompt in unit.prompts]
    first, third = (
        prompt.after(bench._text(answer))
        for prompt, answer in zip(unit.prompts, answers[0], strict=True)
        if prompt.turns[1:]
    )
    assert rows[1] == [prompt_ids(bench.tokenizer, first), prompt_ids(bench.tokenizer, third)]
    assert all(m.same_text for m in measured) and len(measured) == 2
    assert measured[0].stats.emitted_tokens == sum(len(row) for turn in answers.values() for row in turn)


def test_turns_beyond_the_context_are_left_out_with_a_warning(tmp_path):
    bench = bench_of(tmp_path, {"turns": ["Hello.", "x" * 40, "Thanks."]}, model={"max_position_embeddings": 48})
    with pytest.warns(
        SpeculationWarning, match=r"chats 0 from turn 2 on left out: .* it needs \d+ positions, and the target has 48"
    ):
        measured = bench.measure(plan(bench.settings)[0])
    assert [m.stats.emitted_tokens for m in measured if m.method == "plain"] == [6, 6], "of the first turn"


def test_a_conversation_is_one_prompt_of_the_figures(tmp_path):
    bench, saved = bench_of(tmp_path), []
    results = Results({})
    bench.run(results, plan(bench.settings), save=lambda results: saved.append(len(results.measurements)))
    assert saved == [4, 8, 12], "units are saved whole"
    assert all(run["prompts"] == 3 and run["identical"] for run in results.runs)
    plain = results.runs[0]
    assert plain["tokens"] == 6 * 6 and plain["repeats"] == 2
    mine = [m for m in results.measurements if m.method == "plain"]
    assert len(mine) == 6 and ratio_interval(mine[::2], mine[::2]) == (1.0, 1.0)


def test_turns_are_put_together_by_sums():
    def turn(seconds, **more):
        counts = {"drafted_per_position": [3, 2], "accepted_per_position": [2], "same_text": True}
        return measurement("fast", 0, 0, 10, seconds, **counts | more)

    difference = {"position": 3, "near_tie": True, "turn": 1}
    parted = turn(2.0, same_text=False, difference=difference, accepted_per_position=[1, 1], peak_memory_bytes=2000)
    whole = turn(1.0).then(parted).then(turn(4.0))
    assert (whole.stats.emitted_tokens, whole.stats.total_seconds, whole.peak_memory_bytes) == (30, 7.0, 2000)
    assert (whole.stats.drafted_per_position, whole.stats.accepted_per_position) == ({0: 9, 1: 6}, {0: 5, 1: 1})
    assert whole.same_text is False and whole.difference == difference


def test_results_without_a_setting_are_not_gone_on_with(tmp_path):
    bench = bench_of(tmp_path)
    settings = json.loads(json.dumps(vars(bench.settings)))
    old = {name: value for name, value in settings.items() if name not in ("raw", "system")}
    path = tmp_path / "old.json"
    Results({"settings": old}, [measurement("plain", 0, 0, 10, 1.0)]).save(path)
    with pytest.raises(
        SpeculationError, match=r"cannot resume .*old\.json: .* without the setting raw, system; name another"
    ):
        run_bench(bench.settings, path, resume=True)


def test_bench_takes_chats_by_command_and_goes_on(tmp_path):
    pair, path = save_pair(tmp_path), prompts_file(tmp_path, *CONVERSATIONS)
    models = ["--target", pair["target"], "--draft", pair["draft"], "--dtype", "float32", "--threads", "1"]
    size = ["--max-new-tokens", "4", "--repeats", "1", "--baseline", "plain", "--drafter", "draft_model"]
    arguments = ["bench", *models, *size, "--prompts", str(path), "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, [*arguments, "--system", "Be kind."])
    assert result.exit_code == 0, result.output
    results = Results.load(tmp_path / "out.json")
    assert [run["prompts"] for run in results.runs] == [3, 3] and len(results.measurements) == 6
    results.measurements = [m for m in results.measurements if m.prompt != 1]
    results.save(tmp_path / "out.json")
    assert CliRunner().invoke(app, [*arguments, "--system", "Be kind.", "--resume"]).exit_code == 0
    assert len(Results.load(tmp_path / "out.json").measurements) == 6
    changed = CliRunner().invoke(app, [*arguments, "--raw", "--resume"])
    assert changed.exit_code == 2 and "another raw, system" in changed.output


# ------------------------------------------------------------------ training


def test_disco_learns_from_the_answers_to_chats(tmp_path):
    paths, chats = save_pair(tmp_path), [Prompt(("Hello.", "More?"), chat=True), Prompt(("Who are you?",), chat=True)]
    pair = Pair(talking_tokenizer(), LlamaForCausalLM.from_pretrained(paths["target"]), None)
    texts = answers(pair, chats, tmp_path / "records", False, 8)
    assert [text.ids[: text.start] for text in texts] == [prompt_ids(pair.tokenizer, chat) for chat in chats]
