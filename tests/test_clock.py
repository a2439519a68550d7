"""All decisions that depend on time go by one clock, which can be replaced; nobody waits for ever by another one."""

import ast
import threading
import time
from pathlib import Path
from typing import Any

import clocks
import models
import pytest
import torch

from hf_specdec import DraftModelDrafter, HybridDrafter, PromptLookupDrafter, clock
from hf_specdec.clock import Deadline

PACKAGE = Path(clock.__file__).parent
TIMES = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns", "process_time", "sleep"}
"""names of the module `time` that no other file may use; what the hour is, a log may ask"""


def test_no_other_file_asks_for_the_time() -> None:
    wrong = [file for file in PACKAGE.rglob("*.py") if file.name != "clock.py" and _asked(file) & TIMES]
    assert not wrong and _asked(PACKAGE / "clock.py") & TIMES


def _asked(file: Path) -> set[str]:
    """Names of the module `time` that a file uses."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "time"}
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "time"]
    return read | {name.name for node in imports for name in node.names}


def test_a_clock_is_replaced_for_a_while_and_in_all_threads() -> None:
    seen: list[float] = []
    with clock.use(lambda: 7.0):
        thread = threading.Thread(target=lambda: seen.append(clock.now()))
        thread.start()
        thread.join()
        with pytest.raises(ZeroDivisionError), clock.use(lambda: 8.0):
            seen.append(clock.now())
            1 / 0  # noqa: B018
        seen.append(clock.now())
    assert seen == [7.0, 8.0, 7.0]


@pytest.mark.real_time
def test_the_package_goes_by_the_clock_that_all_processes_share() -> None:
    before = time.perf_counter()
    assert before <= clock.now() <= time.perf_counter()


def test_nobody_waits_by_a_clock_that_stands_still() -> None:
    with clock.use(lambda: 0.0):
        short, endless = Deadline(0.01), Deadline(float("inf"))
        short.sleep()
        assert short.over and short.left == 0.0
        assert not endless.over and endless.left == float("inf")
        assert Deadline(float("nan")).over


@pytest.mark.eager  # the first call's trial takes time
def test_what_a_call_decides_is_the_same_on_a_clock_of_set_times() -> None:
    """And whatever it decides on others, the text is."""
    model, draft = models.llama(), models.llama(num_hidden_layers=1)
    seen = []
    for times in [clocks.set_times(), clocks.set_times(), clocks.jumping(0), clocks.jumping(1)]:
        clocks.forget()
        drafter = DraftModelDrafter(draft)
        with times:
            text = model.generate(
                **models.prompts([7, 4]), assistant_model=drafter, max_new_tokens=40, do_sample=False, pad_token_id=0
            )
        seen.append((text, drafter.last_stats.verify_widths, drafter.last_stats.total_seconds))
    assert all(torch.equal(text, seen[0][0]) for text, _, _ in seen)
    assert seen[0][1:] == seen[1][1:]


@pytest.mark.parametrize("make", [lambda draft: PromptLookupDrafter(), DraftModelDrafter, HybridDrafter])
def test_a_clock_that_stands_still_costs_no_drafter(make: Any) -> None:
    model, drafter = models.llama(), make(models.llama(num_hidden_layers=1))
    call = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    with clock.use(lambda: 0.0):
        text = model.generate(**models.prompts([7]), **call, assistant_model=drafter)
    assert torch.equal(text, model.generate(**models.prompts([7]), **call))
    assert not any("dropped" in note for note in drafter.last_stats.notes)
