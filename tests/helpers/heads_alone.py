"""What heads draft in a batch, and what by another way over each text alone."""

from pathlib import Path
from typing import Any

import dflash_models
import eagle_heads
import gemma4_models
import models
import pytest
import torch
from head_pairs import BLOCK, MASK, PAIRS
from torch import Tensor
from transformers.cache_utils import DFlashCache, MtpCache

from hf_specdec import DFlashDrafter, EagleDrafter, Gemma4Drafter, MtpDrafter
from hf_specdec.drafters.heads.drawn import Drawn
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
        expected = ALONE[type(drafter)](target, drafter, torch.tensor([text]))[: len(drafted)]
        assert drafted == expected


def logits_drafted_from(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[Tensor]]]:
    """Of a call of one row, each text behind which something is drafted, and the logits [V] of each place."""
    found: list[tuple[list[int], list[Tensor]]] = []
    begin, draw = HeadSteps.begin, Drawn.draw

    def begun(self: Any, sequences: Any, *steps: int) -> None:
        found.append((list(sequences.tokens[0]), []))
        begin(self, sequences, *steps)

    def drawing(self: Any, logits: Tensor) -> Tensor:
        found[-1][1].append(logits[0].clone())
        return draw(self, logits)

    monkeypatch.setattr(HeadSteps, "begin", begun)
    monkeypatch.setattr(Drawn, "draw", drawing)
    return found


def first_candidates(propose: Any, session: Any, sequences: Any, room: list[int]) -> tuple[Draft, list[list[int]]]:
    """A session's draft, and of each row the likeliest tokens of its heads, as far as there is room."""
    steps, taken, step = session.steps, [], session.steps.step
    steps.step = lambda: taken.append(step()) or taken[-1]
    draft = propose(session, sequences, room)
    del steps.step
    return draft, [[int(each.tokens[b, 0]) for each in taken][:most] for b, most in enumerate(room)]


@torch.no_grad()
def _mtp_alone(target: Any, drafter: Any, text: Tensor) -> list[int]:
    states = target(text[:, :-1], output_hidden_states=True).hidden_states[-1]
    tokens, *_ = drafter.model(
        input_ids=text[:, 1:],
        last_hidden_states=states,
        attention_mask=torch.ones_like(text),
        position_ids=torch.arange(1, text.shape[1])[None],
        mtp_cache=MtpCache(config=drafter.model.config),
    )
    return tokens[0].tolist()


@torch.no_grad()
def _dflash_alone(target: Any, drafter: Any, text: Tensor) -> list[int]:
    if name := drafter.draft_model.config.name_or_path:
        return dflash_models.Reference(Path(name)).block(target, text[0].tolist()).argmax(-1).tolist()
    model, hidden = drafter.draft_model, target(text[:, :-1], output_hidden_states=True).hidden_states
    cache, length = DFlashCache(config=model.config), text.shape[1]
    cache.set_previous_accepted_tokens(length - 1)
    filled = model(
        noise_embeds=target.get_input_embeddings()(torch.tensor([[int(text[0, -1]), *[MASK] * (BLOCK - 1)]])),
        context_hidden_states=torch.cat([hidden[layer + 1] for layer in model.config.target_layer_ids], dim=-1),
        position_ids=torch.arange(length - 1 + BLOCK)[None],
        past_key_values=cache,
    ).last_hidden_state
    return target.get_output_embeddings()(filled[:, 1:]).argmax(-1)[0].tolist()


def _eagle_alone(target: Any, drafter: Any, text: Tensor) -> list[int]:
    reference = eagle_heads.Reference(Path(drafter.draft_model.config.name_or_path))
    logits = reference.chain(target, text[0].tolist(), drafter.config.num_draft_tokens)
    return [int(each.argmax()) for each in logits]


def _gemma4_alone(target: Any, drafter: Any, text: Tensor) -> list[int]:
    return gemma4_models.drafted_by_transformers(target, drafter.draft_model, text, drafter.most)[0]


ALONE: dict[Any, Any] = {
    MtpDrafter: _mtp_alone,
    DFlashDrafter: _dflash_alone,
    EagleDrafter: _eagle_alone,
    Gemma4Drafter: _gemma4_alone,
}
"""what heads draft over a text, by another way"""
