"""Draft models of another tokenizer, with every drafter that has one: the target's text, drawn as the target draws."""

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import transformers as tf
from disco_models import classifier
from sampled_triples import FEWER, LEVEL, SETTINGS, VOCAB, joint, p_value, sample

from hf_specdec import (
    BatchDecoder,
    DiscoDrafter,
    DraftModelDrafter,
    HybridDrafter,
    PearlDrafter,
    PromptLookupDrafter,
    SpeculationError,
    Translated,
)
from hf_specdec.hub import drafter_from_flag

NEW = 30
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "fixed": lambda draft: DraftModelDrafter(draft, num_draft_tokens=4),
    "auto": DraftModelDrafter,
    "candidates": lambda draft: DraftModelDrafter(draft, num_candidates=3, num_draft_tokens=3),
    "disco": lambda draft: DiscoDrafter(draft, classifier(), rule="token", tau=0.3, max_draft_tokens=6),
    "hybrid": lambda draft: HybridDrafter(draft, num_draft_tokens=3),
    "pearl": lambda draft: PearlDrafter(draft, window=4, worker="thread"),
}
LENGTHS = [[9], [7, 7, 7], [3, 11, 6]]


def letters(order: list[int]) -> Any:
    """A tokenizer whose token i is letter `order[i]`; it drops what it does not know."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    backend = Tokenizer(BPE({chr(0x4E00 + letter): i for i, letter in enumerate(order)}, []))
    backend.decoder = decoders.Fuse()
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend)


def shuffled(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(count), count)


def same_model(target: Any, order: list[int]) -> Any:
    """The target itself, its tokens in another order."""
    draft = copy.deepcopy(target)
    with torch.no_grad():
        for table in (draft.get_input_embeddings().weight, draft.get_output_embeddings().weight):
            table.copy_(table[order])
    return draft


def drafting(kind: str) -> Any:
    """A draft that is the target in other tokens, or one that knows two thirds of the letters and little of the
    target."""
    target, order = models.llama(), shuffled(models.VOCAB)
    if kind == "oracle":
        return Translated(same_model(target, order), letters(list(range(models.VOCAB))), letters(order))
    order = order[: 2 * models.VOCAB // 3]
    return Translated(models.llama(vocab=len(order), seed=3), letters(list(range(models.VOCAB))), letters(order))


def generate(drafter: Any, lengths: list[int], **options: Any) -> torch.Tensor:
    torch.manual_seed(5)
    inputs = models.prompts(lengths) | {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    return models.llama().generate(**inputs, **({} if drafter is None else {"assistant_model": drafter}))


@pytest.mark.grid
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", ["oracle", "other"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_the_targets(name: str, kind: str, lengths: list[int]) -> None:
    drafter, plain = DRAFTERS[name](drafting(kind)), generate(None, lengths)
    assert torch.equal(generate(drafter, lengths), plain)
    eos = int(plain[0, -9])
    assert torch.equal(generate(drafter, lengths, eos_token_id=eos), generate(None, lengths, eos_token_id=eos))
    assert drafter.last_stats is not None and drafter.last_stats.drafted_tokens > 0
    assert not any("dropped" in note for note in drafter.last_stats.notes)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_same_model_in_other_tokens_is_always_right(lengths: list[int]) -> None:
    drafter = DRAFTERS["fixed"](drafting("oracle"))
    generate(drafter, lengths)
    assert drafter.last_stats is not None
    assert drafter.last_stats.accepted_tokens == drafter.last_stats.drafted_tokens > 0
    assert drafter.last_stats.target_calls <= 1 + -(-(NEW - 1) // 5)


@pytest.fixture(scope="module")
def small() -> Any:
    return models.small(VOCAB)


@pytest.mark.grid
@pytest.mark.parametrize("settings", ["temperature", "top-k", "penalties"])
def test_sampled_text_has_the_targets_distribution(small: Any, settings: str) -> None:
    """The draft knows three of five tokens. The power is that of test_distribution's tests."""
    told, processors = SETTINGS[settings]
    draft = models.llama(3, seed=2, hidden_size=8, bos_token_id=None, pad_token_id=None)
    drafter = DraftModelDrafter(Translated(draft, letters(list(range(VOCAB))), letters([4, 1, 3])), num_draft_tokens=3)
    counts = sample(small, drafter, FEWER, **told)
    assert drafter.last_stats is not None and drafter.last_stats.accepted_tokens > 0 < drafter.last_stats.rejections
    assert p_value(counts, joint(small, processors)) > LEVEL


@pytest.mark.parametrize("kind", ["oracle", "other"])
def test_rows_that_come_and_go(kind: str) -> None:
    target = models.llama()
    prompts = [models.prompts([n], seed=n)["input_ids"][0].tolist() for n in (4, 9, 6, 12, 5)]
    with BatchDecoder(target, DRAFTERS["fixed"](drafting(kind)), max_rows=2, max_tokens=256) as decoder:
        answers = [decoder.submit(prompt, max_new_tokens=20, do_sample=False) for prompt in prompts]
        found = [list(answer.result(60)) for answer in answers]
        stats = decoder.stats
    assert stats.accepted_tokens > 0
    for prompt, tokens in zip(prompts, found, strict=True):
        plain = target.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
        assert tokens == plain.tolist()


def test_a_call_may_name_both_tokenizers() -> None:
    target, order = models.llama(), shuffled(models.VOCAB)[:60]
    draft, theirs, mine = models.llama(vocab=60, seed=3), letters(order), letters(list(range(models.VOCAB)))
    inputs = models.prompts([7, 4]) | {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(**inputs)
    names = {"tokenizer": mine, "assistant_tokenizer": theirs}
    ours = target.generate(**inputs, assistant_model=draft, speculation_type="draft_model", **names)
    assert torch.equal(ours, plain)
    with pytest.raises(
        SpeculationError, match=r"assistant_tokenizer needs the target's tokenizer \(tokenizer=\.\.\.\)"
    ):
        target.generate(**inputs, assistant_model=DraftModelDrafter(draft), assistant_tokenizer=theirs)
    with pytest.raises(SpeculationError, match="assistant_tokenizer needs a draft model"):
        target.generate(**inputs, assistant_model=PromptLookupDrafter(), **names)
    single, hybrid = DraftModelDrafter(draft, num_draft_tokens=3), HybridDrafter(draft)
    for drafter in (single, hybrid):
        assert torch.equal(target.generate(**inputs, assistant_model=drafter, **names), plain)
    assert single.draft is draft and hybrid.model_drafter.draft is draft, "it was of that call"


@pytest.mark.parametrize("kind", ["draft_model", "hybrid"])
def test_a_flag_takes_a_translated_model(kind: str) -> None:
    target, inputs = models.llama(), models.prompts([7, 4]) | {"max_new_tokens": 20, "do_sample": False}
    plain, translated = target.generate(**inputs, pad_token_id=0), drafting("oracle")
    drafted = target.generate(**inputs, pad_token_id=0, assistant_model=translated, speculation_type=kind)
    assert torch.equal(drafted, plain)
    drafter = drafter_from_flag(target, kind, {}, translated)
    assert drafter.last_stats.accepted_tokens > 0  # type: ignore[attr-defined]


def test_nothing_is_written_on_the_draft_model() -> None:
    draft = models.llama(vocab=60, seed=3)
    before = set(vars(draft))
    order = shuffled(models.VOCAB)[:60]
    drafter = DraftModelDrafter(Translated(draft, letters(list(range(models.VOCAB))), letters(order)))
    generate(drafter, [7])
    assert set(vars(draft)) == before and drafter.draft_model is draft


def test_in_a_worker_of_its_own() -> None:
    with PearlDrafter(drafting("oracle"), window=4, worker="process") as drafter:
        assert torch.equal(generate(drafter, [9]), generate(None, [9]))
        assert drafter.last_stats is not None
        assert drafter.last_stats.accepted_tokens > 0.8 * drafter.last_stats.drafted_tokens


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_context_that_ends_sooner_in_the_drafts_tokens(name: str) -> None:
    """A draft with learned positions, in whose tokens the target's texts are longer, ends before its last position."""
    draft, seen = models.build_gpt2(24), []
    draft.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs["position_ids"].max()), with_kwargs=True)
    translated = Translated(draft, letters(list(range(models.VOCAB))), letters(shuffled(models.VOCAB)))
    translated.same = {5: 5, 6: 6}  # each token is written as two
    drafter = DRAFTERS[name](translated)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in (5, 20, 40):
            assert torch.equal(generate(drafter, [length]), generate(None, [length]))
    assert max(map(int, seen)) < 24


def test_a_translation_is_of_one_target() -> None:
    draft = drafting("other")
    inputs = models.prompts([7]) | {"max_new_tokens": 5}
    with pytest.raises(SpeculationError, match=r"translated for a target of 97 tokens.*has 5000"):
        models.llama(vocab=5_000).generate(**inputs, assistant_model=DraftModelDrafter(draft))


def test_what_a_translated_draft_cannot_do() -> None:
    target = models.llama()
    names = {"tokenizer": letters([1, 2, 3]), "assistant_tokenizer": letters([1, 2, 3])}
    with (
        BatchDecoder(target, None) as decoder,
        pytest.raises(SpeculationError, match=r"give it a drafter over Translated\(draft_model"),
    ):
        decoder.submit([3, 4, 5], **names)


def test_vocabularies_with_nothing_in_common() -> None:
    mine, theirs = letters(list(range(10))), letters(list(range(20, 30)))
    with pytest.raises(SpeculationError, match="share 0 tokens, of 10 and 10"):
        Translated(models.llama(vocab=10), mine, theirs)
    with pytest.raises(SpeculationError, match="; pass its draft_model"):
        Translated(DraftModelDrafter(models.llama(vocab=10)), mine, mine)  # type: ignore[arg-type]
