"""The seam for drafters inside the target: whole small drafters over the grid, and each promise by itself."""

import warnings
from typing import Any

import compare
import models
import pytest
import torch
import toy_drafters as drafters
from sampled_triples import FEWER, LEVEL, SETTINGS, VOCAB, joint, p_value, sample
from seam import HeadDrafter, StreamDrafter, StreamRunner, StreamSession
from torch import Tensor
from transformers.generation import LogitsProcessor, StoppingCriteria

from hf_specdec import SpeculationWarning
from hf_specdec.drafters import Draft, Drafter, DraftSession
from hf_specdec.protocol import Forward

MAKES: dict[str, Any] = {"head": HeadDrafter, "stream": StreamDrafter}
BATCHES = {"one row": [9], "four uneven rows": [9, 5, 1, 7]}


class EveryThird(LogitsProcessor):
    """A user's own: it must see exactly plain decoding's calls."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(1, -1) if ids.shape[1] % 3 == 0 else scores


class Enough(StoppingCriteria):
    """Stops rows by their own text."""

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return (ids[:, -2:].sum(1) % 11 == 0) & (ids.shape[1] > 14)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "processor": {"logits_processor": lambda: [EveryThird()]},
    "criterion": {"stopping_criteria": lambda: [Enough()], "eos_token_id": 5},
    "step outputs": {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return models.llama(num_hidden_layers=3)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", MAKES)
def test_greedy_text_is_plains(model: Any, kind: str, batch: str, call: str) -> None:
    sides = compare.Sides(model, BATCHES[batch], **CALLS[call])
    drafter = MAKES[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeculationWarning)
        if kind == "stream" and call == "step outputs":
            warnings.simplefilter("ignore", SpeculationWarning)  # its runner has no place there
        got = sides.ours(drafter)
    assert torch.equal(compare.sequences_of(got), compare.sequences_of(sides.plain))
    assert drafter.last_stats.drafted_tokens > 0 or (kind, call) == ("stream", "step outputs")
    if call == "step outputs":
        compare.same_states(got.scores, sides.plain.scores)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", MAKES)
def test_stop_in_mid_draft(model: Any, kind: str, batch: str) -> None:
    sides = compare.Sides(model, BATCHES[batch], eos_token_id=compare.uneven_eos(model, [9, 5, 1, 7]), pad_token_id=0)
    assert torch.equal(sides.ours(MAKES[kind]()), sides.plain)


class Heard:
    """A streamer of token ids."""

    def __init__(self) -> None:
        self.put_: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.put_.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("kind", MAKES)
def test_a_streamer_hears_what_plain_decoding_says(model: Any, kind: str) -> None:
    plain, ours = Heard(), Heard()
    sides = compare.Sides(model, [9])
    sides.run(streamer=plain)
    assert torch.equal(sides.run(streamer=ours, assistant_model=MAKES[kind]()), sides.plain)
    assert (ours.put_, ours.ended) == (plain.put_, plain.ended)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", MAKES)
def test_a_cache_goes_on(model: Any, kind: str, batch: str) -> None:
    """Two calls over one cache, as in a chat; each side with its own."""

    def chat(drafter: Drafter | None) -> tuple[Tensor, int]:
        options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
        inputs = models.prompts(BATCHES[batch])
        first = model.generate(**inputs, **options, assistant_model=drafter)
        more = torch.cat([first.sequences, first.sequences[:, :3]], 1)
        mask = torch.cat(
            [inputs["attention_mask"], torch.ones(len(more), more.shape[1] - inputs["input_ids"].shape[1])], 1
        )
        cache = first.past_key_values
        second = model.generate(
            more, attention_mask=mask.long(), **options, past_key_values=cache, assistant_model=drafter
        )
        return second.sequences, second.past_key_values.get_seq_length()

    mine, plain = chat(MAKES[kind]()), chat(None)
    assert torch.equal(mine[0], plain[0]) and mine[1] == plain[1]


@pytest.fixture(scope="module")
def small() -> Any:
    return models.small(VOCAB, layers=2)


@pytest.mark.grid
@pytest.mark.parametrize("settings", ["temperature", "penalties"])
@pytest.mark.parametrize("kind", MAKES)
def test_sampled_text_has_the_targets_distribution(small: Any, kind: str, settings: str) -> None:
    told, processors = SETTINGS[settings]
    counts = sample(small, MAKES[kind](), FEWER, **told)
    assert p_value(counts, joint(small, processors)) > LEVEL


# ---------------------------------------------------------------------- what an own runner may not do


def loud(drafter: Drafter, model: Any, batch: str, **settings: Any) -> tuple[Tensor, Tensor, list[str]]:
    sides = compare.Sides(model, BATCHES[batch], **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text = sides.ours(drafter)
    said = [str(w.message) for w in caught if issubclass(w.category, SpeculationWarning)]
    return compare.sequences_of(text), compare.sequences_of(sides.plain), said


class Spoiling(StreamRunner):
    """Changes the target's logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Forward:
        answer = super().forward(*args, **kwargs)
        answer.logits = answer.logits.roll(1, -1)
        return answer


def made_with(runner_class: Any) -> StreamDrafter:
    class Session(StreamSession):
        def runner(self, runner: Any) -> Any:
            return runner_class(runner, self, first=1)

    drafter = StreamDrafter()
    drafter.start = lambda context: Session(context)  # type: ignore[method-assign]
    return drafter


@pytest.mark.parametrize("batch", BATCHES)
def test_a_runner_that_changes_the_logits_is_found_out(model: Any, batch: str) -> None:
    text, plain, said = loud(made_with(Spoiling), model, batch)
    assert torch.equal(text, plain) and len(said) == 1 and "changes the target's logits" in said[0]


@pytest.mark.grid(pairs=True)
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("method", ["prefill", "forward", "truncate", "keep", "retire"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_runner_that_raises_is_left_behind(model: Any, method: str, when: str, batch: str, keeps: bool) -> None:
    calls, failed = [0], [False]

    def planted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        fails = calls[0] > (4 if method in ("forward", "truncate") else 1 if method == "keep" else 0)
        failed[0] |= fails
        if fails and when == "before":
            raise RuntimeError("planted")
        answer = (
            getattr(StreamRunner, method)(self, *args, **kwargs)
            if method in vars(StreamRunner)
            else (getattr(self.engine, method)(*args, **kwargs))
        )
        if fails:
            raise RuntimeError("planted")
        return answer

    drafter = made_with(type("Failing", (StreamRunner,), {method: planted}))
    eos = compare.uneven_eos(model, [9, 5, 1, 7])
    made = made_with(StreamRunner)
    made.start, drafter.start = drafter.start, made.start  # the probe sees a sound one
    loud(drafter, model, batch)
    drafter.start = made.start
    calls[0], failed[0] = 0, False
    text, plain, said = loud(drafter, model, batch, eos_token_id=eos, pad_token_id=0, return_dict_in_generate=keeps)
    assert torch.equal(text, plain)
    assert len(said) == failed[0] and all("planted" in s for s in said)


def test_a_runner_that_was_left_behind_costs_no_forward_more(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the round in which it failed: what that has added is computed once more."""
    failing, forwards = [False], [0]

    def truncate(self: Any, lengths: list[int]) -> None:
        if failing[0]:
            raise RuntimeError("planted")
        self.engine.cache.set_lengths(lengths)

    def counted(*args: Any, **kwargs: Any) -> Any:
        forwards[0] += 1
        return forward(*args, **kwargs)

    forward = model.forward
    for fails in (False, True):
        failing[0], drafter = False, made_with(type("Failing", (StreamRunner,), {"truncate": truncate}))
        monkeypatch.setattr(model, "forward", counted)
        loud(drafter, model, "one row")  # the probe is over
        failing[0] = fails
        sides = compare.Sides(model, [9])
        forwards[0] = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SpeculationWarning)
            assert torch.equal(sides.ours(drafter), sides.plain)
        monkeypatch.undo()
        assert forwards[0] <= compare.NEW + fails


@pytest.mark.parametrize("features", [(99,), ("last",), (True,)])
def test_features_that_are_not_there(model: Any, features: Any) -> None:
    drafter = HeadDrafter()
    start = drafter.start

    def wishing(context: Any) -> DraftSession:
        session = start(context)
        session.features = features
        return session

    drafter.start = wishing  # type: ignore[method-assign]
    text, plain, said = loud(drafter, model, "one row")
    assert torch.equal(text, plain) and len(said) == 1 and "features" in said[0]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("lockstep", [False, True])
def test_features_lie_where_tokens_were_decided(model: Any, batch: str, lockstep: bool) -> None:
    """The head on a feature is what the target said there."""
    sides = compare.Sides(model, BATCHES[batch])
    seen: list[int] = []

    class Reading(drafters.ToySession):
        features = (-1, 0)

        def observe(self, verdict: Any) -> None:
            head = self.context.target.get_output_embeddings()
            for b, tokens in enumerate(verdict.tokens):
                states = verdict.features[-1][b, : len(tokens)]
                assert head(states).argmax(-1).tolist() == tokens
                seen.extend(tokens)

        observe_prompt = None

    def read_prompt(self: Any, verdict: Any) -> None:
        assert verdict.features[0].shape[:2] == self.context.prompt_ids.shape
        head = self.context.target.get_output_embeddings()
        assert head(verdict.features[-1][:, -1]).argmax(-1).tolist() == [tokens[0] for tokens in verdict.tokens]

    Reading.observe_prompt = read_prompt  # type: ignore[assignment]
    future = drafters.Future(sides.plain)
    toy = (drafters.noisy if lockstep else drafters.bushy)(future, 4, model.config.vocab_size)
    toy.session_class = Reading
    streamer = {"streamer": Heard()} if lockstep else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeculationWarning)
        assert torch.equal(sides.run(assistant_model=toy, **streamer), sides.plain)
    assert len(seen) >= compare.NEW - 1


def test_a_draft_of_nothing_asks_for_no_hidden_states(model: Any) -> None:
    asked = []
    forward = model.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        asked.append(bool(kwargs.get("output_hidden_states")))
        return forward(*args, **kwargs)

    sides = compare.Sides(model)
    model.forward = spy
    try:
        sides.ours()
        assert not any(asked)
        asked.clear()
        sides.ours(HeadDrafter())
        assert all(asked[-5:])
    finally:
        del model.forward


def test_a_draft_for_a_node_that_was_pruned_is_tested_all_the_same() -> None:
    """Accepted, it ends the row's text; there is nothing to draw another token from."""
    from hf_specdec.protocol import Forward, Sequences
    from hf_specdec.stats import SpeculationStats
    from hf_specdec.verify.judging import Judge
    from hf_specdec.verify.processing import Processing
    from hf_specdec.verify.randomness import Randomness
    from hf_specdec.verify.trial import Trial

    judge = Judge(Processing([]), None, False, Randomness(0), SpeculationStats())
    draft = Draft(torch.tensor([[1, 2, 3]] * 3), [3] * 3, [[-1, -1, 1]] * 3)
    said = torch.tensor([[1, 0], [2, 3], [4, 0]])  # after the root, and after node 1
    logits = torch.nn.functional.one_hot(said, 5).float()
    sequences = Sequences(torch.zeros(3, 8, dtype=torch.long), [2] * 3, [0, 1, 2], [[0, 0]] * 3)
    results = judge.verify(Trial(draft, Forward(logits, torch.tensor([[1]] * 3)), sequences))
    assert [(result.path, result.tokens) for result in results] == [([0], [1]), ([1, 2], [2, 3]), ([], [4])]


def test_the_root_of_a_sampled_tree_is_tested_by_its_own_logits() -> None:
    """Where rows were pruned unevenly, -1 fills the shorter ones: it is no node, and not the root."""
    from hf_specdec.protocol import Forward, Sequences
    from hf_specdec.stats import SpeculationStats
    from hf_specdec.verify.judging import Judge
    from hf_specdec.verify.processing import Processing
    from hf_specdec.verify.randomness import Randomness
    from hf_specdec.verify.trial import Trial

    judge = Judge(Processing([]), None, True, Randomness(0), SpeculationStats())
    tokens = torch.tensor([[1, 2, 3]] * 2)
    draft = Draft(tokens, [3] * 2, [[-1, -1, 1]] * 2, q=torch.nn.functional.one_hot(tokens, 5).float())
    draft.token_probs = torch.ones(2, 3)
    said = torch.tensor([[2, 3, 0], [2, 0, 3]])  # after the root, and after the nodes that are left
    sequences = Sequences(torch.zeros(2, 8, dtype=torch.long), [2] * 2, [0, 1], [[0, 0]] * 2)
    logits = 1e4 * torch.nn.functional.one_hot(said, 5).float()
    results = judge.verify(Trial(draft, Forward(logits, torch.tensor([[1, -1], [0, 1]])), sequences))
    assert [(result.path, result.tokens) for result in results] == [([1, 2], [2, 3])] * 2
