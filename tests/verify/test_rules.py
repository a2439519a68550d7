"""Rules of verification: draws are verified as a whole, exactly; lenience keeps its promise; coupled sampling gives one
text for one seed."""

import warnings
from typing import Any

import compare
import models
import pytest
import torch
import toy_drafters as drafters
from close_drafts import close_to
from random_walks import documents
from sampled_triples import FEWER, LEVEL, NEW, PROMPT, SETTINGS, VOCAB, joint, p_value, sample, table, target
from scipy import stats
from torch import Tensor

from hf_specdec import (
    BatchDecoder,
    DraftModelDrafter,
    HybridDrafter,
    NGramDrafter,
    PearlDrafter,
    PromptLookupDrafter,
    SpeculationError,
    SuffixDrafter,
)
from hf_specdec.train.ngram import train_ngram
from hf_specdec.verify.noise import Noise
from hf_specdec.verify.randomness import Randomness
from hf_specdec.verify.rules import Rules
from hf_specdec.verify.verification import (
    accepted_lengths,
    accepts,
    block_verified,
    choose_candidate,
    draw,
)

__all__ = ["target"]
MODEL = models.llama(seed=1)
DRAFT = close_to(MODEL, 0.05)
WIDE = {"sampling": "coupled"}


# ---------------------------------------------------------------------- all of a draft together


def random_rounds(count: int, k: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p [B, K + 1, V], q [B, K, V], tokens [B, K] drawn from q, and lengths."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(count, k + 1, vocab, generator=generator).mul(1.5).softmax(-1)
    q = (p[:, :k].log() + torch.randn(count, k, vocab, generator=generator)).softmax(-1)
    u = torch.rand(count * k, generator=generator)
    tokens = draw(q.reshape(-1, vocab), u).view(count, k)
    return p, q, tokens, torch.randint(0, k + 1, (count,), generator=generator)


def numbers(count: int, k: int, seed: int = 1) -> Tensor:
    return torch.rand(count, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_block_verification_accepts_more_than_token_verification() -> None:
    """10,000 rounds of random pairs. Of each draft it keeps so many tokens with at least the probability with which
    token verification does, so that the two means, 0.12 apart with a standard error of 0.013, say which is which."""
    p, q, tokens, lengths = random_rounds(10_000, 5, 8)
    r = numbers(10_000, 5)
    block, _ = block_verified(p, q, tokens, lengths, r)
    at = [x.gather(2, tokens[..., None])[..., 0].double() for x in (p[:, :5], q)]
    token = accepted_lengths(accepts(*at, r), lengths)
    ratio = (at[0] / at[1]).clamp(max=1).cumprod(1)
    counted = torch.arange(5) < lengths[:, None]
    assert float(block.double().mean()) > float(token.double().mean()) + 0.05
    assert float(token.double().mean()) == pytest.approx(float((ratio * counted).sum(1).mean()), abs=0.05)
    assert bool((block <= lengths).all())


def _tree_round(p: Tensor, q: Tensor, dice: torch.Generator) -> list[int]:
    """Two draws behind the root, two behind the first of them; p and q [V + 1, V] by last token. The first two tokens
    that come of it."""
    vocab = p.shape[1]

    def drawn(last: int) -> int:
        return int(torch.multinomial(q[last], 1, generator=dice))

    first = [drawn(vocab), drawn(vocab)]
    tokens = [*first, drawn(first[0]), drawn(first[0])]
    below = {-1: [0, 1], 0: [2, 3]}
    last = {-1: vocab} | dict(enumerate(tokens))
    path: list[int] = []
    while True:
        here = path[-1] if path else -1
        children, left = below.get(here, []), p[last[here]]
        r = torch.rand(2, generator=dice).tolist()
        taken, left = choose_candidate(left, q[last[here]].expand(2, -1), [tokens[i] for i in children], r)
        if taken is None:
            break
        path.append(children[taken])
    text = [tokens[node] for node in path] + [int(torch.multinomial(left, 1, generator=dice))]
    while len(text) < 2:
        text.append(int(torch.multinomial(p[text[-1]], 1, generator=dice)))
    return text[:2]


def test_trees_are_walked_exactly() -> None:
    """8,000 rounds find Σ (p' - p)² / p = 0.0085 of 16 cells with a power of 99% at this level."""
    generator = torch.Generator().manual_seed(5)
    p = torch.randn(5, 4, generator=generator).mul(1.2).softmax(-1)
    q = torch.randn(5, 4, generator=generator).mul(1.2).softmax(-1)
    assert stats.ncx2.sf(stats.chi2.ppf(1 - LEVEL, 15), 15, nc=8_000 * 0.0085) > 0.99
    dice, counts = torch.Generator().manual_seed(6), torch.zeros(16)
    for _ in range(8_000):
        a, b = _tree_round(p, q, dice)
        counts[4 * a + b] += 1
    wanted = (p[4][:, None] * p[:4]).flatten().double()
    assert p_value(counts.long(), wanted) > LEVEL


@pytest.mark.grid
@pytest.mark.parametrize("verification", ["block", "token"])
@pytest.mark.parametrize("branches", [1, 2])
def test_both_verifications_are_exact_in_generate(target: Any, verification: str, branches: int) -> None:
    told, processors = SETTINGS["temperature"]
    drafter = drafters.with_logits(table(1), 3, branches=branches)
    counts = sample(target, drafter, FEWER, speculation={"verification": verification}, **told)
    assert p_value(counts, joint(target, processors)) > LEVEL


# ---------------------------------------------------------------------- tolerant


def drafted_probabilities(output: Tensor, prompts: dict[str, Tensor]) -> Tensor:
    """Of every new token its probability over the likeliest one's [B, T]."""
    width = prompts["input_ids"].shape[1]
    mask = torch.nn.functional.pad(prompts["attention_mask"], (0, output.shape[1] - width), value=1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        p = MODEL(output, attention_mask=mask, position_ids=positions).logits[:, width - 1 : -1].softmax(-1)
    return p.gather(2, output[:, width:, None])[..., 0] / p.amax(-1)


@pytest.mark.parametrize("lengths", [[9], [9, 5, 7]])
@pytest.mark.parametrize("kind", ["chain", "tree", "a processor of the user's own"])
def test_lenient_greedy_text_keeps_its_promise(kind: str, lengths: list[int]) -> None:
    """No drafted token below l of the likeliest; with l = 1 it is plain decoding's; the smaller l the fewer calls."""
    prompts, calls = models.prompts(lengths), []
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if kind.startswith("a processor"):
        options["logits_processor"] = [lambda ids, scores: scores]
    plain = MODEL.generate(**prompts, **options)
    for lenience in (1.0, 0.5, 0.05):
        drafter = HybridDrafter(DRAFT) if kind == "tree" else DraftModelDrafter(DRAFT, num_draft_tokens=4)
        text = MODEL.generate(**prompts, **options, assistant_model=drafter, speculation={"lenience": lenience})
        if lenience == 1:
            assert torch.equal(text, plain)
        assert float(drafted_probabilities(text, prompts).min()) >= lenience * 0.999
        calls.append(drafter.last_stats.target_calls)
        assert any("lenience" in note for note in drafter.last_stats.notes) == (lenience < 1)
    if kind == "chain":
        assert calls[2] < calls[0]


@pytest.mark.grid
@pytest.mark.parametrize("draft", ["draws", "tree of draws", "point masses"])
def test_lenient_sampling_makes_no_token_more_than_so_many_times_as_likely(target: Any, draft: str) -> None:
    """p / l, with four standard errors of 10,000 rows above it."""
    lenience, told = 0.3, SETTINGS["temperature"][0]
    drafter = {
        "draws": drafters.with_logits(table(1), 3),
        "tree of draws": drafters.with_logits(table(1), 2, branches=2),
        "point masses": drafters.Toy(
            lambda context, sequences, room: drafters.Draft.from_lists([[2, 2][:most] for most in room])
        ),
    }[draft]
    torch.manual_seed(0)
    prompt = PROMPT.expand(FEWER, -1)
    arguments = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NEW, "do_sample": True, "top_k": 0}
    text = target.generate(prompt, assistant_model=drafter, speculation={"lenience": lenience}, **arguments | told)[
        :, PROMPT.shape[1] :
    ]
    with torch.no_grad():
        p = (target(PROMPT).logits[0, -1] / told["temperature"]).softmax(-1).double()
        second = (target(torch.cat([PROMPT.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], 1)).logits[:, -1]).double()
        second = (second / told["temperature"]).softmax(-1)
    first = torch.bincount(text[:, 0], minlength=VOCAB) / FEWER
    torch.testing.assert_close(first.double(), p, atol=0.02, rtol=0)  # the prompt's own token has no draft
    after = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    after.index_put_((text[:, 0], text[:, 1]), torch.ones(FEWER, dtype=torch.float64), accumulate=True)
    rows = after.sum(1, keepdim=True)
    bound = second / lenience + 4 * (second / lenience / rows).sqrt()
    assert bool((after / rows <= bound).all())
    assert bool(((after / rows - second).abs() > 0.05).any()), "nothing was lenient"


@pytest.mark.parametrize("do_sample", [False, True])
def test_lenience_is_the_same_position_by_position(do_sample: bool) -> None:
    """A user's processor is asked place by place: the text is the one that is judged at once."""
    texts = []
    for own in ([], [lambda ids, scores: scores]):
        torch.manual_seed(3)
        texts.append(
            MODEL.generate(
                **models.prompts([9]),
                max_new_tokens=20,
                do_sample=do_sample,
                top_k=0,
                logits_processor=own,
                assistant_model=DraftModelDrafter(DRAFT, num_draft_tokens=3),
                speculation={"lenience": 0.2, "verification": "token"},
            )
        )
    assert torch.equal(*texts)


# ---------------------------------------------------------------------- coupled

KINDS: dict[str, Any] = {
    "draft_model": lambda gamma: DraftModelDrafter(DRAFT, num_draft_tokens=gamma),
    "hybrid": lambda gamma: HybridDrafter(DRAFT, num_draft_tokens=gamma),
    "prompt_lookup": lambda gamma: PromptLookupDrafter(max_draft_tokens=gamma),
    "suffix": lambda gamma: SuffixDrafter(max_draft_tokens=gamma),
    "ngram": lambda gamma: NGramDrafter(train_ngram(documents(models.VOCAB), models.VOCAB, order=3)),
    "pearl": lambda gamma: PearlDrafter(DRAFT, window=gamma, worker="thread"),
}
COUPLED: dict[str, Any] = {"max_new_tokens": 16, "do_sample": True, "top_k": 0, "pad_token_id": 0, "speculation": WIDE}


def coupled(prompts: dict[str, Tensor], drafter: Any = None, seed: int = 0, **options: Any) -> Tensor:
    torch.manual_seed(seed)
    return MODEL.generate(**prompts, **COUPLED | options, assistant_model=drafter)


@pytest.mark.grid
@pytest.mark.parametrize("count", [8, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_one_seed_one_text(kind: str, count: int) -> None:
    """Whatever the drafter, window and batch: that of coupled sampling without a drafter, one prompt at a time."""
    made = {gamma: KINDS[kind](gamma) for gamma in (1, 3, 7)}
    for seed in range(0, count, 8):
        lengths = [1 + (5 * (seed + b) + 8) % 11 for b in range(min(8, count - seed))]
        batch = models.prompts(lengths, seed=seed)
        each = [batch["input_ids"][b : b + 1, -n:] for b, n in enumerate(lengths)]
        inputs = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in each]
        alone = [coupled(one)[0, n:] for one, n in zip(inputs, lengths, strict=True)]
        for gamma, drafter in made.items():
            text = coupled(batch, drafter)[:, batch["input_ids"].shape[1] :]
            for b, (one, n, wanted) in enumerate(zip(inputs, lengths, alone, strict=True)):
                assert torch.equal(text[b, : len(wanted)], wanted)
                if gamma == 3 or count > 8:
                    assert torch.equal(coupled(one, drafter)[0, n:], wanted)


def test_other_seeds_and_other_copies_are_other_texts() -> None:
    prompts = models.prompts([9])
    assert not torch.equal(coupled(prompts, seed=0), coupled(prompts, seed=1))
    texts = coupled(prompts, num_return_sequences=4)
    assert len({tuple(row.tolist()) for row in texts}) == 4
    assert torch.equal(texts[:1], coupled(prompts, DraftModelDrafter(DRAFT)))


@pytest.mark.grid
@pytest.mark.parametrize("drafted", [False, True])
def test_coupled_text_has_the_targets_distribution(target: Any, drafted: bool) -> None:
    told, processors = SETTINGS["temperature"]
    torch.manual_seed(0)
    drafter = drafters.with_logits(table(1), 3) if drafted else None
    text = target.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        assistant_model=drafter,
        num_return_sequences=FEWER,
        **{"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "speculation": WIDE} | told,
    )
    a, b, c = text[:, -3:].T
    assert p_value(torch.bincount((a * VOCAB + b) * VOCAB + c, minlength=VOCAB**3), joint(target, processors)) > LEVEL


def test_coupled_drafts_are_right_more_often() -> None:
    """A draft that draws by itself agrees as often as chance has it; one that sees the same noise more often."""
    prompts, options = models.prompts([9] * 8), {"max_new_tokens": 60, "eos_token_id": None}
    rates = {}
    for sampling in ("independent", "coupled"):
        drafter = DraftModelDrafter(close_to(MODEL, 0.05), num_draft_tokens=3)
        coupled(prompts, drafter, **options, speculation={"sampling": sampling, "verification": "token"})
        rates[sampling] = drafter.last_stats.draft_acceptance_rate
    assert rates["coupled"] > 0.2
    assert rates["coupled"] > 0.75 * rates["independent"]


def test_a_drafter_that_dies_changes_nothing() -> None:
    prompts = models.prompts([9, 5])

    def die(context: Any, sequences: Any, room: list[int]) -> Any:
        if sequences.lengths[0] > 14:
            raise RuntimeError("dead")
        return drafters.Draft.from_lists([[3, 4][:most] for most in room])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(coupled(prompts, drafters.Toy(die)), coupled(prompts))


def test_rows_that_come_and_go_have_the_same_texts() -> None:
    wanted, got = [], []
    prompts = [models.prompts([n], seed=n)["input_ids"] for n in (9, 5, 7)]
    with BatchDecoder(MODEL, DraftModelDrafter(DRAFT), max_rows=2) as decoder:
        for seed, ids in enumerate(prompts):
            wanted.append(coupled({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, seed=seed)[0].tolist())
            torch.manual_seed(seed)
            got.append(decoder.submit(ids, **COUPLED))
        assert [[*ids[0].tolist(), *answer.result()] for ids, answer in zip(prompts, got, strict=True)] == wanted


def test_noise_is_as_its_name_says() -> None:
    """Gumbel: a Kolmogorov-Smirnov test over 40,000 numbers; the same for the same place, wherever it is asked for."""
    noise = Noise(Randomness(7), [0, 2], copies=1)
    scores = torch.zeros(2, 20_000)
    drawn = noise([0, 1], [5, 5], scores)
    assert stats.kstest(drawn.flatten().double().numpy(), "gumbel_r").pvalue > 1e-3
    assert torch.equal(drawn[0], noise([1], [7], scores[:1])[0])
    assert not torch.equal(drawn[0], drawn[1])


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "speculation",
    [
        {"lenience": 0},
        {"lenience": 1.5},
        {"lenience": "much"},
        {"lenience": True},
        {"lenience": float("nan")},
        {"verification": "blocks"},
        {"sampling": "copled"},
        {"lenience": 0.5, "sampling": "coupled"},
        {"num_draft_tokens": 3, "lenience": 0.5},
    ],
)
def test_bad_rules_are_refused(speculation: dict[str, Any]) -> None:
    with pytest.raises(SpeculationError):
        MODEL.generate(
            **models.prompts([5]), assistant_model=DraftModelDrafter(DRAFT), do_sample=True, speculation=speculation
        )


def test_rules_that_would_do_nothing_are_refused() -> None:
    prompts = models.prompts([5])
    with pytest.raises(SpeculationError, match="has no effect with speculation_type=None"):
        MODEL.generate(**prompts, speculation={"lenience": 0.5})
    with pytest.raises(SpeculationError, match="speculation_type"):
        MODEL.generate(**prompts, assistant_model=DRAFT, do_sample=True, speculation=WIDE)


def test_rules_are_saved_with_a_config() -> None:
    """A flag's rules stand beside the drafter's options, and a call's go before them."""
    prompts = models.prompts([9])
    config = compare.hf_specdec  # registers
    assert config
    from transformers import GenerationConfig

    flagged = GenerationConfig(max_new_tokens=8, do_sample=True, top_k=0, pad_token_id=0)
    flagged.speculation_type, flagged.speculation = "prompt_lookup", {"max_draft_tokens": 4, "sampling": "coupled"}
    torch.manual_seed(0)
    text = MODEL.generate(**prompts, generation_config=flagged)
    assert torch.equal(text, coupled(prompts, max_new_tokens=8))
    assert Rules.names() == ["verification", "sampling", "lenience", "forwards", "adapt"]


def test_coupled_takes_any_mask_and_a_continued_cache() -> None:
    """Boolean masks; and a second turn over a cache says what the whole text would have said."""
    from transformers import DynamicCache

    batch = models.prompts([9, 5])
    plain = coupled(batch)
    assert torch.equal(coupled(batch | {"attention_mask": batch["attention_mask"].bool()}), plain)
    ids = models.prompts([12])["input_ids"]
    whole = coupled({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    for only_new in (False, True):
        cache = DynamicCache(config=MODEL.config)
        with torch.no_grad():
            MODEL(ids[:, :7], past_key_values=cache)
        given = ids[:, 7:] if only_new else ids
        text = coupled({"input_ids": given, "attention_mask": torch.ones_like(ids)}, past_key_values=cache)
        assert torch.equal(text[:, given.shape[1] :], whole[:, 12:])


def test_greedy_calls_do_not_mind_that_sampling_is_coupled() -> None:
    prompts, options = models.prompts([9]), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = MODEL.generate(**prompts, **options)
    assert torch.equal(MODEL.generate(**prompts, **options, speculation=WIDE), plain)
    assert torch.equal(MODEL.generate(**prompts, **options, speculation=WIDE, use_cache=False), plain)
    beams = MODEL.generate(**prompts, **options, num_beams=3)
    assert torch.equal(MODEL.generate(**prompts, **options, num_beams=3, speculation=WIDE), beams)


def test_a_request_names_no_drafter_of_its_own() -> None:
    ids = models.prompts([5])["input_ids"]
    with BatchDecoder(MODEL, PromptLookupDrafter(), max_rows=1) as decoder:
        for bad in ({"speculation": {"max_draft_tokens": 3}}, {"speculation_type": "suffix"}):
            with pytest.raises(SpeculationError, match="a request may only set"):
                decoder.submit(ids, max_new_tokens=4, **bad)
