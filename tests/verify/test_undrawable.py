"""Where no token can be drawn plain decoding raises, and so does a call with a drafter: at the same token, and in a
batch of requests for that one alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import models
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_specdec import BatchDecoder, DraftModelDrafter, HybridDrafter, PearlDrafter, PromptLookupDrafter, SuffixDrafter
from hf_specdec.verify.verification import NOTHING, distribution, draw, drawable, gumbel_max

MODEL, DRAFT = models.llama(), models.llama(seed=3)
MAKES: dict[str, Any] = {
    "lookup": PromptLookupDrafter,
    "suffix": SuffixDrafter,
    "draft": lambda: DraftModelDrafter(DRAFT, num_draft_tokens=3),
    "tree": lambda: DraftModelDrafter(DRAFT, num_draft_tokens=3, num_candidates=2),
    "hybrid": lambda: HybridDrafter(DRAFT),
    "pearl": lambda: PearlDrafter(DRAFT, window=3, worker="thread"),
}
BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}
MESSAGE = "no token can be drawn"


@contextmanager
def spoilt(model: Any, value: float, at: int, token: int | slice = slice(None), alone: bool = False) -> Iterator[None]:
    """Within the block scores behind position `at`, and all later ones unless that is alone, hold a bad number."""

    def spoil(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        places = output.logits.shape[1]
        positions = kwargs.get("position_ids")
        positions = torch.arange(kwargs["input_ids"].shape[1])[None] if positions is None else positions  # a prompt's
        bad = positions[:, -places:] == at if alone else positions[:, -places:] >= at
        output.logits[..., token] = output.logits[..., token].masked_fill(
            bad[..., None] if isinstance(token, slice) else bad, value
        )

    with models.hooked(model, spoil):
        yield


class Forbids:
    """A processor of the user's own: from some length on nothing is allowed."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores if ids.shape[1] < self.length else torch.full_like(scores, -torch.inf)


class Heard:
    """A streamer that counts tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


def generate(drafter: Any, lengths: list[int], **options: Any) -> Tensor:
    torch.manual_seed(0)
    told = {"max_new_tokens": 24, "do_sample": True, "eos_token_id": None, "pad_token_id": 0} | options
    return MODEL.generate(**models.prompts(lengths), assistant_model=drafter, **told)


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("lengths", [[7], [7, 4]], ids=["one row", "two rows"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", MAKES)
def test_bad_scores_raise_where_plain_decoding_does(kind: str, bad: str, lengths: list[int]) -> None:
    with spoilt(MODEL, BAD[bad], at=12):
        with pytest.raises(RuntimeError):
            generate(None, lengths)
        with pytest.raises(RuntimeError, match=MESSAGE):
            generate(MAKES[kind](), lengths)
        for drafter in (None, MAKES[kind]()):  # a text that ends before is a text
            assert generate(drafter, lengths, max_new_tokens=5).shape == (len(lengths), 12)


@pytest.mark.parametrize("verification", ["block", "token"])
@pytest.mark.parametrize("kind", ["draft", "tree", "hybrid", "pearl"])
def test_no_draft_leads_over_a_bad_place(kind: str, verification: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However right it is: plain decoding does not get behind it, not even to an end that was drafted there."""
    monkeypatch.setitem(globals(), "DRAFT", models.llama())  # the target's twin
    for at in range(8, 16):
        with spoilt(MODEL, float("nan"), at, alone=True), pytest.raises(RuntimeError, match=MESSAGE):
            generate(MAKES[kind](), [7], speculation={"verification": verification}, temperature=0.7)


@pytest.mark.parametrize("kind", MAKES)
def test_one_number_is_enough(kind: str) -> None:
    """But for -inf, which forbids one token."""
    for bad, value in BAD.items():
        with spoilt(MODEL, value, at=12, token=5):
            if bad == "-inf":
                assert generate(MAKES[kind](), [7]).shape == (1, 31)
            else:
                with pytest.raises(RuntimeError, match=MESSAGE):
                    generate(MAKES[kind](), [7])


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("own", [False, True], ids=["transformers'", "the user's own"])
def test_processors_that_forbid_everything(kind: str, own: bool) -> None:
    options: dict[str, Any] = {"suppress_tokens": list(range(models.VOCAB))}
    if own:
        options = {"logits_processor": LogitsProcessorList([Forbids(11)])}
    for drafter in (None, MAKES[kind]()):
        heard = Heard()
        with pytest.raises(RuntimeError):
            generate(drafter, [7], streamer=heard, **options)
        assert len(heard.tokens) == (11 if own else 7)  # the prompt, and what was allowed


@pytest.mark.parametrize("kind", ["lookup", "draft"])
def test_coupled_draws(kind: str) -> None:
    with spoilt(MODEL, float("nan"), at=12), pytest.raises(RuntimeError, match=MESSAGE):
        generate(MAKES[kind](), [7], speculation={"sampling": "coupled"})


@pytest.mark.eager
@pytest.mark.parametrize("kind", [None, "lookup", "draft", "hybrid"])
def test_in_a_batch_of_requests_one_alone_fails(kind: str | None) -> None:
    ids = models.prompts([7])["input_ids"]
    with BatchDecoder(MODEL, MAKES[kind]() if kind else None, max_rows=4) as decoder:
        bad = decoder.submit(ids, max_new_tokens=24, do_sample=True, suppress_tokens=list(range(models.VOCAB)))
        good = [decoder.submit(ids, max_new_tokens=24, do_sample=True, eos_token_id=None) for _ in range(2)]
        with pytest.raises(RuntimeError, match=MESSAGE):
            bad.result(60)
        assert [len(answer.result(60)) for answer in good] == [24, 24]
        with spoilt(MODEL, float("nan"), at=9):
            bad, good = (
                decoder.submit(ids[:, :n], max_new_tokens=4, do_sample=True, eos_token_id=None) for n in (7, 3)
            )
            with pytest.raises(RuntimeError, match=MESSAGE):
                bad.result(60)
            assert len(good.result(60)) == 4
        assert len(decoder.submit(ids, max_new_tokens=4, do_sample=True, eos_token_id=None).result(60)) == 4


def test_a_draft_model_without_an_opinion_is_no_reason_to_raise() -> None:
    """Its q is uniform there, and the target tests what was drawn."""
    nan = models.llama(seed=3)
    generate(DraftModelDrafter(nan), [7])  # it is found out what the model can do
    nan.get_output_embeddings().weight.data.fill_(float("nan"))
    assert generate(DraftModelDrafter(nan, num_draft_tokens=3), [7, 4]).shape == (2, 31)


@pytest.mark.parametrize("scores", [[torch.nan] * 3, [-torch.inf] * 3, [0.0, torch.nan, 1.0], [0.0, torch.inf, 1.0]])
def test_nothing_is_drawn(scores: list[float]) -> None:
    bad, good = torch.tensor([scores]), torch.tensor([[0.0, -torch.inf, 1.0]])
    both, u = torch.cat([bad, good]), torch.tensor([0.5, 0.5])
    assert draw(distribution(both), u).tolist() == [NOTHING, 2]
    assert gumbel_max(both).tolist() == [NOTHING, 2]
    assert drawable(distribution(both)).sum(-1).tolist() == pytest.approx([1.0, 1.0])
