"""PARD: draft models that draft all places at once, from masks behind the text."""

import copy
from typing import Any

import models
import pytest
import torch
from head_pairs import small
from processes import folder_of_the_session
from sampled_triples import FEWER, LEVEL, SETTINGS, VOCAB, joint, p_value, sample

from hf_specdec import BatchDecoder, Drafter, DraftModelDrafter, HybridDrafter, SpeculationError
from hf_specdec.drafters.draft_model.masked_draft import MaskedDraft
from hf_specdec.drafters.drawn import Drawn

__all__ = ["small"]
MASK, PLACES = 95, 4
CALL: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}


def pair() -> tuple[Any, Any]:
    target, draft = models.llama(), models.llama(seed=3)
    draft.config.pard_token = MASK
    return target, draft


@pytest.mark.parametrize("forwards", ["eager", "captured"])
@pytest.mark.parametrize("lengths", [[9], [3, 11, 6, 8]], ids=str)
def test_logits_are_those_behind_masks(lengths: list[int], forwards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each place, over the whole text at once."""
    target, draft = pair()
    told: list[tuple[list[list[int]], list[torch.Tensor]]] = []
    begin, draw = MaskedDraft.begin, Drawn.draw

    def begun(self: Any, sequences: Any, *steps: int) -> None:
        told.append(([list(row) for row in sequences.tokens], []))
        begin(self, sequences, *steps)

    def drawing(self: Any, logits: torch.Tensor, *said: Any) -> torch.Tensor:
        told[-1][1].append(logits.clone())
        return draw(self, logits, *said)

    monkeypatch.setattr(MaskedDraft, "begin", begun)
    monkeypatch.setattr(Drawn, "draw", drawing)
    drafter = DraftModelDrafter(draft, num_draft_tokens=PLACES)
    target.generate(**models.prompts(lengths), **CALL, assistant_model=drafter, speculation={"forwards": forwards})
    assert (
        len(told) > 4 and drafter.last_stats is not None and drafter.last_stats.draft_calls == len(told) + 1
    )  # it read the prompt
    for texts, logits in told:
        for b, text in enumerate(texts):
            masks = [MASK] * (len(logits) - 1)
            with torch.no_grad():
                expected = draft(torch.tensor([[*text, *masks]])).logits[0, -len(logits) :]
            torch.testing.assert_close(torch.stack([each[b] for each in logits]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [[9], [3, 11, 6, 8]], ids=str)
def test_greedy_text_is_the_targets(lengths: list[int]) -> None:
    target, draft = pair()
    inputs = models.prompts(lengths)
    plain = target.generate(**inputs, **CALL)
    for drafter in (DraftModelDrafter(draft, num_draft_tokens=3, num_candidates=2), HybridDrafter(draft)):
        assert torch.equal(target.generate(**inputs, **CALL, assistant_model=drafter), plain)
        assert drafter.last_stats is not None and not any("dropped" in note for note in drafter.last_stats.notes)
    with BatchDecoder(target, DraftModelDrafter(draft, num_draft_tokens=3), max_rows=2) as decoder:
        rows = [
            ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ]
        answers = [decoder.submit(row, max_new_tokens=16, do_sample=False) for row in rows]
        for answer, text in zip(answers, plain, strict=True):
            assert answer.result(60) == text[-16:].tolist()
    assert decoder.stats.draft_calls > 0 and not any("dropped" in note for note in decoder.stats.notes)


def test_sampled_text_has_the_targets_distribution(small: Any) -> None:
    draft = copy.deepcopy(small)
    draft.config.pard_token = VOCAB - 1
    drafter = DraftModelDrafter(draft, num_draft_tokens=2)
    told, processors = SETTINGS["temperature"]
    counts = sample(small, drafter, FEWER, **told)
    assert drafter.last_stats is not None and drafter.last_stats.accepted_tokens > 0 < drafter.last_stats.rejections
    assert p_value(counts, joint(small, processors)) > LEVEL


def test_a_published_one_is_loaded_by_its_name() -> None:
    """The config says that it is one, and a drafter that is saved over it drafts the same."""
    target, draft = pair()
    folder = folder_of_the_session()
    DraftModelDrafter(draft, num_draft_tokens=3).save_pretrained(folder, target=target)
    loaded = Drafter.from_pretrained(folder)
    target.generate(**models.prompts([9]), **CALL, assistant_model=loaded)
    stats = loaded.last_stats
    assert stats is not None and 0 < stats.draft_calls <= stats.target_calls


def test_one_that_reads_the_target_is_refused() -> None:
    draft = pair()[1]
    draft.config.spd_type = "pard2"
    with pytest.raises(SpeculationError, match="is a PARD-2 model"):
        DraftModelDrafter(draft)
