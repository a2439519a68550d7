"""`hf-specdec audit` finds what is wrong with a way of decoding, and passes what is right."""

import copy
import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from close_drafts import close_to

from hf_specdec import DraftModelDrafter, PromptLookupDrafter, SpeculationError
from hf_specdec.tools.audit.findings import AuditSettings
from hf_specdec.tools.audit.greedy import Greedy
from hf_specdec.tools.audit.run import run_audit
from hf_specdec.tools.audit.sampled import Sampled
from hf_specdec.tools.audit.samples import LEVEL, two_samples
from hf_specdec.tools.bench.method import Method

PAIR = Path(__file__).parents[1] / "pair"
MODEL = models.llama(seed=1)
DRAFT = close_to(MODEL, 0.02)


class Words:
    """A tokenizer that is enough here."""

    pad_token_id = 0

    def decode(self, tokens: Any) -> str:
        return " ".join(map(str, tokens))


def greedy() -> Greedy:
    prompts = [row[-n:].tolist() for row, n in zip(models.prompts([9, 5, 7])["input_ids"], [9, 5, 7], strict=True)]
    return Greedy(MODEL, Words(), prompts, 24)


def found(method: Method) -> dict[str, Any]:
    tests = greedy()
    return {
        name: test()
        for name, test in {
            "text": lambda: tests._identity(method),
            "batch": lambda: tests.guarded("batch", lambda: tests._batch(method)),
            "ends": lambda: tests._stops(method, "ends", tests._ends),
            "criteria": lambda: tests._stops(method, "criteria", tests._criteria),
            "lengths": lambda: tests._stops(method, "lengths", tests._lengths),
            "streams": lambda: tests._stops(method, "streams", tests._streams),
        }.items()
    }


@pytest.mark.parametrize("drafter", [DraftModelDrafter(DRAFT, num_draft_tokens=4), PromptLookupDrafter()])
def test_our_drafters_pass(drafter: Any) -> None:
    for name, finding in found(Method("ours", {"assistant_model": drafter}, drafter=drafter)).items():
        assert finding.fine, (name, finding)
        assert not finding.refused


def test_stock_speculation_asks_criteria_too_late() -> None:
    """It refuses batches, and says more than a criterion allows where a draft is right."""
    assistant = copy.deepcopy(MODEL)
    assistant.generation_config.num_assistant_tokens, assistant.generation_config.assistant_confidence_threshold = 5, 0
    findings = found(Method("hf", {"assistant_model": assistant}, single_row=True))
    assert findings["text"].fine
    assert findings["ends"].fine
    assert findings["batch"].refused
    assert not findings["criteria"].fine


def test_another_text_is_found_and_its_logits_are_told() -> None:
    def push(ids: Any, scores: Any) -> Any:
        """Ten tokens on it says something else."""
        if ids.shape[1] == 15:
            scores = scores.clone()
            scores[:, scores.argmax(-1)] = -torch.inf
        return scores

    findings = found(Method("wrong", {"logits_processor": [push]}))
    assert not findings["text"].fine
    assert "logits are" in findings["text"].details[0]
    assert "rounding steps" in findings["text"].details[0]


def test_a_streamer_that_is_told_too_little_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = PromptLookupDrafter()
    method, tests = Method("ours", {"assistant_model": drafter}), greedy()
    plain = tests.say

    def deaf(method: Any, inputs: Any, streamer: Any = None, **options: Any) -> Any:
        if streamer is not None:
            streamer.put(inputs["input_ids"])
            streamer.end()
        return plain(method, inputs, **options)

    monkeypatch.setattr(tests, "say", deaf)
    assert "0 tokens streamed" in tests._streams(method, 0)


def test_two_samples_of_one_distribution_pass_and_of_two_do_not() -> None:
    """Of 200 pairs of samples of one distribution at most 3 have p < 1%; a difference of the size that it says it
    finds is found in at least 80 of 100."""
    dice = torch.Generator().manual_seed(0)
    p = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.05])

    def texts(p: Any, count: int = 300) -> list[tuple[int, ...]]:
        drawn = torch.multinomial(p, count * 2, replacement=True, generator=dice)
        return [tuple(pair) for pair in drawn.view(-1, 2).tolist()]

    assert sum(two_samples(texts(p), texts(p))[0] < 0.01 for _ in range(200)) <= 6
    power = two_samples(texts(p), texts(p))[1]
    assert 0.05 < power < 0.4
    moved = p.clone()
    moved[0], moved[4] = p[0] - power, p[4] + power  # of one token of two: the pairs differ by more
    assert sum(two_samples(texts(p), texts(moved))[0] < LEVEL for _ in range(100)) >= 80


def test_a_sampler_that_is_not_the_targets_is_found() -> None:
    inputs = [models.prompts([9])]
    sampled = Sampled(MODEL, inputs, 1500, 1.0, 0, 0)
    drafter = DraftModelDrafter(DRAFT, num_draft_tokens=3)
    assert sampled.finding(Method("ours", {"assistant_model": drafter}, drafter=drafter)).fine
    assert not sampled.finding(Method("colder", {"temperature": 0.3})).fine
    lenient = {
        "assistant_model": DraftModelDrafter(close_to(MODEL, 0.5), num_draft_tokens=4),
        "speculation": {"lenience": 0.01},
    }
    assert not sampled.finding(Method("lenient", lenient)).fine


def settings(**more: Any) -> AuditSettings:
    known = {"target": str(PAIR / "target"), "draft": str(PAIR / "draft"), "dtype": "float32", "device": "cpu"}
    return AuditSettings(**known | {"prompts": "prompts.txt", "samples": 50, "max_new_tokens": 12} | more)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def add(a, b):\nQuestion: How many legs have 3 cats?\n")
    told = tmp_path / "found.json"
    reports = run_audit(
        settings(prompts=str(prompts), drafters=["draft_model:num_draft_tokens=3"], output=told, samples=60)
    )
    assert [report.fine for report in reports] == [True]
    assert ": the same as plain decoding" in capsys.readouterr().out
    assert len(json.loads(told.read_text())[0]["findings"]) == 8


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({}, "nothing to audit"),
        ({"drafters": ["prompt_lookup"], "samples": 3}, "samples"),
        ({"drafters": ["prompt_lookup"], "temperature": 0.0}, "temperature"),
        ({"drafters": ["prompt_lookup"], "limit": 0}, "limit"),
        ({"baselines": ["plain"]}, "compared with"),
        ({"target": "", "drafters": ["prompt_lookup"]}, "a --target, or a --server"),
    ],
)
def test_bad_settings_are_refused(bad: dict[str, Any], words: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n")
    with pytest.raises(SpeculationError, match=words):
        run_audit(settings(prompts=str(prompts), **bad))
