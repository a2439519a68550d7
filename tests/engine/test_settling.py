"""Where the device works by itself a round is counted and told of while the next forward is under way: whole, in order,
and before anybody leaves."""

import models
import pytest
import torch
from batch_requests import REQUESTS, TARGET, plain, texts
from transformers.generation.streamers import BaseStreamer

from hf_specdec import BatchDecoder, HybridDrafter, PromptLookupDrafter
from hf_specdec.engine import engine
from hf_specdec.engine.engine import Engine
from hf_specdec.target.ragged import RaggedRunner

DRAFTERS = {"lookup": lambda: PromptLookupDrafter(), "hybrid": lambda: HybridDrafter(models.llama())}


class Heard(BaseStreamer):
    def __init__(self) -> None:
        self.tokens = list[int]()

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        """Nothing to flush."""


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As on a GPU; what happens in which order."""
    happened: list[str] = []
    settle, forward = Engine._settle, RaggedRunner.answer

    def settled(self: Engine, *given: object) -> None:
        happened.append("settled")
        settle(self, *given)

    def launched(self: RaggedRunner, *given: object) -> object:
        happened.append("launched")
        return forward(self, *given)

    monkeypatch.setattr(engine, "waits", lambda device: True)
    monkeypatch.setattr(Engine, "_settle", settled)
    monkeypatch.setattr(RaggedRunner, "answer", launched)
    return happened


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("lengths", [[9], [9, 4, 7]], ids=str)
def test_every_round_is_counted_once(kind: str, lengths: list[int], late: list[str]) -> None:
    call = models.prompts(lengths) | {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected, heard = TARGET.generate(**call), Heard() if len(lengths) == 1 else None
    call |= {"return_dict_in_generate": True, "streamer": heard, "speculation": {"forwards": "eager"}}
    out = TARGET.generate(**call, assistant_model=DRAFTERS[kind]())
    stats = out.speculation
    assert torch.equal(out.sequences, expected) and stats.emitted_tokens == 40 * len(lengths)
    assert stats.verify_widths.total() == stats.target_calls - 1 == late.count("settled") > 0
    assert heard is None or heard.tokens == expected[0].tolist()


@pytest.mark.parametrize("kind", DRAFTERS)
def test_answers_come_in_order_and_whole_whoever_leaves(kind: str, late: list[str]) -> None:
    asked, heard = list(zip(texts(), [new for _, new in REQUESTS], strict=True)), [Heard() for _ in REQUESTS]
    with BatchDecoder(TARGET, DRAFTERS[kind](), max_rows=3) as decoder:
        answers = [
            decoder.submit(ids, max_new_tokens=new, do_sample=False, streamer=one)
            for (ids, new), one in zip(asked, heard, strict=True)
        ]
        gone = decoder.submit(texts()[0], max_new_tokens=200, do_sample=False)
        gone.cancel()
        for answer, (ids, new), one in zip(answers, asked, heard, strict=True):
            assert answer.result(60) == plain(TARGET, ids, new)
            assert one.tokens == [*ids, *answer.result(60)]
    assert decoder.stats.emitted_tokens >= sum(len(answer.result()) for answer in answers)
    at = [i for i, what in enumerate(late) if what == "settled"]
    assert any(late[i - 1] == "launched" for i in at[1:])
