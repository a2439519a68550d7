"""Speculative Streaming: the paper's equations against brute force."""

from typing import Any

import models
import pytest
import torch
from stream_models import GAMMA, streams_of, target_of
from torch import Tensor
from transformers import DynamicCache

from hf_specdec.drafters.streaming import Streams, Upper, with_streams
from hf_specdec.drafters.streaming.late import LateStreams, own_layers
from hf_specdec.drafters.streaming.runner import StreamRunner, early_chances
from hf_specdec.target.inputs import CACHE
from hf_specdec.target.ragged import RaggedRunner


@pytest.fixture(scope="module")
def target() -> Any:
    return target_of("Llama")


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


def engine_of(model: Any) -> RaggedRunner:
    """Two rows of uneven lengths."""
    inputs = models.prompts([9, 5])
    kwargs: dict[str, Any] = {"attention_mask": inputs["attention_mask"], "use_cache": True}
    kwargs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    kwargs[CACHE] = DynamicCache(config=model.config)
    return RaggedRunner(model, kwargs, inputs["input_ids"])


@pytest.mark.parametrize("name", ["Llama", "Phi", "OPT", "Qwen3"])
def test_streams_of_a_tree_are_those_of_each_path_by_itself(name: str) -> None:
    """Against a dense mask: the main stream's path as a plain text, the streams of its last token behind it."""
    model = target_of(name)
    drafter = streams_of(model)
    upper = Upper(model, 2)
    streams = drafter.fitted(model, upper)
    inputs = models.prompts([9, 5])
    with torch.no_grad():
        runner = StreamRunner(engine_of(model), streams, upper)
        runner.prefill()
        assert runner.states is not None
        for b, n in enumerate([9, 5]):
            text = inputs["input_ids"][b, 9 - n :].tolist()
            expected = alone(model, upper, streams, text)
            torch.testing.assert_close(runner.states[b, 0], expected, rtol=1e-3, atol=1e-3)
        tokens, parents = torch.tensor([[3, 5, 8, 9, 2], [4, 4, 7, 1, 6]]), [[-1, 0, 0, 1, 2]] * 2
        answer = runner.forward(tokens, parents)
        assert runner.at == [list(range(5))] * 2
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


@pytest.mark.parametrize("own", [False, True], ids=["adapters beside", "adapters added"])
@pytest.mark.parametrize("name", ["Llama", "Phi", "OPT", "Qwen3"])
def test_late_streams_are_those_behind_what_was_kept(name: str, own: bool) -> None:
    model = target_of(name)
    upper = Upper(model, 2)
    streams = streams_of(model).fitted(model, upper)
    prompts = models.prompts([9, 5])["input_ids"]
    texts = [prompts[b, 9 - n :].tolist() for b, n in enumerate([9, 5])]
    with torch.no_grad():
        runner = LateStreams(engine_of(model), upper, own_layers(streams, upper) if own else (streams, upper))
        runner.prefill()
        assert runner.states is not None
        found = [runner.streams_at(runner.states[:, 0])]
        runner.forward(torch.tensor([[3, 5, 8, 9, 2], [4, 4, 7, 1, 6]]), [[-1, 0, 0, 1, 2]] * 2)
        begins = runner.states[[0, 1], [3, 4]]
        runner.keep([10, 10], [[0, 2], [1, 3]])
        found.append(runner.streams_at(begins))
        for states, more in zip(found, ([[], []], [[3, 5, 9], [4, 7, 6]]), strict=True):
            assert states is not None
            for b in range(2):
                expected = alone(model, upper, streams, texts[b] + more[b])
                torch.testing.assert_close(states[b], expected, rtol=1e-3, atol=1e-3)
        assert runner.streams_at(begins[:1]) is None, "whose row of the cache is not known"


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


def test_rotated_streams_begin_with_the_main_streams_state(target: Any) -> None:
    """Appendix B: no P_j, so nothing is learned to tell streams apart."""
    drafter = streams_of(target, rotation=0.01, adapter_rank=0, map_rank=0, prune_rank=0)
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    assert not list(drafter.streams.parameters())
    assert torch.equal(drafter.streams.begin(states), states.repeat_interleave(GAMMA, 1))


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


def test_parameters_are_as_many_as_the_paper_says(target: Any) -> None:
    """γ h and the maps'; adapters beside."""
    size = target.config.hidden_size
    for eta, theta in ((0, 0), (4, 0), (4, 2)):
        made = streams_of(target, map_rank=eta, prune_rank=theta, adapter_rank=0)
        assert sum(w.numel() for w in made.streams.parameters()) == GAMMA * size + 2 * (eta + theta) * size
