"""Encoder-decoders: T5, BART, Marian, Pegasus and Whisper say what they say without a drafter, in fewer calls."""

from typing import Any

import models
import pytest
import torch
import toy_drafters as drafters
import transformers as tf
from encoder_decoders import MAKES, VOCAB, WHISPER, build, inputs, near
from torch import Tensor

from hf_specdec import (
    BatchDecoder,
    DraftModelDrafter,
    HybridDrafter,
    PearlDrafter,
    PromptLookupDrafter,
    SpeculationError,
    SuffixDrafter,
)
from hf_specdec.target.probe import Support, support

TEXT = [name for name in MAKES if name not in ("Whisper", "Moonshine")]
BATCHES = pytest.mark.parametrize("rows", [1, 3])


def generate(model: Any, name: str, rows: int, drafter: Any = None, **options: Any) -> Any:
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": 1, "pad_token_id": 0} | options
    if name == "Whisper":  # its own `generate` wants a multilingual model's settings, or is told that it is none
        return tf.GenerationMixin.generate(model, **inputs(name, rows), assistant_model=drafter, **options)
    return model.generate(**inputs(name, rows), assistant_model=drafter, **options)


@pytest.mark.parametrize("name", MAKES)
def test_they_are_found_to_roll_back(name: str) -> None:
    assert support(build(name)) is Support.LOCKSTEP


@pytest.mark.grid
@BATCHES
@pytest.mark.parametrize("kind", ["noisy", "draft model", "lookup", "suffix", "hybrid"])
@pytest.mark.parametrize("name", MAKES)
def test_the_text_is_plain_decodings(name: str, kind: str, rows: int) -> None:
    model = build(name)
    plain = generate(model, name, rows)
    ends = {"eos_token_id": [1, int(plain[0, 6])]}
    for options in ({}, ends, {"max_new_tokens": 3}, {"repetition_penalty": 1.3}):
        wanted = generate(model, name, rows, **options)
        drafter = {
            "noisy": lambda wanted=wanted: drafters.noisy(drafters.Future(wanted), 4, VOCAB),
            "draft model": lambda: DraftModelDrafter(near(model, 0.003), num_draft_tokens=4),
            "lookup": lambda: PromptLookupDrafter(),
            "suffix": lambda: SuffixDrafter(),
            "hybrid": lambda: HybridDrafter(near(model, 0.003), num_draft_tokens=3),
        }[kind]()
        text = generate(model, name, rows, drafter, **options)
        assert torch.equal(text, wanted)
        assert drafter.last_stats.mode == ("lockstep" if rows == 1 else "staggered")
        if kind in ("noisy", "draft model") and not options and rows == 1:
            assert drafter.last_stats.target_calls < 20


@pytest.mark.parametrize("name", ["T5", "BART", "Whisper"])
def test_sampled_text_of_a_seed_is_the_same_with_coupled_sampling(name: str) -> None:
    model, texts = build(name), []
    for drafter in (None, DraftModelDrafter(near(model, 0.05), num_draft_tokens=3), PromptLookupDrafter()):
        torch.manual_seed(0)
        texts.append(generate(model, name, 2, drafter, do_sample=True, top_k=0, speculation={"sampling": "coupled"}))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


def test_sampled_tokens_have_the_targets_distribution() -> None:
    """The second token of 4,000 texts, by a chi-square test that finds Σ (p' - p)² / p = 0.03 with a power of 99%."""
    from scipy import stats

    model = build("BART")
    source = {k: v.expand(4000, -1) for k, v in inputs("BART", 1).items()}
    drafter = DraftModelDrafter(near(model, 0.3), num_draft_tokens=3)
    torch.manual_seed(0)
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": True, "top_k": 0, "temperature": 2.0}
    text = model.generate(**source, assistant_model=drafter, **options)
    first = int(text[:, 1].mode().values)
    mine = text[text[:, 1] == first, 2]
    with torch.no_grad():
        one = inputs("BART", 1)
        logits = model(**one, decoder_input_ids=torch.tensor([[2, first]])).logits[0, -1] / 2.0
    logits[1] = -torch.inf  # min_new_tokens
    p = logits.softmax(-1).double()
    counts = torch.bincount(mine, minlength=VOCAB).double()
    keep = p * len(mine) >= 5
    observed = [*counts[keep].tolist(), float(counts[~keep].sum())]
    expected = [*(p[keep] * len(mine)).tolist(), float((p[~keep] * len(mine)).sum())]
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > 1e-4


@pytest.mark.usefixtures("width_costs_nothing")
def test_what_the_encoder_read_is_copied() -> None:
    """A target that repeats its source: an oracle's text is in the source, and lookup finds it there."""
    model = build("T5")
    plain = generate(model, "T5", 1)[0, 1:]
    assert len(set(plain.tolist())) > 8, "a text that does not copy itself"
    source = {"input_ids": inputs("T5", 1)["input_ids"]}

    class Said(PromptLookupDrafter):
        def start(self, context: Any) -> Any:
            context.source["input_ids"] = plain[None]  # as if the source had been what is said
            context.source["attention_mask"] = None
            return super().start(context)

    found = {}
    for drafter in (Said(), PromptLookupDrafter()):
        text = model.generate(**source, assistant_model=drafter, max_new_tokens=24, do_sample=False)
        assert torch.equal(text[0, 1:], plain[: text.shape[1] - 1])
        found[type(drafter).__name__] = drafter.last_stats.target_calls
    assert found["Said"] < found["PromptLookupDrafter"]


@BATCHES
def test_scores_and_streamers_are_plain_decodings(rows: int) -> None:
    model = build("BART")
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain = generate(model, "BART", rows, **asked)
    ours = generate(model, "BART", rows, DraftModelDrafter(near(model, 0.003)), **asked)
    assert type(ours) is type(plain)
    assert torch.equal(ours.sequences, plain.sequences)
    for name in ("scores", "logits"):
        for mine, theirs in zip(getattr(ours, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    heard: list[int] = []

    class Streamer:
        def put(self, tokens: Tensor) -> None:
            heard.extend(tokens.flatten().tolist())

        def end(self) -> None:
            heard.append(-1)

    if rows == 1:
        generate(model, "BART", 1, DraftModelDrafter(near(model, 0.003)), streamer=Streamer())
        assert heard == [*plain.sequences[0].tolist(), -1]


def whisper() -> Any:
    """With what its own `generate` asks of its settings."""
    model = build("Whisper")
    config = model.generation_config
    config.is_multilingual, config.no_timestamps_token_id, config.max_initial_timestamp_index = False, 58, 1
    config.begin_suppress_tokens, config.suppress_tokens, config.decoder_start_token_id = [5, 7], [], 2
    config.eos_token_id, config.pad_token_id, config.return_timestamps = 1, 0, False
    return model


@pytest.mark.parametrize("rows", [1, 2])
def test_whispers_long_form(rows: int) -> None:
    """Segment by segment, of which a batch's rows have different numbers. Tokens from 51 on are timestamps."""
    model = whisper()
    model.generation_config.no_timestamps_token_id = 50
    generator = torch.Generator().manual_seed(0)
    features, mask = torch.randn(rows, 8, 130, generator=generator), torch.ones(rows, 130, dtype=torch.long)
    mask[1:, 70:] = 0
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "return_timestamps": True}
    options |= {"input_features": features, "attention_mask": mask, "return_segments": True, "temperature": 0.0}
    plain = model.generate(**options)
    assert len(plain["segments"][0]) > 2
    drafter = DraftModelDrafter(near(model, 0.003), num_draft_tokens=4)
    for told in ({"assistant_model": drafter}, {"speculation_type": "prompt_lookup"}):
        ours = model.generate(**options, **told)
        assert torch.equal(ours["sequences"], plain["sequences"])
        assert [len(row) for row in ours["segments"]] == [len(row) for row in plain["segments"]]
    assert drafter.last_stats is not None and drafter.last_stats.accepted_tokens > 0


def test_whispers_own_generate() -> None:
    """Short form, through its own processing of audio, with the flag and with a drafter."""
    model = whisper()
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    for rows in (1, 3):
        plain = model.generate(**inputs("Whisper", rows), **options)
        flagged = model.generate(**inputs("Whisper", rows), **options, speculation_type="prompt_lookup")
        assert torch.equal(flagged, plain)
        drafter = DraftModelDrafter(near(model, 0.003), num_draft_tokens=4)
        text = model.generate(**inputs("Whisper", rows), **options, assistant_model=drafter)
        assert torch.equal(text, plain)
        assert drafter.last_stats.target_calls < 20


def test_a_decoder_alone_shares_the_targets_encoder() -> None:
    """The way of distilled Whispers."""
    model = build("Whisper")
    draft = tf.WhisperForCausalLM(tf.WhisperConfig(**WHISPER)).eval()
    draft.model.decoder.load_state_dict(model.model.decoder.state_dict())
    draft.proj_out.weight = model.proj_out.weight
    drafter = DraftModelDrafter(draft, num_draft_tokens=4)
    for rows in (1, 3):
        assert torch.equal(generate(model, "Whisper", rows, drafter), generate(model, "Whisper", rows))
        assert drafter.last_stats.target_calls < 12


def test_what_does_not_fit_is_refused() -> None:
    model, decoder = build("T5"), models.llama(vocab=VOCAB)
    with pytest.raises(SpeculationError, match="is an encoder-decoder, and draft_model LlamaForCausalLM is not"):
        generate(model, "T5", 1, DraftModelDrafter(decoder))
    with pytest.raises(SpeculationError, match="decoder-only target"):
        decoder.generate(**models.prompts([5], VOCAB), assistant_model=DraftModelDrafter(model))
    with pytest.raises(SpeculationError, match="reads input_features"):
        generate(build("Whisper"), "Whisper", 1, DraftModelDrafter(model))
    with pytest.raises(SpeculationError, match="PEARL"):
        generate(model, "T5", 1, PearlDrafter(near(model, 0.003), worker="thread"))
    with pytest.raises(SpeculationError, match="different lengths"):
        BatchDecoder(model, None, max_rows=2)
