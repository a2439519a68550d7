"""Grammars of other libraries: the text is what plain decoding gives under them, and what they force is drafted."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grammars
import models
import pytest
import torch
import toy_drafters as drafters
from chi_square import chi_square
from compare import Sides
from disco_models import classifier
from grammars import EOS, LIBRARIES, PAD, REGEXES, VOCAB, text_of
from torch import Tensor
from transformers.generation import LogitsProcessor

from hf_specdec import DiscoDrafter, DraftModelDrafter, HybridDrafter, PromptLookupDrafter, SuffixDrafter
from hf_specdec.budget import Acceptance
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.trees import TreeSession
from hf_specdec.protocol import Draft, DraftContext

LIBRARY = pytest.mark.parametrize("library", LIBRARIES)


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """llguidance and outlines-core compile how masks are applied, which takes longer than all tests."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return models.llama(VOCAB)


def sides(model: Any, library: str, regex: str, lengths: list[int], **settings: Any) -> Sides:
    options: dict[str, Any] = {"max_new_tokens": 64, "eos_token_id": EOS, "pad_token_id": PAD}
    options["logits_processor"] = lambda: [LIBRARIES[library](regex)]
    return Sides(model, lengths, **options | settings)


@LIBRARY
@pytest.mark.parametrize("lengths", [[7], [9, 5, 1, 7]])
@pytest.mark.parametrize("regex", REGEXES.values(), ids=REGEXES)
def test_the_text_is_plain_decodings(model: Any, library: str, regex: str, lengths: list[int]) -> None:
    both = sides(model, library, regex, lengths)
    for row in both.plain[:, max(lengths) :].tolist():
        assert re.fullmatch(regex, text_of(row))
    future = drafters.Future(both.plain)
    for drafter in (HybridDrafter(), PromptLookupDrafter(), SuffixDrafter(), drafters.bushy(future, 4, VOCAB)):
        assert torch.equal(both.ours(drafter), both.plain)
    assert torch.equal(both.ours(), both.plain)
    assert both.stats.accepted_tokens > 0 and both.stats.mode == ("lockstep" if len(lengths) == 1 else "ragged")


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", [DraftModelDrafter, HybridDrafter, DiscoDrafter])
def test_beside_a_draft_model(model: Any, kind: Any, do_sample: bool) -> None:
    """Which knows of no grammar: what it drafts against it has no chance."""
    both = sides(model, "xgrammar", regex := REGEXES["a call"], [9, 5], do_sample=do_sample, top_k=0)
    drafter = kind(models.llama(VOCAB, seed=1), *[classifier()] * (kind is DiscoDrafter))
    text = both.ours(drafter)
    assert do_sample or torch.equal(text, both.plain)
    assert all(re.fullmatch(regex, text_of(row)) for row in text[:, 9:].tolist())
    assert drafter.last_stats is not None
    assert kind is DiscoDrafter or drafter.last_stats.accepted_tokens > 0


@LIBRARY
def test_what_is_forced_is_drafted(model: Any, library: str) -> None:
    both = sides(model, library, r'ab": \{"args": \{"name": (true|"xyz")\}\}', [7, 4])
    drafter = PromptLookupDrafter(min_match=200, max_match=200)  # which copies nothing
    assert torch.equal(both.ours(drafter), both.plain)
    assert drafter.last_stats is not None
    assert drafter.last_stats.accepted_tokens > 8 and "forced" in str(drafter.last_stats)


@LIBRARY
@pytest.mark.parametrize("also", ["a processor of one's own", "penalties", "scores", "min_new_tokens"])
def test_beside_other_settings(model: Any, library: str, also: str) -> None:
    class Own(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.roll(input_ids.shape[1] % 3, dims=-1)

    def processors() -> list[Any]:
        held = LIBRARIES[library](REGEXES["a call"])
        return [Own(), held] if also == "a processor of one's own" else [held]

    more: dict[str, Any] = {
        "penalties": {"repetition_penalty": 1.3},
        "scores": {"output_scores": True, "return_dict_in_generate": True},
        "min_new_tokens": {"min_new_tokens": 12},
    }.get(also, {})
    both = sides(model, library, "", [7, 4], **more | {"logits_processor": processors})
    ours = both.ours(HybridDrafter())
    if also != "scores":
        assert torch.equal(ours, both.plain)
        return
    assert torch.equal(ours.sequences, both.plain.sequences)
    for a, b in zip(ours.scores, both.plain.scores, strict=True):
        assert torch.equal(a.isneginf(), b.isneginf())


def test_matchers_are_left_where_plain_decoding_leaves_them(model: Any) -> None:
    made: list[Any] = []

    def processors() -> list[Any]:
        made.append(grammars.of_xgrammar(REGEXES["a call"]))
        return [made[-1]]

    both = sides(model, "xgrammar", "", [7, 4], logits_processor=processors)
    both.ours(HybridDrafter())
    for plain, ours in zip(made[0].matchers, made[1].matchers, strict=True):
        assert plain.is_terminated() == ours.is_terminated()
        assert plain.is_terminated() or plain.find_jump_forward_string() == ours.find_jump_forward_string()


# ------------------------------------------------------------------ the distribution


class All(TreeSession):
    """What is forced, whether it pays or not."""

    def draft(self) -> Draft:
        return replace(super().draft(), survival=None)


class AllForced(Drafter):
    proposes_trees = True

    def start(self, context: DraftContext) -> All:
        return All(context, Acceptance())


FEW = ["<pad>", "<s>", "</s>", "a", "b", "ab", "c", "cc"]
SMALL = "(ab|a|ba)c{1,4}"


def exact(target: Any, prompt: Tensor) -> dict[tuple[int, ...], float]:
    """The chance of each text that the grammar allows, by trying all."""
    whole = {left + right for left in ("ab", "a", "ba") for right in ("c", "cc", "ccc", "cccc")}
    found: dict[tuple[int, ...], float] = {}
    places = [((), 1.0)]
    for text, mass in places:
        said = "".join(FEW[token] for token in text)
        allowed = [i for i in range(3, len(FEW)) if any(word.startswith(said + FEW[i]) for word in whole)]
        allowed += [EOS] if said in whole else []
        with torch.no_grad():
            ids = torch.cat([prompt, torch.tensor([text], dtype=torch.long)], 1)
            p = target(ids).logits[0, -1, allowed].double().softmax(-1)
        for token, chance in zip(allowed, p.tolist(), strict=True):
            here = (*text, token), mass * chance
            if token == EOS:
                found[here[0]] = here[1]
            else:
                places.append(here)
    return found


@LIBRARY
@pytest.mark.parametrize("drawn", [False, True])
def test_the_distribution_of_whole_texts(library: str, drawn: bool) -> None:
    """2,000 rows, a level of 1e-4."""
    target, prompt, rows = models.llama(len(FEW)), torch.tensor([[3, 4, 5]]), 2000
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(0.4)
    logits = torch.randn(len(FEW), len(FEW), generator=torch.Generator().manual_seed(1))
    drafter = drafters.with_logits(lambda last: logits[last], 3) if drawn else AllForced()
    chances = exact(target, prompt)
    assert sum(chances.values()) == pytest.approx(1.0)
    torch.manual_seed(0)
    text = target.generate(
        prompt.expand(rows, -1),
        attention_mask=torch.ones(rows, 3, dtype=torch.long),
        logits_processor=[LIBRARIES[library](SMALL, FEW)],
        assistant_model=drafter,
        max_new_tokens=12,
        do_sample=True,
        top_k=0,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    counts = dict.fromkeys(chances, 0)
    for row in text[:, 3:].tolist():
        counts[(*itertools.takewhile(lambda token: token != EOS, row), EOS)] += 1
    assert drafter.last_stats is not None and drafter.last_stats.accepted_tokens > rows / 8
    common = [text for text, chance in chances.items() if chance * rows >= 5]
    rest = 1 - sum(chances[text] for text in common)
    observed = [*(counts[text] for text in common), rows - sum(counts[text] for text in common)]
    wanted = [*(chances[text] * rows for text in common), rest * rows]
    if wanted[-1] < 5:
        observed[-2:], wanted[-2:] = [sum(observed[-2:])], [sum(wanted[-2:])]
    assert chi_square(observed, wanted) > 1e-4
