"""What is known of q without a question to PEARL's worker, and when one is asked all the same."""

from typing import Any

import pytest
import torch
from close_drafts import close_to
from models import llama
from pearl_pairs import generate, pearl
from torch import Tensor

from hf_specdec.drafters.pearl.correction import corrected
from hf_specdec.drafters.pearl.token import DraftToken
from hf_specdec.drafters.pearl.worker import drafting
from hf_specdec.verify.randomness import Randomness

VOCAB = 300
TOLD = (1, 2, 16, 64, VOCAB)


def random_distribution(seed: int, top_k: int = VOCAB, sharpness: float = 2.0) -> Tensor:
    scores = sharpness * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    return scores.masked_fill(scores < scores.topk(top_k).values[-1], -torch.inf).softmax(-1)


def rejected(q: Tensor, told: int) -> DraftToken:
    """Any token, of whose q so much is told."""
    values, tokens = q.topk(told)
    return DraftToken(int(tokens[0]), float(values[0]), tokens.tolist(), values.tolist())


@pytest.mark.parametrize("top_k", [5, 64, VOCAB])
@pytest.mark.parametrize("told", TOLD)
def test_q_lies_between_its_bounds(told: int, top_k: int) -> None:
    q = random_distribution(3, top_k)
    low, high = rejected(q, told).bounds(torch.arange(VOCAB))
    assert ((low <= q) & (q <= high)).all()
    known = low == high
    assert known[q.topk(told).indices].all() and (known.all() or told <= top_k)


@pytest.mark.parametrize("top_k", [5, VOCAB])
def test_the_more_is_told_the_less_is_asked_and_the_same_is_drawn(top_k: int) -> None:
    asked, drawn = dict.fromkeys(TOLD, 0), {told: [] for told in TOLD}
    for row in range(200):
        p, q = random_distribution(row, top_k), random_distribution(1000 + row % 7, top_k)
        q = (0.7 * p + 0.3 * q).float()
        for told in TOLD:

            def question(row: int, column: int, y: Tensor | None) -> Tensor:
                asked[told] += 1  # noqa: B023
                return q if y is None else q[y]  # noqa: B023

            drawn[told].append(corrected(p, row, 9, Randomness(2), rejected(q, told), question))
    assert all(map(torch.equal, drawn[1], drawn[told]) for told in TOLD)
    counts = [asked[told] for told in TOLD]
    assert counts == sorted(counts, reverse=True) and counts[0] > 100 and counts[-1] == 0
    assert counts[TOLD.index(64)] < counts[0] / 2 and (top_k == VOCAB or counts[TOLD.index(64)] == 0)


def test_a_lost_worker_is_not_missed_where_q_is_known() -> None:
    p, q = random_distribution(1), random_distribution(2, top_k=50)
    assert corrected(p, 0, 9, Randomness(2), rejected(q, 64), lambda *_: None) is not None
    assert corrected(q, 0, 9, Randomness(2), rejected(p, 1), lambda *_: None) is None


@pytest.mark.grid
@pytest.mark.parametrize(("top_k", "temperature"), [(0, 1.0), (0, 0.7), (50, 1.0), (50, 0.4)])
def test_few_rejections_lead_to_a_question(top_k: int, temperature: float, monkeypatch: Any) -> None:
    """Told of one token only, most do; a text depends on neither. None asks where `top_k` leaves 63 tokens at most."""
    size = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    target = llama(vocab=2000, seed=1, **size)
    draft = close_to(target, 0.1)
    texts, shares = [], []
    for told in (1, 64):
        monkeypatch.setattr(drafting, "TOLD", told)
        drafter = pearl(draft, window=4, corrections=1)
        torch.manual_seed(3)
        options = {"do_sample": True, "max_new_tokens": 100, "top_k": top_k, "temperature": temperature}
        texts.append(generate(drafter, target=target, **options))
        assert drafter.last_stats.rejections > 50
        shares.append(drafter.last_timeline.questions / drafter.last_stats.rejections)
    assert torch.equal(*texts)
    assert shares[0] > 0.5 and shares[1] < (0.0001 if top_k else 0.15)


def test_greedy_drafts_are_asked_nothing() -> None:
    drafter = pearl()
    generate(drafter)
    assert drafter.last_stats.rejections and drafter.last_timeline.questions == 0


NAN = float("nan")


@pytest.mark.parametrize("tokens", [[5, -1], [5, VOCAB], [5, 6], [5, 6.5], []], ids=str)
@pytest.mark.parametrize("q", [[0.5, 0.2], [0.2, 0.5], [NAN, 0.1], [0.5, NAN], [1.5, 0.1], [0.5, -0.1], []], ids=str)
def test_what_cannot_be_meant_is_no_draft_token(tokens: list[int], q: list[float]) -> None:
    for drawn in (5, -1, VOCAB, 6.5):
        for chance in (0.5, 0.0, -0.5, 1.5, NAN):
            can_be = DraftToken(drawn, chance, tokens, q).can_be(VOCAB, sampled=True)  # type: ignore[arg-type]
            assert can_be == ((drawn, chance, tokens, q) == (5, 0.5, [5, 6], [0.5, 0.2]))


def test_q_is_told_where_the_draft_samples() -> None:
    drawn, greedy = DraftToken(5, 0.5, [5], [0.5]), DraftToken(5)
    assert drawn.can_be(VOCAB, sampled=True) and not drawn.can_be(VOCAB, sampled=False)
    assert greedy.can_be(VOCAB, sampled=False) and not greedy.can_be(VOCAB, sampled=True)
