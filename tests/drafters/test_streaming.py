"""Speculative Streaming: the text is the target's, bit for bit; what is stored, and what is refused."""

import threading
import warnings
from typing import Any

import compare
import models
import pytest
import torch
import toy_drafters as drafters
from sampled_triples import FEWER, LEVEL, SETTINGS, VOCAB, joint, p_value, sample
from stream_models import BATCHES, GAMMA, TARGETS, WAYS, join, streams_of, target_of
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from hf_specdec import Drafter, SpeculationError, SpeculationWarning, StreamingDrafter
from hf_specdec.drafters.sources import Recycled
from hf_specdec.drafters.trees import TreeSession
from hf_specdec.protocol import Draft
from hf_specdec.tools.instruments.recording import Listening


@pytest.fixture(scope="module")
def target() -> Any:
    return target_of("Llama")


@pytest.fixture(params=[False, True], ids=["late", "joined"])
def joined(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Streams run behind the verdict, as on a CPU, or join the target's forwards."""
    if request.param:
        join(monkeypatch)
    return bool(request.param)


# ---------------------------------------------------------------------- the text is the target's


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in TARGETS for way in WAYS if name == "Llama" or way in ("by value", "pruned")],
)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.usefixtures("joined")
def test_greedy_text_is_plains(name: str, way: str, batch: str) -> None:
    model = target_of(name)
    drafter = streams_of(model, **WAYS[way])
    sides = compare.Sides(model, BATCHES[batch])
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeculationWarning)
        assert torch.equal(sides.ours(drafter), sides.plain)
    stats = drafter.last_stats
    assert stats is not None and stats.drafted_tokens > 0
    assert (way == "pruned") == any("pruned" in note for note in stats.notes)


class Own(LogitsProcessor):
    """A user's: decoding goes position by position."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores * 1.0


@pytest.mark.parametrize("threshold", [0.0, 0.003, 0.01, 0.05])
@pytest.mark.parametrize("lengths", [[9], [6, 6], [9, 5, 7]])
def test_rows_that_keep_different_nodes_under_a_processor_of_the_users(
    target: Any, lengths: list[int], threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An oracle's chains, pruned row by row as the streams' early exit likes."""
    sides = compare.Sides(target, lengths)
    future = drafters.Future(sides.plain)

    def propose(self: Any, sequences: Any, room: list[int]) -> Draft:
        return Draft.from_lists(future(sequences, room, 5))

    monkeypatch.setattr(TreeSession, "propose", propose)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeculationWarning)
        text = sides.run(
            assistant_model=streams_of(target, prune_below=threshold), logits_processor=LogitsProcessorList([Own()])
        )
    assert torch.equal(text, sides.plain)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.usefixtures("joined")
def test_stop_in_mid_draft(target: Any, batch: str) -> None:
    eos = compare.uneven_eos(target, [9, 5, 1, 7])
    sides = compare.Sides(target, BATCHES[batch], eos_token_id=eos, pad_token_id=0)
    assert torch.equal(sides.ours(streams_of(target)), sides.plain)


@pytest.mark.grid
@pytest.mark.parametrize("way", ["by value", "joined", "pruned"])
@pytest.mark.parametrize("settings", ["temperature", "penalties"])
def test_sampled_text_has_the_targets_distribution(settings: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "joined":
        join(monkeypatch)
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    small = models.llama(VOCAB, **size, **heads, pad_token_id=None, bos_token_id=None)
    small.get_output_embeddings().weight.data *= 0.5
    told, processors = SETTINGS[settings]
    drafter = streams_of(small, layers=1, num_nodes=8, prune_below=0.15 if way == "pruned" else 0.0)
    assert p_value(sample(small, drafter, FEWER, **told), joint(small, processors)) > LEVEL
    assert drafter.last_stats is not None and drafter.last_stats.accepted_tokens > FEWER / 10
    recycles = any("recycled" in names for names in drafter.last_stats.sources)
    assert recycles or settings == "penalties" or way == "joined"  # as on an accelerator


def test_the_target_is_the_same_before_while_and_after(target: Any) -> None:
    """Bit for bit: its weights, its hooks, and its logits, those too that another thread asks for meanwhile."""
    ids = models.prompts([9])
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    expected = target(**ids).logits
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules()]
    wrong: list[float] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            with torch.no_grad():
                wrong.append(float((target(**ids).logits - expected).abs().max()))

    other = threading.Thread(target=ask)
    other.start()
    for _ in range(3):
        target.generate(**ids, max_new_tokens=30, do_sample=False, assistant_model=streams_of(target))
    done.set()
    other.join()
    assert len(wrong) > 3 and not any(wrong)
    assert torch.equal(target(**ids).logits, expected)
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules()]


def test_copies_are_accepted_in_text_that_repeats_itself(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And count for nothing where they are switched off. No clock decides whether they are tried."""
    monkeypatch.setattr("hf_specdec.budget.account.GIVEN", 1 << 30)
    ids = models.prompts([9])["input_ids"].repeat(1, 4)
    call: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 60}
    call |= {"do_sample": False, "repetition_penalty": 0.5}  # it says again what it has said
    plain, accepted = target.generate(**call), {}
    for copies in (True, False):
        drafter = streams_of(target, copies=copies, num_nodes=8)
        assert torch.equal(target.generate(**call, assistant_model=drafter), plain)
        assert drafter.last_stats is not None
        accepted[copies] = drafter.last_stats.accepted_tokens
    assert accepted[True] > accepted[False] + 5


def test_more_is_accepted_where_candidates_are_recycled(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text stays. On an accelerator none are, as each round would wait for what streams say."""
    call = models.prompts([9, 5, 1, 7]) | {"max_new_tokens": 60, "do_sample": False}
    plain, accepted = target.generate(**call), {}
    for device in ("cpu", "forgetful", "accelerator"):
        with monkeypatch.context() as patch:
            if device == "forgetful":
                patch.setattr(Recycled, "observe", lambda *_: None)
            patch.setattr("hf_specdec.drafters.streaming.drafter.waits", lambda _, waits=device == "accelerator": waits)
            drafter = streams_of(target, num_nodes=8)
            assert torch.equal(target.generate(**call, assistant_model=drafter), plain)
        assert drafter.last_stats is not None
        accepted[device] = drafter.last_stats.accepted_tokens
        recycles = any("recycled" in names.split("+") for names in drafter.last_stats.sources)
        assert recycles == (device == "cpu")
    assert accepted["cpu"] > accepted["forgetful"]


# ---------------------------------------------------------------------- stored and refused


def test_a_folder_gives_the_same_streams(target: Any, tmp_path: Any) -> None:
    made = streams_of(target, known_tokens=10, acceptance=[[0.5, 0.1]] * GAMMA)
    made.streams.known.copy_(torch.arange(20, 30))
    made.save_pretrained(tmp_path, target=target)
    loaded = Drafter.from_pretrained(tmp_path, num_nodes=5)
    assert isinstance(loaded, StreamingDrafter) and loaded.config.num_nodes == 5
    for name, weight in loaded.weights().items():
        assert torch.equal(weight, made.weights()[name])
    sides = compare.Sides(target)
    assert torch.equal(sides.ours(loaded), sides.plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapted": {"mlp.up_proj": [32]}, "adapter_rank": 1}, "adapted must name linear layers"),
        ({"acceptance": [[0.5]]}, "acceptance must have 4 lists"),
        ({"acceptance": [[1.5]] * 4}, "acceptance must hold a list of shares"),
        ({"prune_below": 0.5}, "prune_below must be 0 for streams without a pruning map"),
        ({"num_nodes": 1000}, "num_nodes must be from 0 to 64"),
        ({"known_tokens": 3}, "num_candidates must be at most known_tokens=3, got 4"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpeculationError, match=message):
        StreamingDrafter(**options)


def test_whole_numbers_are_numbers(target: Any) -> None:
    assert streams_of(target, prune_below=0).config == streams_of(target, prune_below=0.0).config
    with pytest.raises(SpeculationError, match="prune_below"):
        streams_of(target, prune_below=10**400)
    with pytest.raises(SpeculationError, match="prune_below"):
        streams_of(target, prune_below=True)


def test_streams_that_were_never_trained_are_refused(target: Any) -> None:
    with pytest.raises(SpeculationError, match="needs trained streams; train them with `hf-specdec train streaming`"):
        target.generate(**models.prompts([5]), max_new_tokens=4, speculation_type="streaming")


def test_another_base_is_refused(target: Any) -> None:
    drafter = streams_of(target)
    call = {**models.prompts([5]), "max_new_tokens": 4}
    for other, message in (
        (models.llama(hidden_size=64, num_hidden_layers=3), "trained for hidden states of size 32"),
        (models.llama(intermediate_size=64, num_hidden_layers=3), "adapt a linear layer mlp"),
        (models.llama(num_hidden_layers=2), "num_layers must be below"),
        (models.build("GPT-2"), "GPT2LMHeadModel is built differently"),
        (models.build("GPT-NeoX"), "GPTNeoXForCausalLM is built differently"),
    ):
        with pytest.raises(SpeculationError, match=message):
            other.generate(**call, assistant_model=drafter)


class Watched(Listening):
    """Keeps what its session is told."""

    def start(self, context: Any) -> Any:
        session, self.verdicts = self.inner.start(context), []
        observe = session.observe
        session.observe = lambda verdict: (self.verdicts.append(verdict), observe(verdict))
        return session


def test_unlikely_nodes_leave_in_mid_forward(target: Any) -> None:
    watched = Watched(streams_of(target, num_nodes=20, prune_below=0.02, copies=False))
    sides = compare.Sides(target, [9])
    assert torch.equal(sides.ours(watched), sides.plain)
    trees = [verdict for verdict in watched.verdicts if verdict.nodes is not None]
    assert trees and any(len(verdict.nodes[0]) < verdict.draft.lengths[0] for verdict in trees)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_an_interrupt_behind_the_prompt_leaves_the_callers_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache was taken over, and the streams' own first run has not ended."""
    join(monkeypatch)
    target = target_of(name)
    drafter = streams_of(target, num_nodes=8)
    batch, options = models.prompts([9]), {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    cache, forwards = DynamicCache(config=target.config), []

    def interrupt(*_: Any) -> None:
        forwards.append(1)
        if len(forwards) == 2:
            raise KeyboardInterrupt

    hook = target.get_decoder().layers[-1].register_forward_hook(models.spy(interrupt))
    forwards += [0] * 1000
    target.generate(**batch, **options, assistant_model=drafter)  # the probe is over
    forwards.clear()
    with pytest.raises(KeyboardInterrupt):
        target.generate(**batch, **options, past_key_values=cache, assistant_model=drafter)
    hook.remove()
    assert cache.get_seq_length() == 9
    longer = torch.cat([batch["input_ids"], batch["input_ids"][:, -1:]], 1)
    more = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    plain = target.generate(**more, **options)
    assert torch.equal(target.generate(**more, **options, past_key_values=cache), plain)
