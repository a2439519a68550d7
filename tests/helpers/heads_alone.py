"""What heads draft in a batch, and what by another way over each text alone."""

from typing import Any

import models
import pytest
import torch
from head_pairs import HEADS, PAIRS
from torch import Tensor

from hf_specdec.drafters.drawn import Drawn
from hf_specdec.drafters.heads.steps import HeadSteps
from hf_specdec.drafters.trees import TreeSession
from hf_specdec.protocol import Draft


def drafts_are_those_of_texts_alone(
    pair: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch, forwards: str
) -> None:
    """Every draft of a batch against transformers' own model, or a slow reference, over that row's text, from nothing,
    without padding. What is verified is right in places, as the heads themselves hardly ever are, so that rows grow by
    any number."""
    target, drafter = PAIRS[pair]()
    call = models.prompts(lengths) | {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    texts = [row[max(lengths) - n :] for row, n in zip(target.generate(**call).tolist(), lengths, strict=True)]
    drafts: list[tuple[list[int], list[int]]] = []
    propose = TreeSession.propose

    def recording(self: Any, sequences: Any, room: list[int]) -> Any:
        draft, firsts = first_candidates(propose, self, sequences, room)
        fed = []
        for b, row in enumerate(sequences.rows):
            tokens = list(sequences.tokens[b])
            drafted = firsts[b] if draft.lengths[b] else []
            drafts.append((tokens, drafted))
            right = (len(tokens) + row) % (len(drafted) + 1)
            fed.append([*texts[row][len(tokens) :][:right], *drafted[right:]])
        return Draft.from_lists(fed)

    monkeypatch.setattr(TreeSession, "propose", recording)
    target.generate(**call, assistant_model=drafter, speculation={"forwards": forwards})
    stats = drafter.last_stats
    assert stats is not None and len(drafts) > 5 * len(lengths) and stats.accepted_tokens > 4
    for text, drafted in drafts:
        expected = HEADS[type(drafter)].alone(target, drafter, torch.tensor([text]))[: len(drafted)]
        assert drafted == expected


def logits_drafted_from(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[Tensor]]]:
    """Of a call of one row, each text behind which something is drafted, and the logits [V] of each place."""
    found: list[tuple[list[int], list[Tensor]]] = []
    begin, draw = HeadSteps.begin, Drawn.draw

    def begun(self: Any, sequences: Any, *steps: int) -> None:
        found.append((list(sequences.tokens[0]), []))
        begin(self, sequences, *steps)

    def drawing(self: Any, logits: Tensor, *said: Tensor | None) -> Tensor:
        found[-1][1].append(logits[0].clone())
        return draw(self, logits, *said)

    monkeypatch.setattr(HeadSteps, "begin", begun)
    monkeypatch.setattr(Drawn, "draw", drawing)
    return found


def first_candidates(propose: Any, session: Any, sequences: Any, room: list[int]) -> tuple[Draft, list[list[int]]]:
    """A session's draft, and of each row the likeliest tokens of its heads, as far as there is room."""
    steps, taken, several = session.steps, [], session.steps.several
    steps.several = lambda count: taken.append(several(count)) or taken[-1]
    draft = propose(session, sequences, room)
    del steps.several
    return draft, [
        [token for each in taken for token in each.tokens[b, :, 0].tolist()][:most] for b, most in enumerate(room)
    ]
