"""Speculative Streaming: the paper's equations against brute force, and the target left alone, bit for bit."""

import math
import threading
import warnings
from typing import Any

import compare
import drafters
import models
import pytest
import torch
from test_distribution import FEWER, LEVEL, SETTINGS, VOCAB, joint, p_value, sample
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from hf_specdec import Drafter, SpeculationError, SpeculationWarning, StreamingDrafter
from hf_specdec.drafters.streaming import (
    StreamingSession,
    Streams,
    Upper,
    likeliest_nodes,
    product_tree,
    with_streams,
)
from hf_specdec.drafters.streaming.runner import StreamRunner, early_chances
from hf_specdec.drafters.streaming.tree import joined, level_by_level
from hf_specdec.drafters.streaming.tuner import TreeTuner
from hf_specdec.instruments.recording import RecordingDrafter
from hf_specdec.protocol import Draft, Verdict
from hf_specdec.target.ragged import RaggedRunner

GAMMA = 3
TARGETS = ["Llama", "Qwen2", "Qwen3", "Phi", "OPT", "Mistral", "Qwen2 sliding", "Gemma2"]
BATCHES = {"one row": [9], "four uneven rows": [9, 5, 1, 7]}
WAYS: dict[str, dict[str, Any]] = {
    "by value": {"copies": False},
    "with copies": {},
    "full product": {"tree": "product"},
    "pruned": {"prune_below": 0.02, "num_nodes": 20},
    "rotated": {"rotation": 0.05},
}


def target_of(name: str, layers: int = 3) -> Any:
    config = models.ARCHITECTURES[name]()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * layers)[:layers]
    return models.from_config(config, "eager" if name == "Gemma2" else "sdpa")


def streams_of(target: Any, layers: int = 2, seed: int = 0, **options: Any) -> StreamingDrafter:
    """Random ones, which matter: whatever they did to the main stream would show."""
    adapted = {
        name: [linear.in_features, linear.out_features]
        for name, linear in Upper(target, layers).layers[0].named_modules()
        if isinstance(linear, torch.nn.Linear)
    }
    sizes = {"num_streams": GAMMA, "num_candidates": 3, "adapter_rank": 2, "map_rank": 2, "prune_rank": 2}
    made = StreamingDrafter(
        num_layers=layers, hidden_size=target.config.hidden_size, adapted=adapted, **sizes | options
    )
    generator = torch.Generator().manual_seed(seed)
    for weight in made.streams.parameters():
        weight.normal_(0, 0.3, generator=generator)
    made.trained = True
    return made


@pytest.fixture(scope="module")
def target() -> Any:
    return target_of("Llama")


# ---------------------------------------------------------------------- the text is the target's


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in TARGETS for way in WAYS if name == "Llama" or way in ("by value", "pruned")],
)
@pytest.mark.parametrize("batch", BATCHES)
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

    def propose(self: Any, sequences: Any, budget: list[int]) -> Draft:
        return Draft.from_lists(future(sequences, budget, 5))

    monkeypatch.setattr(StreamingSession, "propose", propose)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeculationWarning)
        text = sides.run(
            assistant_model=streams_of(target, prune_below=threshold), logits_processor=LogitsProcessorList([Own()])
        )
    assert torch.equal(text, sides.plain)


@pytest.mark.parametrize("batch", BATCHES)
def test_stop_in_mid_draft(target: Any, batch: str) -> None:
    eos = compare.uneven_eos(target, [9, 5, 1, 7])
    sides = compare.Sides(target, BATCHES[batch], eos_token_id=eos, pad_token_id=0)
    assert torch.equal(sides.ours(streams_of(target)), sides.plain)


@pytest.mark.parametrize("way", ["by value", "pruned"])
@pytest.mark.parametrize("settings", ["temperature", "penalties"])
def test_sampled_text_has_the_targets_distribution(settings: str, way: str) -> None:
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    small = models.llama(VOCAB, **size, **heads, pad_token_id=None, bos_token_id=None)
    small.get_output_embeddings().weight.data *= 0.5
    told, processors = SETTINGS[settings]
    options = {"prune_below": 0.15, "num_nodes": 8} if way == "pruned" else {}
    counts = sample(small, streams_of(small, layers=1, **options), FEWER, **told)
    assert p_value(counts, joint(small, processors)) > LEVEL


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


# ---------------------------------------------------------------------- equations


def chains(n: int) -> tuple[Tensor, Tensor]:
    return torch.ones(1, n, n, dtype=torch.bool).tril(), torch.arange(n)[None]


@pytest.mark.parametrize("some", [False, True])
def test_who_sees_whom(some: bool) -> None:
    """Eq. 1 and 2, place by place."""
    parents = [-1, 0, 0, 1, 1, 2]
    above = [[i] for i in range(6)]
    for i, parent in enumerate(parents):
        above[i] += above[parent] if parent >= 0 else []
    seen = torch.tensor([[[j in above[i] for j in range(6)] for i in range(6)]])
    depth = torch.tensor([[len(path) - 1 for path in above]])
    at = [[0, 4], [5, 5]] if some else [list(range(6))] * 2
    wide, deep = with_streams(seen, depth, GAMMA, torch.tensor(at) if some else None)
    for b, places in enumerate(at):
        b = min(b, len(wide) - 1)
        assert wide[b, :6, :6].equal(seen[0]) and not wide[b, :6, 6:].any()
        for a, place in enumerate(places):
            for j in range(GAMMA):
                row = 6 + a * GAMMA + j
                own = {6 + a * GAMMA + i for i in range(j + 1)}
                assert set(wide[b, row].nonzero().flatten().tolist()) == set(above[place]) | own
                assert deep[b, row] == depth[0, place] + j + 1


def test_how_streams_begin(target: Any) -> None:
    """Eq. 3: S_tj = f_η(M_t) + P_j, f_η the identity and a map of rank η."""
    streams = streams_of(target).streams.float()
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    begun = streams.begin(states)
    assert streams.map is not None and begun.shape == (2, 5 * GAMMA, 32)
    whole = torch.eye(32) + streams.map.up.weight @ streams.map.down.weight
    for t in range(5):
        for j in range(GAMMA):
            expected = states[:, t] @ whole.T + streams.embeddings[j]
            torch.testing.assert_close(begun[:, t * GAMMA + j], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "Phi", "OPT", "Qwen3"])
def test_streams_of_a_tree_are_those_of_each_path_by_itself(name: str) -> None:
    """Against a dense mask: the main stream's path as a plain text, the streams of its last token behind it."""
    model = target_of(name)
    drafter = streams_of(model)
    upper = Upper(model, 2)
    streams = drafter.fitted(model, upper)
    inputs = models.prompts([9, 5])
    kwargs: dict[str, Any] = {"attention_mask": inputs["attention_mask"], "use_cache": True}
    kwargs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    kwargs["past_key_values"] = DynamicCache(config=model.config)
    with torch.no_grad():
        runner = StreamRunner(RaggedRunner(model, kwargs, inputs["input_ids"]), streams, upper)
        runner.prefill()
        assert runner.states is not None
        for b, n in enumerate([9, 5]):
            text = inputs["input_ids"][b, 9 - n :].tolist()
            expected = alone(model, upper, streams, text)
            torch.testing.assert_close(runner.states[b, 0], expected, rtol=1e-3, atol=1e-3)
        tokens, parents = torch.tensor([[3, 5, 8, 9, 2], [4, 4, 7, 1, 6]]), [[-1, 0, 0, 1, 2]] * 2
        answer = runner.forward(tokens, parents)
        for b, n in enumerate([9, 5]):
            for node in range(5):
                path, at = [], node
                while at >= 0:
                    path, at = [int(tokens[b, at]), *path], parents[b][at]
                text = inputs["input_ids"][b, 9 - n :].tolist() + path
                expected = alone(model, upper, streams, text)
                torch.testing.assert_close(runner.states[b, node], expected, rtol=1e-3, atol=1e-3)
                said = model(torch.tensor([text])).logits[0, -1]
                torch.testing.assert_close(answer.logits[b, node], said, rtol=1e-3, atol=1e-3)


def alone(model: Any, upper: Upper, streams: Streams, text: list[int]) -> Tensor:
    """[γ, H] the streams behind a text's last token, by a causal forward over all of it."""
    entered: list[Tensor] = []
    with upper.entering(entered.append):
        model(torch.tensor([text]))
    whole = torch.cat([entered[0], streams.begin(entered[0][:, -1:])], 1)
    n = whole.shape[1]
    mask = torch.full((1, 1, n, n), torch.finfo(torch.float32).min).triu(1)
    with streams.beside(upper, len(text), n):
        return upper.run(whole, mask, torch.arange(n)[None])[0, len(text) :]


def test_no_stream_reaches_the_main_stream(target: Any) -> None:
    """Neither in value nor in gradient."""
    drafter, upper = streams_of(target), Upper(target, 2)
    streams = drafter.streams.float().requires_grad_()
    states = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
    seen, depth = with_streams(*chains(6), GAMMA)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
    outs = []
    for shift in (0.0, 5.0):
        with streams.beside(upper, 6, 6 + 6 * GAMMA):
            outs.append(upper.run(torch.cat([states, streams.begin(states) + shift], 1), mask, depth))
    assert torch.equal(outs[0][:, :6], outs[1][:, :6]) and not torch.allclose(outs[0][:, 6:], outs[1][:, 6:])
    grads = torch.autograd.grad(outs[0][:, :6].square().sum(), list(streams.parameters()), allow_unused=True)
    assert all(grad is None or not grad.any() for grad in grads)


def test_values_are_rotated_as_complex_numbers(target: Any) -> None:
    """Eq. 7: stream n's values are the main stream's, turned by e^(iεn), where nothing else tells them apart."""
    step = 0.3
    drafter = streams_of(target, rotation=step, adapter_rank=0, map_rank=0)
    upper, size = Upper(target, 2), 8
    linear = upper.layers[0].self_attn.v_proj
    x = torch.randn(1, 2 + 2 * GAMMA, 32)
    plain = linear(x)
    with drafter.streams.float().beside(upper, 2, x.shape[1]):
        turned = linear(x)
    assert torch.equal(turned[:, :2], plain[:, :2])
    as_complex = [
        torch.view_as_complex(t[:, 2:].unflatten(-1, (-1, size // 2, 2)).contiguous()) for t in (plain, turned)
    ]
    n = torch.tensor([j % GAMMA + 1 for j in range(2 * GAMMA)])
    expected = as_complex[0] * torch.exp(1j * step * n)[None, :, None, None]
    torch.testing.assert_close(as_complex[1], expected)


def test_pruning_is_by_the_early_exits_own_softmax(target: Any) -> None:
    """§3.2.3: z = H(o_θ(M)), by hand; and what goes is what is below the threshold, with all behind it."""
    drafter, upper = streams_of(target, prune_below=0.01), Upper(target, 2)
    streams = drafter.fitted(target, upper)
    tokens, parents = torch.tensor([[3, 5, 8, 9, 2, 7]]), [-1, 0, 0, 1, 2, 3]
    states = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
    above = [[i] for i in range(6)]
    for i, parent in enumerate(parents):
        above[i] += above[parent] if parent >= 0 else []
    seen = torch.tensor([[[j in above[i] for j in range(6)] for i in range(6)]])
    chances = early_chances(streams, upper, states, tokens, seen)
    assert streams.pruning is not None and chances[0, 0] == 1
    for i in range(1, 6):
        m = states[0, parents[i]]
        m = m + streams.pruning.up.weight @ (streams.pruning.down.weight @ m)
        p = target.lm_head(target.model.norm(m)).softmax(-1)
        torch.testing.assert_close(chances[0, i], p[tokens[0, i]], rtol=1e-4, atol=1e-7)


def test_the_full_product_has_as_many_nodes_as_the_paper_says() -> None:
    for gamma in range(1, 5):
        for k in range(1, 5):
            nodes = product_tree(gamma, k)
            assert 1 + len(nodes) == 1 + sum(k**g for g in range(1, gamma + 1))
            assert all(node.parent < i for i, node in enumerate(nodes))
            assert all(node.stream == (nodes[node.parent].stream + 1 if node.parent >= 0 else 0) for node in nodes)


def test_parameters_are_as_many_as_the_paper_says(target: Any) -> None:
    """γ h and the maps'; adapters beside."""
    size = target.config.hidden_size
    for eta, theta in ((0, 0), (4, 0), (4, 2)):
        made = streams_of(target, map_rank=eta, prune_rank=theta, adapter_rank=0)
        assert sum(w.numel() for w in made.streams.parameters()) == GAMMA * size + 2 * (eta + theta) * size


# ---------------------------------------------------------------------- the tree by value


def test_the_likeliest_nodes_are_the_likeliest() -> None:
    """Against all nodes of the product, sorted by the product of their chances."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        chances = torch.rand(3, 3, generator=generator).div(3).tolist()
        nodes = product_tree(3, 3)
        value: list[float] = []
        for node in nodes:
            value.append(chances[node.stream][node.rank] * (value[node.parent] if node.parent >= 0 else 1.0))
        found = likeliest_nodes(chances, 12)
        assert [round(v, 12) for v, _ in found] == [round(v, 12) for v in sorted(value, reverse=True)[:12]]
        tree = level_by_level([node for _, node in found])
        assert all(node.parent < i for i, node in enumerate(tree))
        assert sorted(node.stream for node in tree) == [node.stream for node in tree]
        paths = {tuple(path(tree, i)) for i in range(12)}
        assert paths == {tuple(path([n for _, n in found], i)) for i in range(12)}


def test_streams_make_a_tree_that_copies_can_join() -> None:
    """Each node once, with the chance that the streams give it."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        chances = torch.rand(3, 3, generator=generator).div(3).tolist()
        likeliest = likeliest_nodes(chances, 15)
        tokens = torch.randperm(9, generator=generator).view(3, 3).tolist()
        tree = joined(likeliest, tokens, [[7, 8, 9]] * 3)
        assert tree.survival() == pytest.approx([chance for chance, _ in likeliest])
        assert tree.kinds == [(node, ("stream", node.stream, 7 + node.rank)) for _, node in likeliest]
        assert tree.tokens == [tokens[node.stream][node.rank] for _, node in likeliest]


def test_copies_are_accepted_in_text_that_repeats_itself(target: Any) -> None:
    """And count for nothing where they are switched off."""
    ids = models.prompts([9])["input_ids"].repeat(1, 4)
    call: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 60}
    call |= {"do_sample": False, "repetition_penalty": 0.5}  # it says again what it has said
    plain, accepted = target.generate(**call), {}
    for copies in (True, False):
        drafter = streams_of(target, copies=copies)
        assert torch.equal(target.generate(**call, assistant_model=drafter), plain)
        assert drafter.last_stats is not None
        accepted[copies] = drafter.last_stats.accepted_tokens
    assert accepted[True] > accepted[False] + 5


def path(nodes: Any, i: int) -> list[int]:
    ranks: list[int] = []
    while i >= 0:
        ranks, i = [nodes[i].rank, *ranks], nodes[i].parent
    return ranks


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
        ({"prune_below": 0.5}, "without a pruning map take 0 only"),
        ({"num_nodes": 1000}, "num_nodes must be from 0 to 64"),
        ({"tree": "product", "num_candidates": 16}, "make more than 4096 nodes; set num_candidates lower"),
        ({"known_tokens": 3}, "num_candidates must be at most known_tokens=3, got 4"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpeculationError, match=message):
        StreamingDrafter(**options)


def test_streams_that_were_never_trained_are_refused(target: Any) -> None:
    with pytest.raises(SpeculationError, match="has no trained streams; train them with `hf-specdec train streaming`"):
        target.generate(**models.prompts([5]), max_new_tokens=4, speculation_type="streaming")


def test_another_base_is_refused(target: Any) -> None:
    drafter = streams_of(target)
    call = {**models.prompts([5]), "max_new_tokens": 4}
    for other, message in (
        (models.llama(hidden_size=64, num_hidden_layers=3), "trained for states of 32 units"),
        (models.llama(intermediate_size=64, num_hidden_layers=3), "adapt a linear layer mlp"),
        (models.llama(num_hidden_layers=2), "num_layers must be below"),
        (models.build("GPT-2"), "GPT2LMHeadModel is built otherwise"),
    ):
        with pytest.raises(SpeculationError, match=message):
            other.generate(**call, assistant_model=drafter)


def test_a_chance_is_learned_from_what_is_accepted(target: Any) -> None:
    """An oracle of two ranks: the tuner's figures go to what is true."""
    tuner = TreeTuner(StreamingDrafter(num_streams=2, num_candidates=2, tree="product").config, do_sample=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(600):
        nodes = tuner.tree(True)
        first = int(torch.rand((), generator=generator) < 0.3)  # rank 0 is right 70% of the time, rank 1 otherwise
        draft = Draft(torch.zeros(1, len(nodes), dtype=torch.long), [len(nodes)], [[n.parent for n in nodes]])
        verdict = Verdict([0], [2], [1], [[0, 0]], [False], 7, 1.0, draft=draft, paths=[[first]])
        tuner.observe(verdict, [nodes])
    assert math.isclose(tuner.chances[0][0], 0.7, abs_tol=0.15) and math.isclose(tuner.chances[0][1], 0.3, abs_tol=0.15)
    assert max(tuner.chances[1]) < 0.05


def test_explain_shows_the_whole_tree(target: Any) -> None:
    """Every node, what became of it, and what its stream gave it."""
    recorder = RecordingDrafter(streams_of(target, num_nodes=20, prune_below=0.02, copies=False))
    sides = compare.Sides(target, [9])
    assert torch.equal(sides.ours(recorder), sides.plain)
    trees = [r for r in recorder.rounds if r.tree]
    assert trees and any(node.fate == "pruned" for r in trees for node in r.tree)
    for r in trees:
        line = [node.token for node in r.tree if node.fate == "accepted"]
        assert line == r.draft[: r.accepted]
        for node in r.tree:
            above = "accepted" if node.parent < 0 else r.tree[node.parent].fate
            assert node.estimate is not None and 0 < node.estimate < 1
            assert above == "accepted" or node.fate in ("dropped", "pruned")
        first = [node.estimate or 0.0 for node in r.tree if node.parent < 0]
        assert sum(first) < 1 and first == sorted(first, reverse=True)


def test_what_was_never_measured_is_drafted_all_the_same(target: Any) -> None:
    """A table that training had nothing for is taken from the other one."""
    for tables in ({"acceptance": [[0.5, 0.2]] * GAMMA}, {"acceptance_sampled": [[0.5, 0.2]] * GAMMA}, {}):
        for sampled in (False, True):
            tuner = TreeTuner(streams_of(target, **tables).config, sampled)
            assert tuner.chances[0][:2] == ([0.5, 0.2] if tables else [0.5, 0.5 * 0.35]) and tuner.tree(True)


def test_a_tree_that_did_not_pay_is_tried_again(target: Any) -> None:
    tuner = TreeTuner(streams_of(target).config, do_sample=False)
    for _ in range(9):
        for width, seconds in ((1, 0.01), (13, 2.0)):
            tuner.cost.observe_forward(width, seconds)
    sizes = [len(tuner.tree(True)) for _ in range(200)]
    assert 0 in sizes[10:60] and any(sizes[60:80]) and any(sizes[120:140])
