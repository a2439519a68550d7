"""PEARL's drafted tokens: drawn from so few likely ones that q travels with each of them."""

from typing import Any

import pytest
import torch
import toy_drafters as toys
from close_drafts import close_to
from models import llama
from pearl_pairs import generate, pearl

from hf_specdec.drafters.pearl.session import as_draft
from hf_specdec.drafters.pearl.token import LIKELY, DraftToken
from hf_specdec.drafters.pearl.worker import drafting

VOCAB = 300
NAN = float("nan")


def test_q_is_known_as_a_whole() -> None:
    drafted = DraftToken(5, [5, 0, 7], [0.5, 0.3, 0.2])
    assert drafted.chance == 0.5 and DraftToken(5).chance == 1.0
    sampled = toys.context(do_sample=True, vocab_size=9)
    draft = as_draft([[drafted, DraftToken(1, [1], [1.0])], [drafted]], sampled)
    assert draft.q is not None and draft.lengths == [2, 1]
    known = torch.tensor([0.3, 0, 0, 0, 0, 0.5, 0, 0.2, 0])
    torch.testing.assert_close(draft.q[0], torch.stack([known, torch.eye(9)[1]]))
    torch.testing.assert_close(draft.q[1, 0], known)


@pytest.mark.parametrize("likely", [[5, -1], [5, VOCAB], [5, 6], [6, 5], [5, 5], [6, 7], [5, 6.5], []], ids=str)
@pytest.mark.parametrize("chances", [[0.8, 0.2], [0, 1], [0.8, 0.1], [NAN, 0.2], [1.2, -0.2], [1.0], []], ids=str)
def test_what_cannot_be_meant_is_no_draft_token(likely: list[int], chances: list[float]) -> None:
    for token in (5, -1, VOCAB, 6.5):
        can_be = DraftToken(token, likely, chances).can_be(VOCAB, sampled=True)  # type: ignore[arg-type]
        fine = token == 5 and likely in ([5, 6], [6, 5]) and chances in ([0.8, 0.2], [0, 1])
        assert can_be == (fine and (likely, chances) != ([5, 6], [0, 1]))


def test_q_is_told_where_the_draft_samples() -> None:
    sampled, greedy = DraftToken(5, [5], [1.0]), DraftToken(5)
    assert sampled.can_be(VOCAB, sampled=True) and not sampled.can_be(VOCAB, sampled=False)
    assert greedy.can_be(VOCAB, sampled=False) and not greedy.can_be(VOCAB, sampled=True)


@pytest.mark.parametrize(("top_k", "temperature"), [(0, 1.0), (0, 0.7), (50, 1.0)])
def test_few_likely_tokens_are_accepted_as_often_as_all(top_k: int, temperature: float, monkeypatch: Any) -> None:
    """And where `top_k` leaves no more, the text is the same."""
    size = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    target = llama(vocab=2000, seed=1, **size)
    draft = close_to(target, 0.1)
    texts, alphas = [], []
    for likely in (LIKELY, 2000):
        monkeypatch.setattr(drafting, "LIKELY", likely)
        drafter = pearl(draft, window=4)
        torch.manual_seed(3)
        options = {"do_sample": True, "max_new_tokens": 200, "top_k": top_k, "temperature": temperature}
        texts.append(generate(drafter, target=target, **options))
        assert drafter.last_stats.rejections > 50
        alphas.append(drafter.last_stats.alpha)
    assert alphas[0] > alphas[1] - 0.1
    assert torch.equal(*texts) or not top_k
