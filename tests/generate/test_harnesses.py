"""Loops that call `generate` for us: with the flag they give what they give without it."""

import json
import warnings
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from chats import VOCAB, talking_tokenizer
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hf_specdec
from hf_specdec import DraftModelDrafter, SpeculationError, SpeculationWarning
from hf_specdec.drafters.trees import TreeSession
from hf_specdec.generate import layers

INSTALL = "pip install hf-specdec[integrations]"

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/sums.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n", "Question:"], do_sample: false, max_gen_toks: 24}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for every round that was drafted for."""
    rounds: list[int] = []
    propose = TreeSession.propose

    def counted(self: Any, *args: Any) -> Any:
        rounds.append(1)
        return propose(self, *args)

    monkeypatch.setattr(TreeSession, "propose", counted)
    return rounds


class Stand(StoppingCriteria):
    """lm-evaluation-harness's criterion, for where it is not installed: True once every row has shown the string."""

    def __init__(self, sequence: str, tokenizer: Any, initial_decoder_input_length: int, batch_size: int) -> None:
        self.sequence, self.tokenizer = sequence, tokenizer
        self.initial_decoder_input_length, self.done = initial_decoder_input_length, [False] * batch_size
        self.sequence_id_len = len(tokenizer.encode(sequence, add_special_tokens=False)) + 2

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> bool:  # type: ignore[override]
        last = input_ids[:, self.initial_decoder_input_length :][:, -self.sequence_id_len :]
        texts = self.tokenizer.batch_decode(last)
        self.done = [done or self.sequence in text for done, text in zip(self.done, texts, strict=True)]
        return all(self.done)


Stand.__name__ = "MultiTokenEOSCriteria"


def criterion() -> type:
    try:
        from lm_eval.models.utils_hf import MultiTokenEOSCriteria

        return MultiTokenEOSCriteria
    except ImportError:
        return Stand


def test_a_harness_s_stop_strings_end_each_row_by_itself() -> None:
    """As in a batch of one, and not where the last row shows the string."""
    model, tokenizer = models.llama(VOCAB, eos_token_id=2), talking_tokenizer()
    drafter = DraftModelDrafter(model, num_draft_tokens=4)
    prompts = models.prompts([9, 7, 4, 8, 6, 5])
    columns = prompts["input_ids"].shape[1]

    def texts(rows: slice, **drafted: Any) -> list[list[int]]:
        inputs = {name: held[rows] for name, held in prompts.items()}
        stop = criterion()("h", tokenizer, columns, len(inputs["input_ids"]))
        options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
        ids = model.generate(**inputs, **options, stopping_criteria=StoppingCriteriaList([stop]), **drafted)
        return [[token for token in row if token != 0] for row in ids[:, columns:].tolist()]

    alone = [texts(slice(i, i + 1))[0] for i in range(6)]
    ends = ["h" in tokenizer.decode(text) for text in alone]
    assert True in ends and False in ends and len(set(map(len, alone))) > 2
    together = texts(slice(None))
    assert together != alone and [a[: len(b)] for a, b in zip(together, alone, strict=True)] == alone
    assert texts(slice(None), assistant_model=drafter) == alone
    assert drafter.last_stats is not None and drafter.last_stats.mode == "ragged"
    assert drafter.last_stats.accepted_tokens


def stored(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A model with its tokenizer, and the arguments that say so to the harness; and a task of six sums."""
    lines = [{"question": f"what is {i} and {i + 1}?", "answer": str(2 * i + 1)} for i in range(6)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "sums.yaml").write_text(TASK.replace("FOLDER", str(folder)))
    models.llama(VOCAB, eos_token_id=2, max_position_embeddings=512).save_pretrained(folder / "model")
    talking_tokenizer().save_pretrained(folder / "model")
    return folder, {"pretrained": str(folder / "model"), "max_length": 512}


@pytest.mark.parametrize("rows", [1, 4])
def test_lm_eval_gives_the_same_scores_and_samples(rows: int, tmp_path: Path, drafted: list[int]) -> None:
    """Where the flag is among the harness's own arguments of a model."""
    pytest.importorskip("lm_eval", reason=INSTALL)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder, of_model = stored(tmp_path)
    found = []
    for flag in ({}, {"speculation_type": "prompt_lookup", "speculation": {"max_draft_tokens": 8}}):
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        with warnings.catch_warnings(record=True) as caught:
            result = simple_evaluate(
                model="hf",
                model_args=of_model | flag,
                tasks=["sums"],
                task_manager=manager,
                batch_size=rows,
                device="cpu",
                log_samples=True,
                bootstrap_iters=0,
            )
        assert not [each for each in caught if issubclass(each.category, SpeculationWarning)]
        found.append((result["results"], [sample["resps"] for sample in result["samples"]["sums"]]))
        assert bool(drafted) == bool(flag)
    assert found[0] == found[1]


@pytest.mark.parametrize("registered", [True, False], ids=["", "imported before models were"])
def test_a_model_is_loaded_with_the_flag(registered: bool, tmp_path: Path) -> None:
    models.llama().save_pretrained(tmp_path)
    flag: dict[str, Any] = {"speculation_type": "suffix", "speculation": {"max_draft_tokens": 8}}
    for load in (AutoModelForCausalLM, LlamaForCausalLM):
        if not registered:
            layers.take_away(PreTrainedModel, "from_pretrained")
        loaded, _ = load.from_pretrained(tmp_path, output_loading_info=True, **flag)
        assert {name: getattr(loaded.generation_config, name) for name in flag} == flag
        assert layers.is_there(PreTrainedModel, "from_pretrained")
        assert load.from_pretrained(tmp_path).generation_config.speculation_type is None
    with pytest.raises(SpeculationError, match="LlamaModel, which does not generate; leave"):
        AutoModel.from_pretrained(tmp_path, **flag)


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_trl_rolls_out_the_same(tmp_path: Path, drafted: list[int], packed: bool) -> None:
    """While weights move, step by step, by the trainer's own fused optimizer. Equal completions teach nothing, so that
    weight decay is what moves them: by a third in each step."""
    pytest.importorskip("trl", reason=INSTALL)
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    said: list[list[str]] = []
    prompts = [{"prompt": "number 1 abcabc"}] * 4  # one, so that texts differ by the weights alone
    for flag in (None, "prompt_lookup"):
        texts: list[str] = []

        def reward(completions: list[str], texts: list[str] = texts, **_: Any) -> list[float]:
            texts += completions
            return [float(len(text) % 7) for text in completions]

        torch.manual_seed(0)
        config = GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=12,
            max_steps=4,
            learning_rate=1.0,
            lr_scheduler_type="constant",
            weight_decay=0.33,
            optim="adamw_torch_fused",
            top_k=1,  # whatever is drawn, it is the likeliest
            generation_kwargs={} if flag is None else {"speculation_type": flag},
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            seed=0,
        )
        model = models.llama(VOCAB, eos_token_id=2, max_position_embeddings=512)
        first = model.lm_head.weight.detach().clone()
        if packed and flag is not None:
            hf_specdec.pack_linear(model)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(prompts),
            processing_class=talking_tokenizer(),
        )
        trainer.train()
        said.append(texts)
        torch.testing.assert_close(model.lm_head.weight, first * 0.67**4)
        assert bool(drafted) == (flag is not None)
    assert said[0] == said[1] and len(said[0]) == 8
    assert len(set(said[0])) > 2, "the weights that moved say the same"


def test_the_call_that_verl_makes_is_sped_up() -> None:
    """Its rollout by transformers: a config of its own beside arguments, positions of left-padded prompts, autocast."""
    model, prompts = models.llama(), models.prompts([9, 5, 7, 9])
    positions = (prompts["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    own = {"do_sample": True, "num_beams": 1, "top_p": 1.0, "top_k": 1, "temperature": 1.0, "repetition_penalty": 1.0}

    def rollout() -> Any:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model.generate(
                **prompts,
                position_ids=positions,
                do_sample=True,
                max_new_tokens=24,
                eos_token_id=2,
                pad_token_id=0,
                generation_config=GenerationConfig(**own, num_return_sequences=1),
                output_scores=False,
                return_dict_in_generate=True,
                use_cache=True,
            )

    plain = rollout().sequences
    model.generation_config.speculation_type = "suffix"
    first, second = rollout(), rollout()
    assert torch.equal(first.sequences, plain) and torch.equal(second.sequences, plain)
    assert second.speculation.mode == "ragged" and second.speculation.accepted_tokens
