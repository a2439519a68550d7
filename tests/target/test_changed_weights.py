"""However weights change, copies that were made of them are made anew: plain decoding, drafted text and the output of
each layer are those of a model that was never packed."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from typing import Any

import eagle_heads
import models
import pytest
import torch
from accelerate import dispatch_model
from compare import PROMPTS
from head_pairs import never_declined
from pretended_devices import pretended_devices
from stream_models import streams_of
from torch import Tensor, nn
from torch.nn.utils import parametrize
from traced import traced

import hf_specdec
from hf_specdec import (
    Drafter,
    DraftModelDrafter,
    HybridDrafter,
    PromptLookupDrafter,
    SuffixDrafter,
    early_exit,
    pack_linear,
)
from hf_specdec.target.packing import PackedLinear, look_at
from hf_specdec.target.remembered import LOOKED_AT, Look, seen_of
from hf_specdec.target.shelf import shelf_of


def trained(optimizer: type[torch.optim.Optimizer], **options: Any) -> Callable[[Any], None]:
    def step(model: Any) -> None:
        ids = models.prompts([12])["input_ids"]
        steps = optimizer(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
        model(ids, labels=ids).loss.backward()
        steps.step()
        steps.zero_grad()

    return step


def trained_without_a_forward(model: Any) -> None:
    """Gradients come from elsewhere, as of ranks or of a reference: no forward with gradients tells of the step."""
    steps = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    steps.step()
    steps.zero_grad()


def others(model: Any) -> Any:
    return models.llama(seed=5, num_hidden_layers=model.config.num_hidden_layers).to(model.dtype)


def copied_into_data(model: Any) -> None:
    for mine, other in zip(model.parameters(), others(model).parameters(), strict=True):
        mine.data.copy_(other.data)


def data_replaced(model: Any) -> None:
    for mine, other in zip(model.parameters(), others(model).parameters(), strict=True):
        mine.data = other.data


def averaged(model: Any) -> None:
    """Exponential averages are swapped in."""
    torch._foreach_lerp_([w.data for w in model.parameters()], [w.data for w in others(model).parameters()], 0.5)


def loaded(model: Any) -> None:
    model.load_state_dict(others(model).state_dict())


def loaded_by_assignment(model: Any) -> None:
    model.load_state_dict(others(model).state_dict(), assign=True)


def rounded(model: Any) -> None:
    model.half().float()


def with_parametrized_layers(model: Any) -> None:
    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    for layer in model.model.layers:
        parametrize.register_parametrization(layer.mlp.up_proj, "weight", Halved())


def one_row(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight[7] += 3


def in_half_precision(model: Any) -> None:
    """As most steps there are: one layer's weights change in a few places."""
    weight = model.model.layers[1].mlp.gate_proj.weight
    weight.data[::2] += 1


CHANGES: dict[str, Callable[[Any], None]] = {
    "AdamW": trained(torch.optim.AdamW, foreach=False, fused=False),
    "AdamW foreach": trained(torch.optim.AdamW, foreach=True),
    "AdamW fused": trained(torch.optim.AdamW, fused=True),
    "SGD fused": trained(torch.optim.SGD, fused=True),
    "gradients from elsewhere": trained_without_a_forward,
    "copied into data": copied_into_data,
    "data replaced": data_replaced,
    "averages": averaged,
    "state_dict": loaded,
    "state_dict assigned": loaded_by_assignment,
    "half and back": rounded,
    "parametrized": with_parametrized_layers,
    "one row": one_row,
    "one layer": in_half_precision,
}


OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    both = peft.get_peft_model(model, lora)
    both.add_adapter("other", lora)
    return both.eval()


def moved(model: Any) -> Any:
    return dispatch_model(model, {"": "cpu:1"}, force_hooks=True)


def as_it_is(model: Any) -> Any:
    return model


COLUMNS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "optimizer.step()": (as_it_is, CHANGES["AdamW fused"]),
    "load_state_dict": (as_it_is, loaded),
    ".data": (as_it_is, data_replaced),
    "LoRA merged": (adapted, lambda model: model.merge_adapter()),
    "LoRA switched": (adapted, lambda model: model.set_adapter("other")),
    "half()": (as_it_is, lambda model: model.half()),
    "another device": (as_it_is, moved),
}
"""of the table in docs/guides/harnesses.md: how a model is made ready, and changed"""


def with_a_draft() -> Any:
    return DraftModelDrafter(models.llama(num_hidden_layers=1), num_draft_tokens=3)


LINES: dict[str, Callable[[], Any]] = {
    "packed copies": with_a_draft,
    "recorded forwards": with_a_draft,
    "heads": lambda: Drafter.from_pretrained(eagle_heads.folder_of("SafeAILab"), num_draft_tokens=3),
    "memory": SuffixDrafter,
}
STAYS = ("optimizer.step()", "load_state_dict", "another device")
"""weights change where they lie, and what was recorded reads them there; or, elsewhere, nothing is recorded"""


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("line", LINES)
def test_each_cell_of_the_table(line: str, column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is plain decoding's, by a copy of the model that was made behind the change and never sped up."""
    if line == "heads":
        never_declined(monkeypatch)  # random ones are hardly ever right
    own = models.llama(num_hidden_layers=7 if line == "heads" else 2)
    drafter, prompts, (ready, change) = LINES[line](), models.prompts([9, 5, 9]), COLUMNS[column]
    options = OPTIONS | {"eos_token_id": None}
    if line == "packed copies":
        pack_linear(own)
    model = ready(own)

    def drafted() -> list[list[int]]:
        how = {"forwards": "captured" if line == "recorded forwards" else "eager"}
        with traced() if line == "recorded forwards" else nullcontext():
            return model.generate(**prompts, **options, assistant_model=drafter, speculation=how).tolist()

    before = drafted()
    recordings = set(map(id, shelf_of(own).kept))
    with pretended_devices() if column == "another device" else nullcontext():
        plain = before if column == "another device" else None
        change(model)
        if plain is None:
            plain = never_packed(model).generate(**prompts, **options).tolist()
        else:
            prompts = {name: ids.to("cpu:1") for name, ids in prompts.items()}
        text = drafted()
        assert text == plain or (column == "half()" and nearly_likeliest(model, torch.tensor(text), prompts))
        assert drafter.last_stats.drafted_tokens and drafter.last_stats.mode == "ragged"
    assert (plain == before) == (column in ("LoRA merged", "half()", "another device"))
    if line == "recorded forwards":
        assert recordings and (recordings <= set(map(id, shelf_of(own).kept))) == (column in STAYS)


def nearly_likeliest(model: Any, text: Tensor, prompts: dict[str, Tensor]) -> bool:
    """Whether each token is the likeliest behind those before it, up to rounding."""
    columns = prompts["input_ids"].shape[1]
    mask = nn.functional.pad(prompts["attention_mask"], (0, text.shape[1] - columns), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(text, attention_mask=mask, position_ids=positions).logits[:, columns - 1 : -1].float()
    return bool((logits.amax(-1) - logits.gather(2, text[:, columns:, None])[..., 0]).max() < 0.02)


def never_packed(model: Any) -> Any:
    """The same weights in a fresh model."""
    other = copy.deepcopy(model)
    hf_specdec.unpack_linear(other)
    return other


def warm(model: Any, drafters: dict[str, Any]) -> None:
    for drafter in (None, *drafters.values()):
        model.generate(**models.prompts(PROMPTS), **OPTIONS, assistant_model=drafter)


@pytest.mark.parametrize("change", CHANGES)
def test_text_is_that_of_the_weights_as_they_are(change: str) -> None:
    model, draft = models.llama(), models.llama(num_hidden_layers=1)
    for each in (model, draft):
        pack_linear(each)
    drafters = {"hybrid": HybridDrafter(draft), "own layers": DraftModelDrafter(early_exit(model, 1))}
    warm(model, drafters)
    CHANGES[change](model)
    for lengths in ([9], PROMPTS):
        prompts = models.prompts(lengths)
        want = never_packed(model).generate(**prompts, **OPTIONS)
        assert torch.equal(model.generate(**prompts, **OPTIONS), want), lengths
        for name, drafter in drafters.items():
            for forwards in ("eager", "captured"):
                drafted = {"assistant_model": drafter, "speculation": {"forwards": forwards}}
                assert torch.equal(model.generate(**prompts, **OPTIONS, **drafted), want), (name, forwards)


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_alone_is_that_of_its_weight(change: str) -> None:
    """Nobody has called `generate`, or a forward of the whole model, since."""
    model = models.llama()
    pack_linear(model)
    x, ids = torch.ones(1, 32), models.prompts([9])["input_ids"]
    with torch.no_grad():
        model(ids)
    CHANGES[change](model)
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, PackedLinear) and layer.in_features == 32:
                torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias), msg=name)


def test_half_precision_changes_where_no_look_of_a_layers_own_sees_it() -> None:
    """One weight in two hundred changes: some layer's look misses it, the look at all before a text does not."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(24)])
    pack_linear(layers)
    looks = [Look(layer.weight) for layer in layers]
    x = torch.randn(1, 256)
    with torch.no_grad():
        layers(x)
        for layer in layers:
            layer.weight.data[torch.rand(256, 256) < 0.005] *= 2
        assert any(look.still(layer.weight) for look, layer in zip(looks, layers, strict=True))
        look_at(layers)
        want = nn.Sequential(*[_unpacked(layer) for layer in layers])(x)
        torch.testing.assert_close(layers(x), want)


def _unpacked(layer: Any) -> nn.Linear:
    plain = nn.Linear(*layer.weight.shape, bias=False)
    plain.weight = layer.weight
    return plain


def test_a_look_sees_values_from_all_over_a_weight() -> None:
    """A change of a share s of the values is missed with probability (1 - s)^n, n the values looked at."""
    for shape in ((300, 500), (4096, 4096), (1024, 4096), (64, 64), (49152, 576), (7,)):
        seen = seen_of(torch.arange(prod(shape)).view(shape))
        columns = set((seen % shape[-1]).tolist())
        assert min(prod(shape), LOOKED_AT // 2) <= seen.numel() <= 2 * LOOKED_AT
        assert len(columns) > min(shape[-1], seen.numel()) / 2, shape
    weight = torch.zeros(300, 500)
    look = Look(weight)
    assert look.whole
    for part in (weight[:100], weight[100:200], weight[200:], weight[:, :100], weight[:, 400:]):
        assert look.still(weight)
        part.detach().numpy()[:] += 1  # counts no version
        assert not look.still(weight)
        look = Look(weight)
    assert not Look(weight.T).whole


def test_what_streams_copy_of_the_target_is_made_anew() -> None:
    """The head's rows of the known tokens, the upper layers with the adapters in them, and the streams themselves."""
    target = models.llama(num_hidden_layers=3)
    drafter = streams_of(target, known_tokens=20)
    drafter.streams.known.copy_(torch.arange(20))

    def proposals() -> tuple[Tensor, Tensor]:
        """Of the copies that are in use, and of fresh ones."""
        fresh = streams_of(target, known_tokens=20)
        fresh.streams.load_state_dict(drafter.streams.state_dict())
        return tuple(_stream_logits(each, target) for each in (drafter, fresh))  # type: ignore[return-value]

    torch.testing.assert_close(*proposals())
    used_weights = [weight for name, weight in drafter.streams.named_parameters() if "pruning" not in name]
    for changed in (target.lm_head.weight, target.model.layers[2].mlp.up_proj.weight, *used_weights):
        before, held = proposals()[0], changed.clone()
        changed.data.add_(0.5)
        used, fresh = proposals()
        assert not torch.equal(fresh, before) and torch.allclose(used, fresh)
        changed.data.copy_(held)


def _stream_logits(drafter: Any, target: Any) -> Tensor:
    """[1, γ, K] of the streams behind a prompt, by the copies that a call would use."""
    from hf_specdec.drafters.streaming.upper import Upper

    upper = Upper(target, drafter.config.num_layers)
    streams, own = drafter._own_layers(target, drafter.fitted(target, upper), upper)
    states = torch.linspace(-1, 1, target.config.hidden_size).expand(1, 1, -1)
    with torch.no_grad(), streams.beside(own, 0, streams.gamma):
        begun = streams.begin(states)
        positions = torch.arange(begun.shape[1])[None]
        ended = own.run(begun, torch.zeros(1, 1, begun.shape[1], begun.shape[1]), positions)
        return drafter.fitted(target, upper).head(upper, ended)


def test_a_packed_model_with_parametrized_layers_is_copied() -> None:
    model = models.llama()
    pack_linear(model)
    ids = models.prompts([9])["input_ids"]
    with torch.no_grad():
        model(ids)
        with_parametrized_layers(model)
        logits = model(ids).logits
        torch.testing.assert_close(copy.deepcopy(model)(ids).logits, logits)


def test_merged_and_switched_adapters_count() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = models.llama()
    pack_linear(model)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, lora).eval()
    prompts, drafter = models.prompts(PROMPTS), PromptLookupDrafter()

    def text() -> Tensor:
        drafted = adapted.generate(**prompts, **OPTIONS, assistant_model=drafter)
        assert torch.equal(drafted, adapted.generate(**prompts, **OPTIONS))
        return drafted

    with_adapter = text()
    with adapted.disable_adapter():
        without = text()
    assert not torch.equal(with_adapter, without)
    adapted.merge_adapter()
    assert torch.equal(text(), with_adapter)
    adapted.unmerge_adapter()
    assert torch.equal(text(), with_adapter)


def test_a_forward_with_gradients_lets_go_of_what_is_packed() -> None:
    """So training holds no second copy of weights that are about to change; frozen ones stay packed."""
    model = models.llama()
    pack_linear(model)
    ids = models.prompts([9])["input_ids"]
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    model.model.layers[0].requires_grad_(False)
    with torch.no_grad():
        model(ids)
    assert all(layer.packing.kept for layer in layers)
    model(ids)
    kept = [layer for layer in layers if layer.packing.kept]
    assert kept == [layer for layer in layers if not layer.weight.requires_grad] and len(kept) == 7
