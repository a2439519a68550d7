"""Heads that read the target's states: MTP layers, DFlash models and EAGLE-3 heads, in batches of uneven rows, drawn
losslessly."""

import copy
import functools
from pathlib import Path
from typing import Any

import dflash_models
import eagle_heads
import gemma4_models
import models
import pytest
import torch
import transformers as tf
from test_distribution import FEWER, LEVEL, SETTINGS, VOCAB, joint, p_value, sample
from torch import Tensor
from transformers.cache_utils import DFlashCache, MtpCache
from transformers.modeling_layers import MtpModel

from hf_specdec import DFlashDrafter, Drafter, EagleDrafter, Gemma4Drafter, MtpDrafter, SpeculationError
from hf_specdec.budget import Controller, nodes_that_pay
from hf_specdec.drafters.draft_model import GrowingSession
from hf_specdec.drafters.heads import HeadDrafter
from hf_specdec.drafters.heads.unseen import UnseenSession
from hf_specdec.engine import guard
from hf_specdec.protocol import Draft

WINDOW = 6
BLOCK = 4
MASK = 95
WIDE = 24
"""nodes that are verified at least, where there are so many"""
TARGETS: dict[str, Any] = {
    "GLM-4-MoE": lambda layers: tf.Glm4MoeConfig(
        **models.SIZES,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        num_mtp_layers=layers,
    ),
    "DeepSeek-V3": lambda layers: _deepseek(layers),
}


def _deepseek(layers: int) -> Any:
    config = models.ARCHITECTURES["DeepSeek-V3"]()
    config.num_mtp_layers = layers
    return config


def _loud(model: Any, seed: int) -> Any:
    """Weights large enough that every token matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and not name.startswith(("embed_tokens", "shared_head")):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 2.0 / weight.shape[-1] ** 0.5)
    return model.eval()


@functools.cache
def mtp(name: str, layers: int) -> tuple[Any, MtpModel]:
    target = models.from_config(TARGETS[name](layers))
    target.set_experts_implementation("batched_mm")  # the only one that can be captured in float32
    return target, _loud(MtpModel(target, layers), seed=4)


@functools.cache
def dflash(kind: str) -> tuple[Any, Any]:
    target = models.llama()
    config = tf.MuseGlimmerAssistantConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"] if kind == "mixed" else [kind] * 2,
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=[0, 1],
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return target, _loud(tf.MuseGlimmerAssistantModel(config), seed=5)


def pairs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in TARGETS:
        for layers in (1, 3):
            found[f"{name}, {layers}"] = functools.partial(_mtp_pair, name, layers)
    for kind in ("full_attention", "sliding_attention", "mixed"):
        found[f"DFlash, {kind}"] = functools.partial(_dflash_pair, kind)
    for kind in dflash_models.CONFIGS:
        found[f"z-lab's DFlash, {kind}"] = functools.partial(dflash_models.published, kind)
    for kind in eagle_heads.CONFIGS:
        found[f"EAGLE-3, {kind}"] = functools.partial(eagle_heads.eagle, kind)
    for kind in gemma4_models.OF_TARGETS:
        found[f"Gemma 4, {kind}"] = functools.partial(gemma4_models.gemma4, kind)
    return found


def _mtp_pair(name: str, layers: int) -> tuple[Any, Drafter]:
    target, model = mtp(name, layers)
    return target, MtpDrafter(model)


def _dflash_pair(kind: str) -> tuple[Any, Drafter]:
    target, model = dflash(kind)
    return target, DFlashDrafter(model)


PAIRS = pairs()
LENGTHS = [[9], [7, 7, 7], [3, 11, 6]]


def never_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random heads are hardly ever right; where they do not pay nothing would be drafted, or verified."""
    plan = Controller.plan

    def planned(self: Controller, drafted: Any, most: int, enough: int = 1) -> int:
        as_ever = plan(self, drafted, most, enough)
        return min(self.fixed or most, most) if self.who == HeadDrafter.who else as_ever

    monkeypatch.setattr(Controller, "plan", planned)
    monkeypatch.setattr(guard, "nodes_that_pay", lambda *known: max(WIDE, nodes_that_pay(*known)))


@pytest.fixture(autouse=True)
def drafting_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    never_declined(monkeypatch)


@pytest.mark.grid
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_greedy_text_is_the_targets(pair: str, lengths: list[int]) -> None:
    target, drafter = PAIRS[pair]()
    inputs = models.prompts(lengths) | {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0}
    plain = target.generate(**inputs)
    assert torch.equal(target.generate(**inputs, assistant_model=drafter), plain)
    # Rows end at different times.
    inputs["eos_token_id"] = int(plain[0, -12])
    plain = target.generate(**inputs)
    assert torch.equal(target.generate(**inputs, assistant_model=drafter), plain)
    assert drafter.last_stats is not None and drafter.last_stats.drafted_tokens > 0


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_drafts_are_those_of_the_heads_over_each_text_alone(
    pair: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts_are_those_of_texts_alone(pair, lengths, monkeypatch, "eager")


def drafts_are_those_of_texts_alone(
    pair: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch, forwards: str
) -> None:
    """Every draft of a batch against transformers' own model, or a slow reference, over that row's text, from nothing,
    without padding. What is verified is right in places, as the heads themselves hardly ever are, so that rows grow by
    any number."""
    target, drafter = PAIRS[pair]()
    call = models.prompts(lengths) | {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    texts = [row[max(lengths) - n :] for row, n in zip(target.generate(**call).tolist(), lengths, strict=True)]
    drafts: list[tuple[list[int], list[int]]] = []
    session: Any = GrowingSession if forwards == "eager" else UnseenSession
    propose = session.propose

    def recording(self: Any, sequences: Any, room: list[int]) -> Any:
        draft, fed = propose(self, sequences, room), []
        for b, row in enumerate(sequences.rows):
            tokens = list(sequences.tokens[b])
            drafted = self.drafted[b] if session is GrowingSession else self.drafted[b, :, 0].tolist()
            drafted = drafted if draft.lengths[b] else []
            drafts.append((tokens, drafted))
            right = (len(tokens) + row) % (len(drafted) + 1)
            fed.append([*texts[row][len(tokens) :][:right], *drafted[right:]])
        return Draft.from_lists(fed)

    monkeypatch.setattr(session, "propose", recording)
    target.generate(**call, assistant_model=drafter, speculation={"forwards": forwards})
    stats = drafter.last_stats
    assert stats is not None and len(drafts) > 5 * len(lengths) and stats.accepted_tokens > 4
    for text, drafted in drafts:
        expected = ALONE[type(drafter)](target, drafter, torch.tensor([text]))[: len(drafted)]
        assert drafted == expected


@torch.no_grad()
def _mtp_alone(target: Any, drafter: Any, text: Tensor) -> list[int]:
    states = target(text[:, :-1], output_hidden_states=True).hidden_states[-1]
    tokens, *_ = drafter.model(
        input_ids=text[:, 1:],
        last_hidden_states=states,
        attention_mask=torch.ones_like(text),
        position_ids=torch.arange(1, text.shape[1])[None],
        mtp_cache=MtpCache(config=drafter.model.config),
    )
    return tokens[0].tolist()


@torch.no_grad()
def _dflash_alone(target: Any, drafter: Any, text: Tensor) -> list[int]:
    if name := drafter.draft_model.config.name_or_path:
        return dflash_models.Reference(Path(name)).block(target, text[0].tolist()).argmax(-1).tolist()
    model, hidden = drafter.draft_model, target(text[:, :-1], output_hidden_states=True).hidden_states
    cache, length = DFlashCache(config=model.config), text.shape[1]
    cache.set_previous_accepted_tokens(length - 1)
    filled = model(
        noise_embeds=target.get_input_embeddings()(torch.tensor([[int(text[0, -1]), *[MASK] * (BLOCK - 1)]])),
        context_hidden_states=torch.cat([hidden[layer + 1] for layer in model.config.target_layer_ids], dim=-1),
        position_ids=torch.arange(length - 1 + BLOCK)[None],
        past_key_values=cache,
    ).last_hidden_state
    return target.get_output_embeddings()(filled[:, 1:]).argmax(-1)[0].tolist()


def _eagle_alone(target: Any, drafter: Any, text: Tensor) -> list[int]:
    reference = eagle_heads.Reference(Path(drafter.draft_model.config.name_or_path))
    logits = reference.chain(target, text[0].tolist(), drafter.config.num_draft_tokens)
    return [int(each.argmax()) for each in logits]


def _gemma4_alone(target: Any, drafter: Any, text: Tensor) -> list[int]:
    return gemma4_models.drafted_by_transformers(target, drafter.draft_model, text, drafter.most)[0]


ALONE: dict[Any, Any] = {
    MtpDrafter: _mtp_alone,
    DFlashDrafter: _dflash_alone,
    EagleDrafter: _eagle_alone,
    Gemma4Drafter: _gemma4_alone,
}
"""what heads draft over a text, by another way"""


@pytest.fixture(scope="module")
def small() -> Any:
    size = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 8}
    size |= {"num_attention_heads": 1, "num_key_value_heads": 1, "bos_token_id": None, "pad_token_id": None}
    config = TARGETS["GLM-4-MoE"](2)
    for name, value in size.items():
        setattr(config, name, value)
    model = models.from_config(config)
    model.get_output_embeddings().weight.data *= 0.5  # every token has its chance
    return model


@pytest.mark.grid
@pytest.mark.parametrize("settings", ["temperature", "penalties"])
@pytest.mark.parametrize("kind", ["MTP", "DFlash", "z-lab's DFlash", "EAGLE-3"])
def test_sampled_text_has_the_targets_distribution(small: Any, kind: str, settings: str) -> None:
    """The power is that of test_distribution's tests."""
    told, processors = SETTINGS[settings]
    drafter = small_head(small, kind)
    counts = sample(small, drafter, FEWER, **told)
    assert drafter.last_stats is not None and drafter.last_stats.accepted_tokens > 0 < drafter.last_stats.rejections
    assert p_value(counts, joint(small, processors)) > LEVEL


def small_head(target: Any, kind: str) -> Any:
    if kind == "EAGLE-3":  # which does not know one of the tokens
        return EagleDrafter(_loud(eagle_heads.tiny(VOCAB, known=VOCAB - 1), seed=4), num_draft_tokens=2)
    if kind == "z-lab's DFlash":
        return dflash_models.tiny(VOCAB)
    return _small_dflash(target) if kind == "DFlash" else MtpDrafter(_loud(MtpModel(target, 2), seed=4))


def _small_dflash(target: Any) -> DFlashDrafter:
    config = copy.deepcopy(dflash("mixed")[1].config)
    config.hidden_size, config.intermediate_size, config.mask_token_id = 8, 8, VOCAB - 1
    return DFlashDrafter(_loud(tf.MuseGlimmerAssistantModel(config), seed=5))


@pytest.mark.parametrize("layers", [1, 2])
def test_layers_come_from_the_targets_checkpoint(layers: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, model = mtp("GLM-4-MoE", layers)
    # transformers tells the layers by the numbers that they have in the models of that family.
    monkeypatch.setattr(type(target), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[2-9].*"])
    _save(target, model, tmp_path)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    inputs = models.prompts([9]) | {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    plain = target.generate(**inputs)
    assert torch.equal(loaded.generate(**inputs, speculation_type="mtp"), plain)
    drafter, given = MtpDrafter(), MtpDrafter(model)
    for _ in range(2):
        loaded.generate(**inputs, assistant_model=drafter)
    target.generate(**inputs, assistant_model=given)
    assert drafter.last_stats is not None and given.last_stats is not None
    assert drafter.last_stats.accepted_tokens == given.last_stats.accepted_tokens


def _save(target: Any, model: MtpModel, folder: Any) -> None:
    """A checkpoint as models with such layers have it: they stand behind the others."""
    from safetensors.torch import load_file, save_file

    target.save_pretrained(folder)
    file, first = folder / "model.safetensors", target.config.num_hidden_layers
    names = load_file(file)
    for name, weight in model.layers.state_dict().items():
        number, rest = name.split(".", 1)
        for ours, theirs in (("mtp_block.", ""), ("post_norm.", "shared_head.norm.")):
            if rest.startswith(ours):
                rest = theirs + rest.removeprefix(ours)
        names[f"model.layers.{first + int(number)}.{rest}"] = weight.contiguous()
    save_file(names, file, metadata={"format": "pt"})


def test_a_dflash_model_is_saved_and_loaded(tmp_path: Any) -> None:
    target, model = dflash("mixed")
    DFlashDrafter(model).save_pretrained(tmp_path, target=target)
    loaded = Drafter.from_pretrained(tmp_path)
    assert isinstance(loaded, DFlashDrafter)
    inputs = models.prompts([9]) | {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    assert torch.equal(target.generate(**inputs, assistant_model=loaded), target.generate(**inputs))


def test_what_cannot_be_served() -> None:
    target, model = models.llama(), models.llama(seed=1)
    ids = models.prompts([5])
    with pytest.raises(SpeculationError, match="has no layers for multi-token prediction"):
        target.generate(**ids, assistant_model=MtpDrafter(), max_new_tokens=3)
    with pytest.raises(SpeculationError, match="must be transformers' MtpModel, got LlamaForCausalLM"):
        MtpDrafter(model)
    with pytest.raises(SpeculationError, match="is not a DFlash model: its config has no block_size"):
        DFlashDrafter(model)
    with pytest.raises(SpeculationError, match="reads layers"):
        models.llama(hidden_size=64).generate(**ids, assistant_model=DFlashDrafter(dflash("mixed")[1]))
    without = models.from_config(TARGETS["GLM-4-MoE"](1))
    with pytest.raises(SpeculationError, match="holds no layers for multi-token prediction"):
        without.generate(**ids, assistant_model=MtpDrafter(), max_new_tokens=3)
