"""Loops that call `generate` for us: with the flag they give what they give without it."""

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from chats import VOCAB, talking_tokenizer

import hf_specdec
from hf_specdec.drafters.trees import TreeSession

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


def test_lm_eval_gives_the_same_scores_and_samples(tmp_path: Path, drafted: list[int]) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lines = [{"question": f"what is {i} and {i + 1}?", "answer": str(2 * i + 1)} for i in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "sums.yaml").write_text(TASK.replace("FOLDER", str(tmp_path)))
    model, tokenizer = models.llama(VOCAB, eos_token_id=2, max_position_embeddings=512), talking_tokenizer()
    found = []
    for flag in (None, "prompt_lookup"):
        model.generation_config.speculation_type = flag
        harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=512)
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        result = simple_evaluate(
            model=harness, tasks=["sums"], task_manager=manager, log_samples=True, bootstrap_iters=0
        )
        found.append((result["results"], [sample["resps"] for sample in result["samples"]["sums"]]))
        assert bool(drafted) == (flag is not None)
    assert found[0] == found[1]


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_trl_rolls_out_the_same(tmp_path: Path, drafted: list[int], packed: bool) -> None:
    """While weights move, step by step, by the trainer's own fused optimizer. Equal completions teach nothing, so that
    weight decay is what moves them: by a third in each step."""
    pytest.importorskip("trl")
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
