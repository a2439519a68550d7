"""lm-evaluation-harness with a drafter in the generation config: the same scores and samples, in less time.

Run as `python docs/laboratory/harness.py --target smollm2 --dtype float32 --pack-linear --folder hub_configs/hybrid
--prompts openai/gsm8k`. The task is greedy: a question with others and their answers before it. Questions are
asked plainly and with the drafter in turn, a few at a time.
"""

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from rich.console import Console
from typer import Option

from hf_specdec.commands.options import command
from hf_specdec.tools.loading.models import TargetSettings
from hf_specdec.tools.loading.rows import read_rows

TASK = """
task: asked
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\nQuestion:"], do_sample: false, max_gen_toks: 96}
filter_list:
  - name: last
    filter: [{function: regex, regex_pattern: "(-?[0-9]+)", group_select: -1}, {function: take_first}]
metric_list: [{metric: exact_match}]
"""
SHOTS = 3
"""questions with their answers before each"""
AT_ONCE = 5
"""questions between two changes"""


@dataclass(kw_only=True)
class HarnessSettings(TargetSettings):
    """What is asked."""

    folder: Annotated[str, Option(help="Of a drafter.")]
    prompts: Annotated[str, Option(help="File or data set with a question and an answer in each row.")]
    limit: Annotated[int, Option(help="Questions.")] = 20


def asked(model: HFLM, lines: list[dict[str, str]]) -> list[dict[str, Any]]:
    """What the harness notes of each question."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "asked.jsonl")
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        Path(folder, "asked.yaml").write_text(TASK.replace("FILE", str(file)))
        manager = TaskManager(include_path=folder, include_defaults=False)
        found = simple_evaluate(model=model, tasks=["asked"], task_manager=manager, log_samples=True, bootstrap_iters=0)
        return found["samples"]["asked"]


def measure(settings: HarnessSettings) -> None:
    """Print scores, seconds, and whether samples are the same."""
    pair = settings.load()
    lines = [row for _, row in read_rows(settings.prompts) if isinstance(row, dict)]
    texts = [f"Question: {line['question']}\nAnswer:" for line in lines]
    shots = [f"{text} {line['answer']}\n\n" for text, line in zip(texts[-SHOTS:], lines[-SHOTS:], strict=True)]
    questions = [
        {"question": "".join(shots) + text, "answer": line["answer"].split()[-1]}
        for text, line in zip(texts[: settings.limit], lines, strict=False)
    ]
    loading = {"drafter": settings.folder, "pack_linear": settings.pack_linear, "dtype": settings.dtype}
    ways: dict[str, Any] = {"plain": (None, None), "drafted": ("hybrid", loading)}
    seconds, samples = dict.fromkeys(ways, 0.0), {name: list[dict[str, Any]]() for name in ways}
    for first in range(0, len(questions), AT_ONCE):
        for name, flag in ways.items():
            config = pair.target.generation_config
            config.speculation_type, config.speculation = flag
            harness = HFLM(pretrained=pair.target, tokenizer=pair.tokenizer, batch_size=1)
            began = time.perf_counter()
            samples[name] += asked(harness, questions[first : first + AT_ONCE])
            seconds[name] += time.perf_counter() - began
    for name, found in samples.items():
        right = sum(sample["exact_match"] for sample in found)
        speed = seconds["plain"] / seconds[name]
        Console().print(f"{name}: {right:.0f} of {len(found)} right, {seconds[name]:.0f} s, {speed:.2f}x")
    same = sum(a["resps"] == b["resps"] for a, b in zip(*samples.values(), strict=True))
    Console().print(f"samples: {same} of {len(questions)} the same")


if __name__ == "__main__":
    command(measure, None, __doc__)()
