"""Small operations that a GPU would have compiled: here by a backend that runs them as they are, and counts."""

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import models
import pytest
import torch
from captured_calls import CAPTURED, DRAFTERS, decode
from head_pairs import PAIRS, drafting_goes_on
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from traced import Traced, traced

from hf_specdec import PromptLookupDrafter, SpeculationWarning
from hf_specdec.target import fused as fusing
from hf_specdec.target import recorded
from hf_specdec.target.buffers import WIDTHS
from hf_specdec.target.fused import fused
from hf_specdec.target.lasting import on_lasting_thread

__all__ = ["drafting_goes_on"]
pytestmark = pytest.mark.real_time
VIEWS = {"alias", "expand", "slice", "t", "transpose", "unsqueeze", "view", "_unsafe_view", "detach"}
LAYERS = 4


class Graphs:
    """A compiler: what is compiled runs as it is, and each call counts as one operation."""

    def __init__(self) -> None:
        self.compiled: Counter[str] = Counter()
        self.called = 0

    def __call__(self, function: Any) -> Any:
        def backend(graph: Any, given: Any) -> Any:
            run = lookup_backend("aot_eager")(graph, given)
            self.compiled[function.__name__] += 1

            def called(*given: Any) -> Any:
                self.called += 1
                return run(*given)

            return called

        return torch.compile(function, backend=backend)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """On a CPU as on a GPU."""
    graphs = Graphs()
    monkeypatch.setitem(fusing.COMPILERS, "cpu", graphs)
    counters.clear()
    yield graphs
    assert not counters["graph_break"]


def pieces_of(made: Any) -> Counter[str]:
    return Counter(type(part).__name__ for part in made.modules() if type(part).__module__ == fusing.__name__)


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits


# ---------------------------------------------------------------------- what they compute


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Gemma", "Gemma3", "OLMo2"])
def test_all_layers_and_widths_share_few_graphs_and_give_the_same_bits(
    name: str, dtype: torch.dtype, graphs: Graphs
) -> None:
    model = models.build(name, dtype=dtype)
    made, before, layers = fused(model), graphs.compiled.copy(), model.config.num_hidden_layers
    found = pieces_of(made)
    assert found[f"{name.replace('OLMo', 'Olmo')}MLP"] == found[f"{name.replace('OLMo', 'Olmo')}Attention"] == layers
    assert sum(found.values()) >= 2 * layers + 2 * layers + 1
    sizes = len({part.weight.shape for part in made.modules() if type(part).__name__.endswith("RMSNorm")})
    assert all(count <= 2 * (sizes if what == "forward" else 1) for what, count in before.items()), before
    for width in WIDTHS:
        for rows in (1, 4):
            ids = torch.randint(0, models.VOCAB, (rows, width))
            assert torch.equal(logits(made, ids), logits(model, ids))
    assert graphs.compiled == before, "all was compiled in the trial"


class Operations(TorchDispatchMode):
    """Counts what a device would launch; as a compiler, what is compiled as one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__.partition(".")[0] not in VIEWS
        return func(*args, **(kwargs or {}))

    def __call__(self, function: Any) -> Any:
        def once(*given: Any) -> Any:
            self.count += 1
            with _disable_current_modes():
                return function(*given)

        return once


def test_a_layer_launches_less_than_half(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, a_layer = Operations(), []
    monkeypatch.setitem(fusing.COMPILERS, "cpu", seen)
    ids = torch.randint(0, models.VOCAB, (1, 5))
    for way in (lambda model: model, fused):
        counts = []
        for layers in (LAYERS, 2 * LAYERS):
            made = way(models.llama(num_hidden_layers=layers).bfloat16())
            seen.count = 0
            with seen:
                logits(made, ids)
            counts.append(seen.count)
        a_layer.append((counts[1] - counts[0]) / LAYERS)
    print("operations a layer: {:.0f} as they are, {:.0f} fused".format(*a_layer))
    assert a_layer[1] < a_layer[0] / 2


# ---------------------------------------------------------------------- in calls


@pytest.mark.parametrize("kind", ["lookup, branches", "fixed", "hybrid"])
def test_text_is_plain_decodings_and_the_model_stays_what_it_was(kind: str, graphs: Graphs) -> None:
    model, draft = models.llama(), models.llama(seed=1)
    drafter, plain = DRAFTERS[kind](draft), decode(model, None, [9, 4])
    for _ in range(2):
        with traced():
            assert torch.equal(decode(model, drafter, [9, 4], speculation=CAPTURED), plain)
            assert Traced.played
    assert graphs.called and not any("forward" in vars(part) for part in model.modules())
    assert not any("dropped" in note for note in drafter.last_stats.notes)
    graphs.called = 0
    assert torch.equal(decode(model, None, [9, 4]), plain)
    assert not graphs.called


class Again:
    """A recorder whose replays are further runs, on the thread that asks: a compiled step cannot be traced."""

    def __init__(self, device: torch.device) -> None:
        """Nothing to prepare."""

    def __call__(self, step: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        result = on_lasting_thread(step)

        def replay() -> None:
            for static, new in zip(tree_leaves(result), tree_leaves(step()), strict=True):
                static.copy_(new)

        return replay, result


def test_recordings_use_what_the_trial_has_compiled(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter = models.llama(), PromptLookupDrafter()
    monkeypatch.setitem(recorded.RECORDERS, "cpu", Again)
    plain, before = decode(model, None, [9, 4]), len(recorded.recordings)
    fused(model)
    compiled = graphs.compiled.copy()
    assert torch.equal(decode(model, drafter, [9, 4], speculation=CAPTURED), plain)
    assert len(recorded.recordings) > before and graphs.compiled == compiled


def test_heads_are_shown_each_hidden_state_once(graphs: Graphs) -> None:
    """transformers notes them by hooks, which the twin has in common with the model."""
    model, drafter = PAIRS["EAGLE-3, SafeAILab"]()
    plain = decode(model, None, [9])
    for _ in range(2):
        assert torch.equal(decode(model, drafter, [9], speculation=CAPTURED), plain)
        assert not any("dropped" in note for note in drafter.last_stats.notes)
    states = model(**models.prompts([9]), output_hidden_states=True).hidden_states
    assert graphs.called and len(states) == model.config.num_hidden_layers + 1


def test_another_threads_forward_at_the_same_time_is_the_models_own(graphs: Graphs) -> None:
    model = models.llama()
    ids, made = torch.randint(0, models.VOCAB, (1, 7)), fused(model)
    seen: list[int] = []

    def beside(*_: Any) -> None:
        """In the midst of a fused forward."""
        if threading.current_thread() is threading.main_thread():
            before = graphs.called
            thread = threading.Thread(target=logits, args=(model, ids))
            thread.start(), thread.join()
            seen.append(graphs.called - before)

    with made.model.layers[1].register_forward_pre_hook(models.spy(beside)):
        logits(made, ids)
    assert seen == [0] and graphs.called


def test_weights_that_change_are_followed_and_a_model_that_is_gone_is_forgotten(graphs: Graphs) -> None:
    model, ids = models.llama(), torch.randint(0, models.VOCAB, (2, 5))
    made = fused(model)
    model.model.norm.weight = torch.nn.Parameter(torch.rand(32))
    before = graphs.compiled.copy()
    for each in (made, fused(model)):
        assert torch.equal(logits(each, ids), logits(model, ids)) and graphs.compiled == before
    head = weakref.ref(model.lm_head.weight)
    del made, each
    model.lm_head = torch.nn.Linear(32, models.VOCAB, bias=False)
    assert head() is None and torch.equal(logits(fused(model), ids), logits(model, ids))
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    assert torch.equal(logits(fused(model), ids), logits(model, ids))
    gone = weakref.ref(model), weakref.ref(model.lm_head.weight)
    gc.disable()  # nobody is to wait for it until memory is free
    del model
    left = [one() for one in gone]
    gc.enable()
    assert left == [None, None]


# ---------------------------------------------------------------------- what is left as it is


def doubled(function: Any) -> Any:
    def wrong(*given: Any) -> Any:
        return function(*given) * 2

    return wrong


def test_what_computes_something_else_is_refused(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(function: Any) -> Any:
        return doubled(function) if function.__name__ == "_gated" else graphs(function)

    monkeypatch.setitem(fusing.COMPILERS, "cpu", compiler)
    for dtype in (torch.float32, torch.bfloat16):
        model = models.llama().to(dtype)
        assert fused(model) is model


@pytest.mark.parametrize("fails", ["at once", "when it is called"])
def test_what_cannot_be_compiled_is_left_with_a_warning(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any) -> Any:
        raise RuntimeError("no compiler is there")

    compiler: Callable[..., Any] = raises if fails == "at once" else lambda function: raises
    monkeypatch.setitem(fusing.COMPILERS, "cpu", compiler)
    model = models.llama()
    with pytest.warns(SpeculationWarning, match=r"are not fused: RuntimeError.*no compiler is there"):
        assert fused(model) is model
    plain = decode(model, None, [9])
    assert torch.equal(decode(model, PromptLookupDrafter(), [9], speculation=CAPTURED), plain)


def test_modules_that_somebody_has_changed_are_left(graphs: Graphs) -> None:
    def own(self: Any, **given: Any) -> Any:
        return super(type(self), self).forward(**given)

    model = models.llama()
    mlp, attention = model.model.layers[0].mlp, model.model.layers[0].self_attn
    mlp.forward = lambda states: type(mlp).forward(mlp, states) * 2
    attention.__class__ = type("Own", (type(attention),), {"forward": own})
    made = fused(model)
    assert pieces_of(made) == {"LlamaRMSNorm": 5, "LlamaMLP": 2, "LlamaAttention": 1}
    assert made.model.layers[0].mlp.forward is mlp.forward
    ids = torch.randint(0, models.VOCAB, (2, 5))
    assert torch.equal(logits(made, ids), logits(model, ids))


def test_by_itself_only_a_gpu_compiles() -> None:
    model = models.llama()
    assert list(fusing.COMPILERS) == ["cuda"] and fused(model) is model
