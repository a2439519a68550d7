"""What whoever follows one greedy hybrid call meets: types, functions, and calls a round.

Run as `python docs/laboratory/round_trace.py`. A small random Llama drafts for itself, one row, the second call of
two, on a clock that only forwards move. Counted are this package's own functions, and its own types among what these
are given; `--names` lists both.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

import hf_specdec
from hf_specdec import HybridDrafter, clock
from hf_specdec.engine.engine import Engine

PACKAGE = hf_specdec.__name__
SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": None}
SIZES |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}


@contextmanager
def set_times() -> Iterator[None]:
    """Every forward takes a millisecond, and everything else no time."""
    forwards, stock = 0, LlamaForCausalLM.__call__

    def counted(model: LlamaForCausalLM, *args: Any, **kwargs: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return stock(model, *args, **kwargs)

    LlamaForCausalLM.__call__ = counted
    with clock.use(lambda: forwards * 1e-3):
        yield
    LlamaForCausalLM.__call__ = stock


class Met:
    """Noted while `noting`."""

    def __init__(self) -> None:
        self.types: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()

    @contextmanager
    def noting(self) -> Iterator[None]:
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        code = frame.f_code
        if event != "call" or not name.startswith(PACKAGE):
            return
        self.functions[f"{name}.{code.co_qualname}"] += 1
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for kind in {type(frame.f_locals[name]) for name in given if name in frame.f_locals}:
            if kind.__module__.startswith(PACKAGE):
                self.types[f"{kind.__module__}.{kind.__qualname__}"] += 1


def main(names: Annotated[bool, typer.Option(help="List them, with how often each was met.")] = False) -> None:
    """Count what a call meets, and its rounds alone."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    prompt, drafter = torch.randint(1, 64, (1, 12)), HybridDrafter(model)
    call: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False, "assistant_model": drafter}
    whole, rounds, play, count = Met(), Met(), Engine.play_round, 0

    def noted(engine: Engine) -> None:
        nonlocal count
        count += 1
        with rounds.noting():
            play(engine)

    with set_times():
        model.generate(prompt, **call)
        with whole.noting():
            model.generate(prompt, **call)
        Engine.play_round = noted  # type: ignore[assignment, method-assign]
        model.generate(prompt, **call)
    if names:
        for met in (whole.types, whole.functions):
            print("\n".join(f"{n:6} {name}" for name, n in met.most_common()), end="\n\n")
    print(f"types {len(whole.types)}, functions {len(whole.functions)}")
    print(f"calls a round {rounds.functions.total() / count:.0f}, in {count} rounds")


if __name__ == "__main__":
    typer.run(main)
