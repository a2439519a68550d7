"""`hf-specdec serve`: real clients over HTTP on loopback get what plain decoding says."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import TEMPLATE, VOCAB, save_pair, talking_tokenizer
from models import llama, slow
from processes import children, free_port, until
from seam import HeadDrafter, HeadSession

from hf_specdec import BatchDecoder, PearlDrafter, PromptLookupDrafter, SpeculationError
from hf_specdec.serve.reporting import reporting
from hf_specdec.serve.server import (
    ServerOptions,
    ServeSettings,
    check_address,
    check_options,
    handing_out,
    run_serve,
    say,
)
from hf_specdec.serve.speculating import Speculating
from hf_specdec.tools.audit.findings import AuditSettings
from hf_specdec.tools.audit.run import run_audit
from hf_specdec.tools.loading.models import Pair

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
from transformers.cli.serve import Serve  # noqa: E402

from hf_specdec.serve.continuous import in_place_of_stock  # noqa: E402

QUESTION = [{"role": "user", "content": "abcabc?"}]
COPIED = "abcabc? abcabc? abcabc?"
TURNS = [*QUESTION, {"role": "assistant", "content": "abc"}, {"role": "user", "content": "more"}]


class Served:
    """A tiny model behind transformers' server, in a thread of this process."""

    decoder: Any = None
    """where requests join one batch"""

    def __init__(self, drafter: Any, port: int, lines: list[str]) -> None:
        self.tokenizer = talking_tokenizer()
        self.target = llama(VOCAB, eos_token_id=2, max_position_embeddings=256)
        self.target.generation_config.do_sample = False
        self.drafter, self.port, self.lines = drafter, port, lines
        self.speculating = Speculating(self.target, drafter, lines.append)
        self.counts = self.speculating.counts

    @property
    def client(self) -> Any:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=60)

    def plain(self, messages: list[dict[str, str]], most: int, **options: Any) -> list[int]:
        """Ids of plain decoding's answer."""
        ids = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = type(self.target).generate(
            self.target, **ids, max_new_tokens=most, do_sample=False, tokenizer=self.tokenizer, **options
        )
        return out[0, ids["input_ids"].shape[1] :].tolist()

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def metrics(self) -> dict[str, int]:
        """Counters by name and own label, as Prometheus reads them."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as response:
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            text = response.read().decode()
        labels = r'\{engine="0",model_name="a \\"tiny\\" one"(?:,\w+="(\w+)")?\}'
        samples = re.findall(rf"^vllm:(\w+)_total{labels} (\d+)$", text, re.MULTILINE)
        assert len(samples) == len([line for line in text.splitlines() if not line.startswith("#")])
        return {f"{name} {label}".strip(): int(value) for name, label, value in samples}

    def post(self, path: str, body: Any) -> tuple[int, str]:
        """Status and body of whatever was sent."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@contextmanager
def serving(drafter: Any, joined: bool = False, **bounds: int) -> Iterator[Served]:
    served = Served(drafter, free_port(), [])
    served.speculating.warm_up(served.tokenizer)
    pair = Pair(served.tokenizer, served.target, None)
    options = asdict(ServerOptions(host="127.0.0.1", port=served.port)) | {"non_blocking": True}
    with ExitStack() as blocks:
        if joined:
            served.decoder = blocks.enter_context(BatchDecoder(served.target, drafter, **bounds))
            blocks.enter_context(in_place_of_stock(served.decoder, served.lines.append, served.counts))
        else:
            blocks.enter_context(served.speculating.in_place())
        blocks.enter_context(reporting(served.counts, 'a "tiny" one'))
        blocks.enter_context(handing_out(pair, "tiny"))
        server = Serve("tiny", continuous_batching=joined, **options)
        try:
            until(lambda: server.server.started)
            yield served
        finally:
            server.kill_server()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(PromptLookupDrafter()) as one:
        yield one


@pytest.fixture(scope="module")
def joined() -> Iterator[Served]:
    with serving(PromptLookupDrafter(), joined=True, max_rows=6) as one:
        yield one


@pytest.fixture(params=["served", "joined"])
def either(request: pytest.FixtureRequest) -> Served:
    """Requests that wait for each other, or that join one batch."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("messages", [QUESTION, TURNS], ids=["a question", "several turns"])
def test_an_answer_is_plain_decodings(either: Served, messages: list[dict[str, str]]) -> None:
    plain = either.plain(messages, 40)
    answer = either.client.chat.completions.create(model="tiny", messages=messages, max_tokens=40, temperature=0)
    assert answer.choices[0].message.content == either.text(plain)
    assert answer.usage.completion_tokens == len(plain)
    assert answer.choices[0].finish_reason == ("length" if len(plain) == 40 else "stop")
    assert re.search(rf"\d+: {len(plain)} tokens in \d+\.\d\d s; .*\d\.\d tokens per call", either.lines[-1])


def test_a_stream_is_counted_token_by_token(either: Served) -> None:
    plain = either.plain(QUESTION, 40)
    chunks = list(
        either.client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=40, temperature=0, stream=True
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.rstrip("\ufffd") == either.text(plain).rstrip("\ufffd"), "streams leave out a character that is cut off"
    assert chunks[-1].usage.completion_tokens == len(plain)
    assert len(chunks) > 4


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["chat", "text"])
def test_usage_and_metrics_say_what_drafts_did(either: Served, path: str, stream: bool) -> None:
    """Of one answer the same, and the counters add up."""
    before = either.metrics()
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 60, "temperature": 0}
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    if path == "chat":
        answer = either.client.chat.completions.create(messages=[{"role": "user", "content": COPIED}], **asked)
    else:
        answer = either.client.completions.create(prompt=COPIED, **asked)
    usage = (list(answer)[-1] if stream else answer).usage
    after = either.metrics()
    new = Counter({name: value - before.get(name, 0) for name, value in after.items()})
    details, drafts = usage.completion_tokens_details, "spec_decode_num_"
    accepted, drafted = new[f"{drafts}accepted_tokens"], new[f"{drafts}draft_tokens"]
    assert (usage.prompt_tokens, usage.completion_tokens) == (new["prompt_tokens"], new["generation_tokens"])
    assert details.accepted_prediction_tokens == accepted > 0
    assert details.rejected_prediction_tokens == drafted - accepted
    by_position = [n for name, n in sorted(new.items()) if name.startswith(f"{drafts}accepted_tokens_per_pos")]
    assert sum(by_position) == accepted and max(by_position) <= new[f"{drafts}drafts"] <= drafted
    ended = {name: n for name, n in new.items() if name.startswith("request_success") and n}
    assert ended == {f"request_success {'length' if usage.completion_tokens == 60 else 'stop'}": 1}


def test_stop_lists_are_kept_to(either: Served) -> None:
    whole = either.text(either.plain(QUESTION, 40))
    stops = [whole[9:11], whole[20:22]]
    plain = either.plain(QUESTION, 40, stop_strings=stops)
    answer = either.client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=40, temperature=0, stop=stops
    )
    assert answer.choices[0].message.content == either.text(plain) and len(plain) < 40
    assert answer.usage.completion_tokens == len(plain)


def test_calls_of_tools_are_parsed_as_transformers_does(either: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between two marks of the answer's own is a call: the template says so."""
    text = either.tokenizer.decode(either.plain(QUESTION, 40))
    begin, end = text[4:7], text[16:19]
    said = text[text.index(begin) + 3 : text.index(end, text.index(begin) + 3)]
    call = {"type": "function", "function": {"name": "look_up", "arguments": "{content}"}}
    region = {"open": begin, "close": end, "content": "text", "transform": call}
    anchor = either.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    fields = {"tool_calls": region | {"repeats": True}, "content": {"content": "text"}}
    template = {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}
    monkeypatch.setattr(either.tokenizer, "response_template", template, raising=False)
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    asked = {"model": "tiny", "messages": QUESTION, "max_tokens": 40, "temperature": 0, "tools": [tool]}
    answer = either.client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    first = answer.message.tool_calls[0]
    assert (first.function.name, first.function.arguments.strip()) == ("look_up", said.strip())
    chunks = [
        chunk.choices[0] for chunk in either.client.chat.completions.create(**asked, stream=True) if chunk.choices
    ]
    streamed = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [call.function.arguments for call in streamed] == [
        call.function.arguments for call in answer.message.tool_calls
    ]


def test_completions_without_a_template(either: Served) -> None:
    ids = either.tokenizer("abcabcab", return_tensors="pt")
    out = type(either.target).generate(either.target, **ids, max_new_tokens=24, do_sample=False)
    answer = either.client.completions.create(model="tiny", prompt="abcabcab", max_tokens=24, temperature=0)
    assert answer.choices[0].text == either.text(out[0, ids["input_ids"].shape[1] :].tolist())


def test_an_audit_of_the_server_finds_nothing(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside itself, told to draft nothing."""
    monkeypatch.setattr(served.target.generation_config, "do_sample", True)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": QUESTION}))
    known = {"server": f"http://127.0.0.1:{served.port}/v1", "prompts": str(tmp_path / "prompts.jsonl")}
    off = json.dumps({"generation_config": json.dumps({"speculation_type": "none"})})
    before = len(served.lines)
    (report,) = run_audit(AuditSettings(**known, without=off, samples=50, max_new_tokens=32))
    assert report.fine, capsys.readouterr().out
    assert [found.said for found in report.findings[:4]] == ["1 of 1 the same"] * 4
    assert report.findings[-2].said.startswith("p = ")
    assert int(report.findings[-1].said.replace(",", "")) > 0
    plain = [line.endswith("decoded plainly") for line in served.lines[before:]]
    assert plain.count(True) > plain.count(False) > 50


def test_many_clients_at_once(either: Served) -> None:
    def asked(i: int) -> tuple[str, str]:
        messages = [{"role": "user", "content": f"number {i}"}]
        answer = either.client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8 + i % 5, temperature=0
        )
        return answer.choices[0].message.content, messages[0]["content"]

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(asked, range(32)))
    for i, (said, question) in enumerate(answers):
        assert said == either.text(either.plain([{"role": "user", "content": question}], 8 + i % 5))


def test_a_client_that_hangs_up_frees_the_model_within_a_round(served: Served) -> None:
    before, rounds = served.metrics(), served.speculating.total.target_calls
    with slow(served.target, 0.05):
        stream = served.client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=180, temperature=1.5, stream=True, seed=1
        )
        next(iter(stream))
        stream.close()
        until(lambda: served.metrics()["request_success abort"] > before["request_success abort"])
    assert served.metrics()["generation_tokens"] < before["generation_tokens"] + 120
    assert served.speculating.total.target_calls == rounds
    plain = served.plain(QUESTION, 12)
    answer = served.client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == served.text(plain)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{not json", 422),
        ({"model": "tiny", "messages": QUESTION, "unheard_of": 1}, 422),
        ({"model": "another", "messages": QUESTION}, 400),
        ({"model": "tiny", "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 8}, 400),
        ({"model": "tiny", "messages": QUESTION, "max_tokens": 0}, 400),
        ({"model": "tiny", "messages": QUESTION, "max_tokens": 8, "stop": []}, 200),
    ],
    ids=["no JSON", "unknown field", "another model", "beyond the context", "no tokens", "stops, but none"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_answered_harms_nobody(served: Served, body: Any, expected: int) -> None:
    status, _ = served.post("/v1/chat/completions", body)
    assert status == expected
    plain = served.plain(QUESTION, 8)
    answer = served.client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content == served.text(plain)


@pytest.mark.eager
def test_a_joined_client_that_hangs_up_frees_its_row(joined: Served) -> None:
    with slow(joined.target, 0.02):
        streams = [
            joined.client.chat.completions.create(
                model="tiny", messages=QUESTION, max_tokens=200, temperature=1.5, stream=True, seed=i
            )
            for i in range(8)
        ]
        for stream in streams[:4]:
            next(iter(stream))
        for stream in streams:
            stream.close()
        until(lambda: joined.decoder.load.rows == 0 and joined.decoder.load.waiting == 0)
    assert joined.decoder.load.bytes == 0
    assert any(line.endswith("cancelled") for line in joined.lines)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{not json", 422),
        ({"model": "another", "messages": QUESTION}, 400),
        ({"model": "tiny", "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 8}, 400),
        ({"model": "tiny", "messages": QUESTION, "max_tokens": 0}, 400),
        ({"model": "tiny", "messages": QUESTION, "max_tokens": 8, "stop": []}, 200),
        ({"model": "tiny", "messages": QUESTION, "max_tokens": 0, "stream": True}, 400),
        ({"model": "tiny", "messages": QUESTION, "generation_config": '{"num_beams": 2, "max_new_tokens": 4}'}, 400),
        ({"model": "tiny", "messages": QUESTION, "generation_config": '{"speculation_type": "none"}'}, 400),
    ],
    ids=[
        "no JSON",
        "another model",
        "beyond the context",
        "no tokens",
        "stops, but none",
        "no tokens, streamed",
        "beams",
        "no drafts",
    ],
)
def test_what_cannot_join_harms_nobody(joined: Served, body: Any, expected: int) -> None:
    status, said = joined.post("/v1/chat/completions", body)
    assert status == expected, said
    plain = joined.plain(QUESTION, 8)
    answer = joined.client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content == joined.text(plain)


def test_settings_of_joined_requests_are_each_ones_own(joined: Served) -> None:
    """One seed, one text: beside greedy requests with stops of their own."""

    def asked(i: int) -> Any:
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 10 + i}
        if i % 2:
            options = {"temperature": 0, "max_tokens": 30, "stop": [whole[4 + i : 6 + i]]}
        return joined.client.chat.completions.create(model="tiny", messages=QUESTION, **options)

    whole = joined.text(joined.plain(QUESTION, 30))
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(asked, range(12)))
    for i, answer in enumerate(answers):
        stops = {"stop_strings": [whole[4 + i : 6 + i]]} if i % 2 else {}
        expected = joined.plain(QUESTION, 30 if i % 2 else 10 + i, **stops)
        assert answer.choices[0].message.content == joined.text(expected)
        assert answer.usage.completion_tokens == len(expected)


def test_a_head_on_the_targets_states_drafts_for_joined_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadSession, "weighs", True)  # one that was never trained
    with serving(HeadDrafter(), joined=True, max_rows=3) as served, ThreadPoolExecutor(5) as pool:
        plain = served.text(served.plain(QUESTION, 30))
        asked = {"model": "tiny", "messages": QUESTION, "max_tokens": 30, "temperature": 0}
        for answer in pool.map(lambda _: served.client.chat.completions.create(**asked), range(5)):
            assert answer.choices[0].message.content == plain
        assert served.decoder.stats.drafted_tokens and not served.decoder.stats.notes


@pytest.mark.eager
def test_a_full_queue_is_said_over_http() -> None:
    with serving(PromptLookupDrafter(), joined=True, max_rows=1, max_waiting=1) as served:
        body = {"model": "tiny", "messages": QUESTION, "max_tokens": 30, "temperature": 0}
        with ThreadPoolExecutor(4) as pool:
            with slow(served.target, 0.05):
                first = pool.submit(served.post, "/v1/chat/completions", body)
                until(lambda: served.decoder.load.rows == 1)
                second = pool.submit(served.post, "/v1/chat/completions", body)
                until(lambda: served.decoder.load.waiting == 1)
                status, said = served.post("/v1/chat/completions", body)
            assert status == 429 and "max_waiting=1" in said
            assert first.result()[0] == second.result()[0] == 200


def test_what_no_drafter_serves_is_decoded_plainly(served: Served) -> None:
    config = json.dumps({"prompt_lookup_num_tokens": 2, "max_new_tokens": 12, "eos_token_id": 2, "pad_token_id": 0})
    served.target.generation_config.speculation_type = "prompt_lookup"  # as a model may have been saved
    try:
        status, said = served.post(
            "/v1/chat/completions", {"model": "tiny", "messages": QUESTION, "generation_config": config}
        )
    finally:
        del served.target.generation_config.speculation_type
    assert status == 200 and json.loads(said)["usage"]["completion_tokens"] > 0
    assert any("decoded plainly: prompt_lookup_num_tokens=2" in line for line in served.lines)


def test_the_model_is_listed_by_its_name(served: Served) -> None:
    assert [one.id for one in served.client.models.list()] == ["tiny"]


def test_an_empty_prompt_is_the_clients_mistake(served: Served) -> None:
    """Some tokenizers make no token of an empty text."""
    with pytest.raises(Exception, match="must have 1 to 255 tokens, got 0") as raised:
        served.target.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=4)
    assert raised.value.status_code == 400  # type: ignore[attr-defined]


def test_the_summary_tells_of_all_answers(served: Served) -> None:
    """Its gain lies between those of the answers that it sums up."""
    speculating = served.speculating
    for most in (12, 40):  # whatever other tests have asked this server
        served.client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=most, temperature=0)
    assert re.match(rf"{speculating.answers} answers.*; [\d,]+ tokens in", speculating.summary())
    gains = [float(gain) for line in served.lines for gain in re.findall(r"s; (?:at most )?([\d.]+)x estimated:", line)]
    (said,) = re.findall(r"([\d.]+)x estimated:", speculating.summary())
    assert min(gains) <= float(said) <= max(gains)


@pytest.mark.slow
def test_a_worker_that_dies_costs_no_answer() -> None:
    with serving(PearlDrafter(llama(VOCAB, seed=1, eos_token_id=2), worker="process", window=3)) as served:
        plain = served.text(served.plain(QUESTION, 60))
        with ThreadPoolExecutor(4) as pool:
            answers = [
                pool.submit(
                    served.client.chat.completions.create,
                    model="tiny",
                    messages=QUESTION,
                    max_tokens=60,
                    temperature=0,
                )
                for _ in range(4)
            ]
            for process in children(os.getpid()):
                if b"hf_specdec" in Path(f"/proc/{process}/cmdline").read_bytes():
                    os.kill(process, signal.SIGKILL)
            assert [answer.result().choices[0].message.content for answer in answers] == [plain] * 4
        served.drafter.close()


def test_a_model_that_cannot_verify_is_served_plainly() -> None:
    served = Served(PromptLookupDrafter(), 0, [])
    served.target.generation_config.use_cache = False
    with pytest.warns(UserWarning):
        served.speculating.warm_up(served.tokenizer)
    assert served.speculating.plain_because
    with served.speculating.in_place():
        ids = served.tokenizer("abc", return_tensors="pt")
        served.target.generate(**ids, max_new_tokens=4)
    assert served.lines[-1].endswith("decoded plainly")
    assert "generate" not in vars(served.target)


def test_a_drafter_for_another_target_is_refused() -> None:
    served = Served(PromptLookupDrafter(), 0, [])
    served.drafter.config.target = {"name": "org/another", "hidden_size": 1024}
    with pytest.raises(SpeculationError, match="org/another"):
        served.speculating.warm_up(served.tokenizer)


def test_addresses_that_cannot_be_served_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(SpeculationError, match="--port"):
        check_address("127.0.0.1", listener.getsockname()[1])
    for host, port in (("127.0.0.1", 70000), ("127.0.0.1", -1), ("no such host", 8000), ("127.0.0..1", 8000)):
        with pytest.raises(SpeculationError):
            check_address(host, port)


@pytest.mark.parametrize(
    "bad", [{"log_level": "loud"}, {"chat_template_kwargs": "{"}, {"chat_template_kwargs": "[1]"}], ids=str
)
def test_options_that_the_server_would_stumble_over(bad: dict[str, str]) -> None:
    with pytest.raises(SpeculationError, match=next(iter(bad))):
        check_options(ServerOptions(**bad))


def test_lines_that_nobody_reads_cost_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", type("Closed", (), {"write": broken, "flush": broken})())
    say("nothing happens")


def test_without_the_servers_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_specdec.serve.server.is_serve_available", lambda: False)
    with pytest.raises(SpeculationError, match="pip install"):
        run_serve(ServeSettings(target="nowhere"), ServerOptions())


@pytest.mark.fresh_python
def test_the_command_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """SIGTERM while an answer is written: it is finished, the summary is said, and nothing is left."""
    pair, port = save_pair(tmp_path, TEMPLATE, eos_token_id=None, max_position_embeddings=4096), free_port()
    command = [sys.executable, "-m", "hf_specdec.cli", "serve", pair["target"], "--draft", pair["draft"]]
    command += ["--drafter", "pearl:worker=process", "--host", "127.0.0.1", "--port", str(port), "--dtype", "fp32"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
        until(lambda: process.poll() is not None or listens(port), 120)
        stream = client.chat.completions.create(
            model=pair["target"], messages=QUESTION, max_tokens=300, temperature=0, stream=True
        )
        next(iter(stream))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
            assert f'model_name="{pair["target"]}",finished_reason="stop"}} 0' in response.read().decode()
        workers = children(process.pid)
        process.terminate()
        chunks = list(stream)
        assert chunks[-1].usage.completion_tokens == 300
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert "1: 300 tokens in" in said and "1 answers; 300 tokens in" in said
        assert workers
        until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), 30)
    finally:
        process.kill()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_options_of_the_server_are_transformers_own() -> None:
    options = asdict(ServerOptions())
    assert {"host", "port", "enable_cors", "log_level", "chat_template_kwargs"} <= set(options)
    assert not {"force_model", "device", "dtype", "drafter", "compile", "continuous_batching"} & set(options)


@pytest.mark.parametrize("field", ["messages", "input"])
def test_a_chat_that_no_template_can_put_into_words_is_the_requests_fault(
    either: Served, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, path = {"model": "tiny", field: QUESTION}, {"messages": "/v1/chat/completions", "input": "/v1/responses"}
    for template, why in ((None, "no chat template"), ("{{ raise_exception('roles must alternate') }}", "alternate")):
        monkeypatch.setattr(either.tokenizer, "chat_template", template)
        status, said = either.post(path[field], body)
        assert (status, why in said) == (400, True), said
