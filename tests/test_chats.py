"""Prompts that are chats: read from files, put into the template, and played turn by turn."""

import json
import re
from pathlib import Path

import pytest
from chats import talking_tokenizer

from hf_specdec.errors import SpeculationError
from hf_specdec.loading.chat import ask, batch, prompt_ids
from hf_specdec.loading.prompts import Prompt, load_prompts

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
        ({"turns": []}, "does not fit the spec_bench template: turns is empty"),
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
    with pytest.raises(SpeculationError, match="refuses messages of system, user: System role not supported"):
        ask(tokenizer, "Hello.", "Be brief.")


def test_uneven_prompts_pad_left():
    inputs = batch([[5, 6, 7], [8]], 0)
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch([[5], [6, 7]], None)["attention_mask"].tolist() == [[0, 1], [1, 1]]
