"""Trainings on text that a target writes itself: what their settings have in common, and how one is interrupted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from questions import QUESTIONS

T = TypeVar("T")


def settings_for(target: Any, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Few questions and short answers, in a folder with the target."""
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    (folder / "data.txt").write_text("\n".join(QUESTIONS))
    few = {"own_prompts": 10, "max_new_tokens": 16, "rows": 16, "known_tokens": 80, "batch_size": 4, "held_out": 0.2}
    files = {"target": str(folder / "target"), "output": str(folder / "out"), "data": [str(folder / "data.txt")]}
    return {**files, **few, "dtype": "float32"}


def killed_at_times(trainer: Any, run: Callable[[], T], monkeypatch: pytest.MonkeyPatch) -> T:
    """What a training gives that is interrupted at every seventh step, and run again until it ends."""
    honest, steps = trainer.compute_loss, 0

    def dying(*arguments: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps % 7 == 0:
            raise KeyboardInterrupt
        return honest(*arguments, **options)

    monkeypatch.setattr(trainer, "compute_loss", dying)
    for _ in range(40):
        try:
            found = run()
            break
        except KeyboardInterrupt:
            continue
    assert steps > 14
    return found
