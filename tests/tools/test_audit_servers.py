"""`hf-specdec audit --server` finds what drafts change in a server, and passes what they do not."""

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes import free_port, until
from speaking import LOGPROB, WORDS, Speaker, speaking
from typer.testing import CliRunner

from hf_specdec import SpeculationError
from hf_specdec.cli import app
from hf_specdec.tools.audit.client import at_once
from hf_specdec.tools.audit.findings import AuditSettings, Finding, Report
from hf_specdec.tools.audit.run import run_audit
from hf_specdec.tools.audit.said import NEAR_TIE, Said, parting

PLACE = 7
"""where servers say something else"""


class Second(Speaker):
    """Says the second likeliest token in one place."""

    def tokens(self, prompt: str, body: dict[str, Any]) -> list[str]:
        tokens = super().tokens(prompt, body)
        if len(tokens) > PLACE and not body.get("temperature"):
            tokens[PLACE] = WORDS[(self.word(prompt, PLACE) + 1) % len(WORDS)]
        return tokens


class Tied(Speaker):
    """Its two likeliest tokens are nearly tied in that place."""

    def distribution(self, prompt: str, place: int) -> dict[str, float]:
        known = super().distribution(prompt, place)
        return {word: LOGPROB - 0.1 * i if i < 2 and place == PLACE else v for i, (word, v) in enumerate(known.items())}


class SecondOfTied(Tied, Second):
    """Drafts for a server whose tokens are nearly tied."""


class Colder(Speaker):
    """Draws from another distribution."""

    def tokens(self, prompt: str, body: dict[str, Any]) -> list[str]:
        return super().tokens(prompt, body | {"temperature": body["temperature"] * (body.get("seed", 0) % 3)})


class Deaf(Speaker):
    """Goes on behind a stop string."""

    def stopped(self, tokens: list[str], stops: list[str]) -> tuple[list[str], str, str]:
        return super().stopped(tokens, [])


class Long(Speaker):
    """Says a token more than it may."""

    def tokens(self, prompt: str, body: dict[str, Any]) -> list[str]:
        return super().tokens(prompt, body | {"max_tokens": body["max_tokens"] + (body["max_tokens"] == 2)})


class Third(Speaker):
    """Says a token in that place that is unlikely."""

    def tokens(self, prompt: str, body: dict[str, Any]) -> list[str]:
        tokens = super().tokens(prompt, body)
        return [*tokens[:PLACE], WORDS[(self.word(prompt, PLACE) + 2) % len(WORDS)], *tokens[PLACE + 1 :]]


class Moody(Second):
    """Says something else every other time."""

    def tokens(self, prompt: str, body: dict[str, Any]) -> list[str]:
        return super().tokens(prompt, body) if next(self.calls) % 2 else Speaker.tokens(self, prompt, body)


class Busy(Speaker):
    """Breaks down at what is drawn."""

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, str, str]:
        if body is not None and body.get("temperature"):
            return self.json({"error": {"message": "the draft model is gone", "code": 500}}, 500)
        return super().answer(path, body)


class Counting(Speaker):
    """Tells what it drafted, as llama.cpp does."""

    drafts = 3

    def more(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"timings": {"draft_n": 0 if body.get("speculative.n_max") == 0 else self.drafts}}


class Metered(Speaker):
    """Tells what it drafted, as vLLM does."""

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, str, str]:
        if path == "/metrics":
            name = "vllm:spec_decode_num_draft_tokens_total"
            return 200, "text/plain", f'# TYPE {name} counter\n{name}{{engine="0"}} {len(self.bodies)}.0\n'
        return super().answer(path, body)


def telling(style: str, speaker: type[Speaker]) -> Speaker:
    """One that tells log probabilities in that way."""
    made = speaker()
    made.style = style
    return made


@pytest.fixture
def audited(tmp_path: Path) -> Callable[..., Report]:
    """The report on one speaker beside another."""
    (tmp_path / "texts.txt").write_text("one\nof\nthree\n")
    (tmp_path / "chats.jsonl").write_text('{"turns": ["one", "then"]}\n{"turns": ["three"]}\n')

    def report(drafting: Speaker, plain: Speaker | dict[str, Any], prompts: str = "texts.txt", **more: Any) -> Report:
        with ExitStack() as stack:
            server = stack.enter_context(speaking(drafting))
            off = json.dumps(plain) if isinstance(plain, dict) else stack.enter_context(speaking(plain))
            known = {"prompts": str(tmp_path / prompts), "samples": 50, "max_new_tokens": 24}
            (found,) = run_audit(AuditSettings(server=server, without=off, **known | more))
        return found

    return report


def found(report: Report, test: str) -> Finding:
    return next(each for each in report.findings if each.test == test)


def wrong(report: Report) -> list[str]:
    return [each.test for each in report.findings if not each.fine]


@pytest.mark.parametrize(
    ("prompts", "style"), [("texts.txt", "completions"), ("chats.jsonl", "content"), ("texts.txt", "none")]
)
def test_the_same_server_passes(audited: Callable[..., Report], prompts: str, style: str) -> None:
    """Of chats and texts, however log probabilities are told."""
    report = audited(telling(style, Speaker), telling(style, Speaker), prompts)
    assert report.fine and "tie" not in report.verdict
    assert found(report, "stops at a stop string").said == found(report, "keeps to max_tokens").said == "2 of 2"


def test_a_chat_is_sent_as_messages_or_as_text(audited: Callable[..., Report]) -> None:
    for raw in (False, True):
        speaker = Speaker()
        assert audited(speaker, Speaker(), "chats.jsonl", raw=raw, model="mine").fine
        assert all(("prompt" in body) == raw and body["model"] == "mine" for body in speaker.bodies)
        assert speaker.bodies[0].get("prompt", speaker.bodies[0].get("messages")) in (
            "one",
            [{"role": "user", "content": "one"}],
        )


@pytest.mark.parametrize("style", ["content", "none"])
def test_another_token_is_found_with_its_margin(audited: Callable[..., Report], style: str) -> None:
    """Also where only the server without drafts tells its tokens."""
    report = audited(telling(style, Second), telling("content", Speaker), "chats.jsonl")
    assert wrong(report)[:2] == ["greedy text", "greedy text, 4 at once"]
    assert "sampled distribution" not in wrong(report)
    for name in wrong(report)[:2]:
        for detail in found(report, name).details:
            assert f"parts at token {PLACE}" in detail and "1.253 nats apart" in detail and "NOT a near tie" in detail


def test_without_log_probabilities_it_says_that_it_cannot_tell(audited: Callable[..., Report]) -> None:
    report = audited(telling("none", Second), telling("none", Speaker))
    assert "greedy text" in wrong(report)
    assert "no log probabilities tell" in found(report, "greedy text").details[0]


@pytest.mark.parametrize("style", ["completions", "none"])
def test_a_near_tie_is_one(audited: Callable[..., Report], style: str) -> None:
    report = audited(telling(style, SecondOfTied), Tied())
    assert report.fine and report.verdict.endswith("up to near ties of rounding")
    assert found(report, "greedy text").said == "0 of 3 the same, 3 near ties"
    assert "0.100 nats apart" in found(report, "greedy text").details[0]


def test_what_is_a_near_tie() -> None:
    """Up to the threshold; of an end only where the token that ends a text is among the likeliest."""
    known = {" a": -0.1, " b": -0.1 - NEAR_TIE + 1e-6, " c": -0.2 - NEAR_TIE, "</s>": -0.3}
    plain = Said("x a", "length", ("x", " a"), ({"x": -0.1, "y": -0.2}, known))
    for text, tie in (("x b", True), ("x c", False), ("x d", False)):
        for tokens in ((), ("x", text[1:])):
            parted = parting(plain, Said(text, "length", tokens))
            assert parted is not None and (parted.place, parted.unit, parted.near_tie) == (1, "token", tie)
    ended, cut = parting(plain, Said("x", "stop")), parting(plain, Said("x", "length"))
    assert ended is not None and ended.near_tie and cut is not None and not cut.near_tie
    shifted = parting(plain, Said("é b"))
    assert shifted is not None and shifted.place == 0 and not shifted.near_tie
    assert parting(plain, Said("x a")) is None


def test_a_wrong_distribution_is_found(audited: Callable[..., Report]) -> None:
    assert wrong(audited(Colder(), Speaker(), limit=2, samples=200)) == ["sampled distribution"]


@pytest.mark.parametrize(
    ("speaker", "test"), [(Deaf, "stops at a stop string"), (Long, "keeps to max_tokens")], ids=["stop", "max_tokens"]
)
def test_an_end_elsewhere_is_found(audited: Callable[..., Report], speaker: type[Speaker], test: str) -> None:
    report = audited(speaker(), Speaker())
    assert wrong(report) == [test] and "without drafts" in found(report, test).details[0]


def test_a_server_that_is_not_the_same_twice_is_said_so(audited: Callable[..., Report]) -> None:
    """As many texts may part with drafts as part from themselves without; what it says at times is its own."""
    for drafting, said in ((Second, "3 of 3"), (Third, "0 of 3")):
        report = audited(drafting(), Moody())
        assert found(report, "without drafts, again").said == "0 of 3 the same: not deterministic"
        text = found(report, "greedy text")
        assert text.fine and text.said == f"{said} the same"
    assert "part from themselves no less" in text.details[-1]


def test_one_server_is_told_to_draft_nothing(audited: Callable[..., Report]) -> None:
    speaker = Counting()
    report = audited(speaker, {"speculative.n_max": 0})
    assert report.fine and found(report, "tokens drafted").said == "18"
    assert {body.get("speculative.n_max") for body in speaker.bodies} == {0, None}


def test_what_was_drafted_is_told(audited: Callable[..., Report]) -> None:
    with pytest.raises(SpeculationError, match="drafts although it is --without"):
        audited(Counting(), Counting())
    idle = Counting()
    idle.drafts = 0
    assert "nothing was tested" in found(audited(idle, Speaker()), "tokens drafted").details[0]
    metered = Metered()
    report = audited(metered, Speaker())
    assert found(report, "tokens drafted").said == str(len(metered.bodies) - 1)


def test_a_failure_with_drafts_is_a_finding(audited: Callable[..., Report]) -> None:
    report = audited(Busy(), Speaker())
    assert wrong(report) == ["sampled distribution"]
    assert "status 500: the draft model is gone" in found(report, "sampled distribution").details[0]
    with pytest.raises(SpeculationError, match="the draft model is gone"):
        audited(Speaker(), Busy())


class Shy(Speaker):
    """Takes no request for log probabilities."""

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, str, str]:
        if body is not None and body.get("logprobs"):
            return self.json({"detail": "logprobs are not supported"}, 400)
        return super().answer(path, body)


def test_log_probabilities_that_are_refused_are_not_asked_for(audited: Callable[..., Report]) -> None:
    assert audited(Shy(), Speaker()).fine and audited(Shy(), Shy()).fine


class Failing(Speaker):
    """Answers nothing that is of use."""

    def __init__(self, status: int, kind: str, text: str, models: bool = True) -> None:
        super().__init__()
        self.given, self.models = (status, kind, text), models

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, str, str]:
        return super().answer(path, body) if path == "/v1/models" and self.models else self.given


class Hanging(Speaker):
    """Answers when it is too late."""

    def __init__(self) -> None:
        super().__init__()
        self.late = threading.Event()

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, str, str]:
        self.late.wait(20)
        return super().answer(path, body)


@pytest.mark.parametrize(
    ("speaker", "words"),
    [
        (lambda: Failing(404, "text/plain", "nothing here", models=False), "/v1/models with status 404: nothing here"),
        (lambda: Failing(401, "application/json", '{"error": {"message": "no key"}}'), "status 401: no key"),
        (lambda: Failing(503, "application/json", '{"detail": "loading model"}'), "status 503: loading model"),
        (lambda: Failing(200, "text/html", "<html>"), "'<html>', which is no JSON"),
        (lambda: Failing(200, "application/json", '{"choices": []}'), "what is no text"),
        (lambda: Failing(200, "application/json", "{}", models=False), "--model"),
        (lambda: Failing(200, "text/event-stream", "data: {}\n\n"), "in a stream only"),
        (Hanging, "within 0.2 seconds; allow more with --timeout"),
    ],
    ids=["404", "401", "503", "HTML", "no choices", "no models", "a stream", "hangs"],
)
def test_a_server_that_fails_is_said_so_in_a_line(
    audited: Callable[..., Report], speaker: Callable[[], Speaker], words: str
) -> None:
    failing = speaker()
    with pytest.raises(SpeculationError) as raised:
        audited(failing, Speaker(), timeout=0.2 if isinstance(failing, Hanging) else 60.0)
    if isinstance(failing, Hanging):
        failing.late.set()
    assert words in str(raised.value) and "127.0.0.1" in str(raised.value)


def test_the_command_ends_with_what_was_found(tmp_path: Path) -> None:
    """0 where nothing is wrong, 1 where something is, 2 where nothing could be asked."""
    (tmp_path / "texts.txt").write_text("one\n")

    def ended(server: str, without: str) -> tuple[int, str]:
        command = ["audit", "--server", server, "--without", without, "--prompts", str(tmp_path / "texts.txt")]
        result = CliRunner().invoke(app, [*command, "--samples", "50", "--json", str(tmp_path / "found.json")])
        return result.exit_code, result.output

    with speaking(Speaker()) as plain, speaking(Speaker()) as same, speaking(Second()) as other:
        assert ended(same, plain)[0] == 0
        code, said = ended(f"{other}/v1/", plain)
        assert code == 1 and "NOT the same as plain decoding (greedy text" in said
        (report,) = json.loads((tmp_path / "found.json").read_text())
        assert report["method"] == f"{other}/v1/" and not report["fine"]
        code, said = ended(f"http://127.0.0.1:{free_port()}", plain)
        assert code == 2 and "is it running?" in said


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"server": "http://a"}, "go together"),
        ({"without": "http://a"}, "go together"),
        ({"server": "http://a", "without": "http://a/"}, "are both"),
        ({"server": "http://a", "without": "http://b", "drafters": ["prompt_lookup"]}, "leave out"),
        ({"server": "http://a", "without": "http://b", "target": "smollm2"}, "leave out"),
        ({"server": "localhost:8000", "without": "http://b"}, "--server must be a URL"),
        ({"server": "http://a", "without": "localhost:8001"}, "or a JSON object"),
        ({"server": "http://a", "without": "{}"}, "or a JSON object"),
        ({"server": "http://a", "without": "http://b", "timeout": 0.0}, "timeout must be"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(SpeculationError, match=words):
        run_audit(AuditSettings(prompts="chat", **bad))


def test_the_first_error_ends_all_calls() -> None:
    """And nobody waits for those under way: Ctrl-C ends a call at once, too."""
    late, begun, before = threading.Event(), [], set(threading.enumerate())

    def call(number: int) -> int:
        begun.append(number)
        if number == 1:
            raise KeyError(number)
        late.wait(20)
        return number

    with pytest.raises(KeyError):
        at_once([lambda number=number: call(number) for number in range(9)], threads=2)  # type: ignore[misc]
    late.set()
    until(lambda: not set(threading.enumerate()) - before)  # none of its own is left, whatever other tests have begun
    assert set(begun) < set(range(4))
    assert at_once([lambda number=number: number for number in range(9)]) == list(range(9))  # type: ignore[misc]
