"""Rows that come and go: every answer is `generate`'s, whoever is decoded beside it, and nothing is left behind."""

from typing import Any

import models
import pytest
import torch
from batch_requests import DRAFT, ENDS, KINDS, REQUESTS, TARGET, made, plain, texts
from seam import HeadDrafter, HeadSession
from stream_models import streams_of, target_of
from toy_drafters import Toy
from transformers import DynamicCache, GenerationConfig

from hf_specdec import BatchDecoder, Drafter, DraftModelDrafter, PromptLookupDrafter
from hf_specdec.engine import requests
from hf_specdec.protocol import Draft
from hf_specdec.target.inputs import CACHE
from hf_specdec.target.joining import Reading

pytestmark = pytest.mark.usefixtures("no_decoder_is_left")


SETTINGS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 1.3},
    {"do_sample": True, "top_k": 5},
    {"do_sample": False, "repetition_penalty": 1.4},
    {"do_sample": True, "top_p": 0.7, "repetition_penalty": 1.1},
    {"do_sample": False, "min_new_tokens": 9},
    {"do_sample": False, "no_repeat_ngram_size": 2},
]


@pytest.mark.grid
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_generates(kind: str, rows: int) -> None:
    with BatchDecoder(TARGET, made(kind), max_rows=rows) as decoder:
        answers = [
            decoder.submit(ids, max_new_tokens=new, do_sample=False)
            for ids, (_, new) in zip(texts(), REQUESTS, strict=True)
        ]
        for answer, ids, (_, new) in zip(answers, texts(), REQUESTS, strict=True):
            expected = plain(TARGET, ids, new)
            assert answer.result(60) == expected
            assert answer.finish_reason == ("stop" if expected[-1] in ENDS else "length")
            assert answer.stats.emitted_tokens == len(expected)
    assert decoder.stats.emitted_tokens == sum(len(answer.tokens) for answer in answers)
    assert not [note for note in decoder.stats.notes if "dropped" in note]


@pytest.mark.parametrize("ways", [{"copies": False}, {"num_nodes": 8}], ids=["by value", "copies"])
def test_streams_inside_the_target(ways: dict[str, Any]) -> None:
    model = target_of("Llama")
    drafter = streams_of(model, **ways)
    with BatchDecoder(model, drafter, max_rows=3) as decoder:
        answers = [
            decoder.submit(ids, max_new_tokens=new, do_sample=i % 3 == 2, top_k=1)
            for i, (ids, (_, new)) in enumerate(zip(texts(), REQUESTS, strict=True))
        ]
        for answer, ids, (_, new) in zip(answers, texts(), REQUESTS, strict=True):
            assert answer.result(60) == plain(model, ids, new)
    assert decoder.stats.drafted_tokens and not [note for note in decoder.stats.notes if "dropped" in note]
    assert any("recycled" in names for names in decoder.stats.sources) == ("num_nodes" in ways)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_head_on_the_targets_states(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read in pieces; rows of two settings have sessions of their own."""
    monkeypatch.setattr(requests, "LEAST_PIECE", 4)
    monkeypatch.setattr(requests, "LONGEST_PIECE", 8)
    monkeypatch.setattr(HeadSession, "weighs", True)
    with BatchDecoder(TARGET, HeadDrafter(), max_rows=rows) as decoder:
        answers = [
            decoder.submit(ids, max_new_tokens=new, do_sample=i % 3 == 2, top_k=1)
            for i, (ids, (_, new)) in enumerate(zip(texts(), REQUESTS, strict=True))
        ]
        for answer, ids, (_, new) in zip(answers, texts(), REQUESTS, strict=True):
            assert answer.result(60) == plain(TARGET, ids, new)
    assert decoder.stats.drafted_tokens and not [note for note in decoder.stats.notes if "dropped" in note]


@pytest.mark.parametrize(
    "name", ["Llama", "Mistral", "Gemma2", "Gemma3", "GPT-2", "OPT", "Phi-3", "Qwen2 sliding", "GPT-NeoX"]
)
def test_every_family(name: str) -> None:
    model = models.build(name, "eager" if name in ("Gemma2", "Gemma3") else "sdpa")
    with BatchDecoder(model, PromptLookupDrafter(num_branches=2), max_rows=3) as decoder:
        answers = [
            decoder.submit(ids, max_new_tokens=new, do_sample=False)
            for ids, (_, new) in zip(texts(), REQUESTS, strict=True)
        ]
        for answer, ids, (_, new) in zip(answers, texts(), REQUESTS, strict=True):
            assert answer.result(60) == plain(model, ids, new)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3", "OPT", "GPT-2"])
@pytest.mark.parametrize("piece", [1, 4, 100])
def test_prompts_read_in_pieces_are_read_as_a_whole(name: str, piece: int) -> None:
    model = models.build(name, "eager" if name == "Gemma3" else "sdpa")
    ids = torch.tensor([texts()[2]])
    reading = Reading(model, ids, {CACHE: DynamicCache(config=model.config), "use_cache": True})
    with torch.no_grad():
        while reading.left:
            logits = reading.read(piece)
        whole = model(ids).logits[:, -1:]
    torch.testing.assert_close(logits, whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["nobody", "lookup", "lookup, trees"])
def test_settings_that_differ_change_nobody_elses_text(kind: str) -> None:
    """With one seed a request says beside others what it says alone: drafts without chance change no draw."""
    asked = [(ids, SETTINGS[i % len(SETTINGS)], i) for i, ids in enumerate(texts() + texts(1))]
    drafter = made(kind)
    with BatchDecoder(TARGET, drafter, max_rows=6) as decoder:
        answers = []
        for ids, options, seed in asked:
            torch.manual_seed(seed)
            answers.append(decoder.submit(ids, max_new_tokens=20, **options))
        found = [answer.result(60) for answer in answers]
    for (ids, options, seed), said in zip(asked, found, strict=True):
        torch.manual_seed(seed)
        alone = TARGET.generate(
            torch.tensor([ids]), max_new_tokens=20, pad_token_id=0, assistant_model=PromptLookupDrafter(), **options
        )
        assert said == alone[0, len(ids) :].tolist(), options


def test_drawn_drafts_leave_the_distribution() -> None:
    """The first two tokens of many answers, drafted at random, against the target's own distribution.

    9 outcomes of a model of three words, 800 answers: a shift of 0.09 in one of them is seen nearly always.
    """
    small, other = models.llama(3, seed=3), models.llama(3, seed=4)
    prompt, count = [0, 1, 2, 1], 800
    torch.manual_seed(0)
    with BatchDecoder(small, DraftModelDrafter(other, num_draft_tokens=3), max_rows=16, max_waiting=count) as decoder:
        answers = [
            decoder.submit(prompt, max_new_tokens=3, do_sample=True, top_k=0, temperature=[1.0, 2.0][i % 2])
            for i in range(count)
        ]
        said = [tuple(answer.result(120)[1:3]) for answer in answers]
    for i, temperature in enumerate((1.0, 2.0)):
        expected = _pairs(small, prompt, temperature)
        mine = said[i::2]
        statistic = sum(
            (mine.count(pair) - len(mine) * p) ** 2 / (len(mine) * p) for pair, p in expected.items() if p * count > 5
        )
        assert statistic < 26.1, (temperature, statistic)  # of χ² with 8 degrees of freedom 0.001 lie above
    assert decoder.stats.accepted_tokens and decoder.stats.rejections


def _pairs(model: Any, prompt: list[int], temperature: float) -> dict[tuple[int, int], float]:
    """The chance of each second and third new token."""
    chances: dict[tuple[int, int], float] = {}
    with torch.no_grad():
        for a in range(3):
            for b in range(3):
                for c in range(3):
                    logits = model(torch.tensor([[*prompt, a, b]])).logits[0, -3:] / temperature
                    p = logits.double().softmax(-1)
                    chances[b, c] = chances.get((b, c), 0.0) + float(p[0, a] * p[1, b] * p[2, c])
    return chances


def test_tokens_come_as_they_are_decoded() -> None:
    got: list[int] = []

    class Streamer:
        ended = 0

        def put(self, value: torch.Tensor) -> None:
            got.extend(value.flatten().tolist())

        def end(self) -> None:
            self.ended += 1

    ids, streamer = texts()[0], Streamer()
    with BatchDecoder(TARGET, PromptLookupDrafter()) as decoder:
        answer = decoder.submit(ids, max_new_tokens=20, do_sample=False, streamer=streamer)
        assert list(answer) == list(answer) == answer.result(60) == plain(TARGET, ids, 20)
    assert got == [*ids, *answer.tokens] and streamer.ended == 1


def test_stop_strings_end_a_row() -> None:
    model, tokenizer = models.llama(), models.tokenizer()
    ids = texts()[4]
    whole = tokenizer.decode(plain(model, ids, 40))
    stops = {"stop_strings": [whole[12:14]], "tokenizer": tokenizer}
    expected = plain(model, ids, 40, **stops)
    with BatchDecoder(model, PromptLookupDrafter()) as decoder:
        beside = [decoder.submit(x, max_new_tokens=30, do_sample=False) for x in texts()[:3]]
        answer = decoder.submit(ids, max_new_tokens=40, do_sample=False, **stops)
        assert answer.result(60) == expected and len(expected) < 40 and answer.finish_reason == "stop"
        assert [x.result(60) for x in beside] == [plain(model, x, 30) for x in texts()[:3]]


def test_prefix_processors_see_drafts_beyond_the_buffers_end() -> None:
    """Buffers of ids grow by 256 columns; drafts that cross their end are read by processors, too."""
    model = models.llama()
    options: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.05}
    for drafter in (PromptLookupDrafter(min_match=1), PromptLookupDrafter(num_branches=3)):
        with BatchDecoder(model, drafter, max_rows=2) as decoder:
            answers = [decoder.submit(([7, 9, 11] * 90)[:n], max_new_tokens=30, **options) for n in (244, 250, 253)]
            for answer, n in zip(answers, (244, 250, 253), strict=True):
                assert answer.result(60) == plain(model, ([7, 9, 11] * 90)[:n], 30, **options)


def test_what_a_tokenizer_gives_is_a_prompt() -> None:
    given = models.tokenizer()("abc", return_tensors="pt")
    with BatchDecoder(TARGET) as decoder:
        answer = decoder.submit(given, max_new_tokens=4, do_sample=False)
        assert answer.result(60) == plain(TARGET, given["input_ids"][0].tolist(), 4)
    stats = decoder.stats
    assert stats.tokens_per_second > 0 and stats.other_seconds >= 0 and stats.plain_steps == 3


def test_the_flag_names_the_drafter() -> None:
    config = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=ENDS, pad_token_id=0)
    config.speculation_type = "prompt_lookup"
    with BatchDecoder(TARGET, generation_config=config) as decoder:
        assert isinstance(decoder.drafter, PromptLookupDrafter)
        assert decoder.submit(texts()[0]).result(60) == plain(TARGET, texts()[0], 12)
    with BatchDecoder(TARGET, DRAFT) as decoder:
        assert isinstance(decoder.drafter, DraftModelDrafter)


@pytest.mark.parametrize("window", [3, "auto"])
def test_drafts_stay_right_while_rows_come_and_go(window: Any) -> None:
    """A draft that is the target is always right, unless its cache holds something else than the text."""
    model = models.llama()
    lengths = [200, 5, 40, 9, 130, 3, 20, 60, 4, 11]
    with BatchDecoder(model, DraftModelDrafter(model, num_draft_tokens=window), max_rows=3) as decoder:
        answers = [
            decoder.submit(ids, max_new_tokens=new, do_sample=False) for ids, new in zip(texts(), lengths, strict=True)
        ]
        for answer, ids, new in zip(answers, texts(), lengths, strict=True):
            assert answer.result(60) == plain(model, ids, new)
    assert decoder.stats.drafted_tokens and not decoder.stats.rejections


def test_a_drafter_that_knows_nothing_of_batches_works() -> None:
    """`propose` alone is enough."""

    def propose(context: Any, sequences: Any, room: list[int]) -> Draft:
        return Draft.from_lists([tokens[-2:][:most] for tokens, most in zip(sequences.tokens, room, strict=True)])

    drafter: Drafter = Toy(propose)
    with BatchDecoder(TARGET, drafter, max_rows=3) as decoder:
        answers = [decoder.submit(ids, max_new_tokens=24, do_sample=False) for ids in texts()]
        assert [answer.result(60) for answer in answers] == [plain(TARGET, ids, 24) for ids in texts()]
