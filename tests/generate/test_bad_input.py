"""Bad input gets one clear error that names the argument, before any forward."""

from typing import Any

import models
import pytest
import torch
import toy_drafters as drafters
import transformers
from transformers import GenerationConfig

from hf_specdec import DraftModelDrafter, HybridDrafter, PearlDrafter, SpeculationError, Translated


@pytest.fixture
def model() -> Any:
    """A target that must not run."""
    model = models.llama()

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a forward before the error")

    model.forward = forward
    return model


@pytest.fixture(scope="module")
def draft() -> Any:
    return models.llama(num_hidden_layers=1)


def ask(model: Any, **settings: Any) -> Any:
    return model.generate(**models.prompts([5]) | {"max_new_tokens": 4, "do_sample": False} | settings)


@pytest.mark.parametrize("gamma", [0, -1, 2.5, "five", None, True])
def test_gamma(model: Any, draft: Any, gamma: Any) -> None:
    with pytest.raises(SpeculationError, match="num_draft_tokens"):
        DraftModelDrafter(draft, num_draft_tokens=gamma)
    with pytest.raises(SpeculationError, match="num_draft_tokens"):
        ask(model, assistant_model=draft, speculation_type="draft_model", speculation={"num_draft_tokens": gamma})


def test_unknown_options_and_types(model: Any, draft: Any) -> None:
    with pytest.raises(SpeculationError, match=r"gama.*num_draft_tokens"):
        DraftModelDrafter(draft, gama=3)
    with pytest.raises(SpeculationError, match=r"gama.*num_draft_tokens"):
        ask(model, assistant_model=draft, speculation_type="draft_model", speculation={"gama": 3})
    with pytest.raises(SpeculationError, match=r"no_such_thing.*draft_model"):
        ask(model, assistant_model=draft, speculation_type="no_such_thing")
    with pytest.raises(SpeculationError, match="speculation"):
        ask(model, assistant_model=draft, speculation_type="draft_model", speculation=5)


@pytest.mark.parametrize(
    ("module", "name", "pin"),
    [
        ("optimum.onnxruntime.modeling_decoder", "ORTModelForCausalLM", r"optimum-onnx needs transformers<4\.58"),
        ("optimum.intel.openvino.modeling_decoder", "OVModelForCausalLM", r"optimum-intel needs transformers<5\.6"),
    ],
)
def test_models_of_other_runtimes(model: Any, draft: Any, module: str, name: str, pin: str) -> None:
    """Their classes have the form of transformers' models; their packages cannot be installed beside this one."""
    theirs = type(name, (), {"__module__": module, "config": draft.config, "forward": None, "generation_config": None})
    tokenizer = models.tokenizer()
    said = rf"draft_model .*{name}.*{pin}.*AutoModelForCausalLM.*quantization"
    for kind in (theirs, type("Mine", (theirs,), {})):
        for make in (DraftModelDrafter, HybridDrafter, PearlDrafter, lambda it: Translated(it, tokenizer, tokenizer)):
            with pytest.raises(SpeculationError, match=said if kind is theirs else pin):
                make(kind())
        for speculation_type in ("draft_model", "hybrid"):
            with pytest.raises(SpeculationError, match=pin):
                ask(model, assistant_model=kind(), speculation_type=speculation_type)


def test_no_draft_model(model: Any) -> None:
    with pytest.raises(SpeculationError, match="assistant_model"):
        ask(model, speculation_type="draft_model")
    for bad in ("a name", 5, torch.nn.Linear(2, 2)):
        with pytest.raises(SpeculationError, match="draft_model"):
            DraftModelDrafter(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"vocab": 5_000}, {"eos_token_id": 9}, {"bos_token_id": 9}])
def test_a_draft_of_another_tokenizer(changes: dict) -> None:
    target = models.llama(eos_token_id=2)
    target.forward = None
    other = models.llama(**{"num_hidden_layers": 1, "eos_token_id": 2} | changes)
    with pytest.raises(SpeculationError, match="assistant_tokenizer"):
        ask(target, assistant_model=DraftModelDrafter(other))


def test_a_draft_that_reads_a_source_for_a_target_that_has_none(model: Any) -> None:
    size = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    both = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=models.VOCAB, **size))
    both.forward = None
    with pytest.raises(SpeculationError, match="encoder-decoder"):
        ask(model, assistant_model=DraftModelDrafter(both))


@pytest.mark.parametrize("form", ["call", "config"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_lookup_num_tokens", 4),
        ("num_assistant_tokens", 7),
        ("assistant_confidence_threshold", 0.3),
    ],
)
def test_settings_that_do_not_go_with_speculation(model: Any, name: str, value: Any, form: str) -> None:
    toy = drafters.Toy(lambda *_: None)
    if form == "call":
        settings: dict[str, Any] = {name: value}
    else:
        settings = {"generation_config": GenerationConfig(max_new_tokens=4, **{name: value}), "max_new_tokens": None}
    with pytest.raises(SpeculationError, match=name):
        ask(model, assistant_model=toy, **settings)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"synced_gpus": True}, "synced_gpus"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long), "attention_mask": None}, "input_ids"),
        ({"input_ids": torch.zeros(5, dtype=torch.long), "attention_mask": None}, "input_ids"),
        ({"token_healing": True}, "token_healing"),
        ({"stop_strings": ["x"]}, "tokenizer"),
        ({"speculation": {"num_draft_tokens": 3}}, "speculation"),
        ({"custom_generate": lambda *a, **k: None}, "custom_generate"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_do_not_go_with_speculation(model: Any, settings: dict, word: str) -> None:
    with pytest.raises(SpeculationError, match=word):
        ask(model, assistant_model=drafters.Toy(lambda *_: None), **settings)


def test_a_draft_that_cannot_roll_back() -> None:
    with pytest.raises(SpeculationError, match="rolled back"):
        ask(models.llama(), assistant_model=DraftModelDrafter(models.build("Mamba", "eager")))
