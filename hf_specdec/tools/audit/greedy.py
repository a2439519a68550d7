"""Greedy calls, with a method and plainly: the same tokens, and an end at the same place."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import StoppingCriteria

from ...errors import shown
from ...target.devices import input_device
from ..bench.method import Method
from ..bench.methods import PLAIN
from ..instruments.audit import Audit
from ..instruments.forwards import wrapped_forward
from ..loading.chat import batch
from .findings import Finding, of_texts

MOST_STOPS = 2
"""prompts on which every way to stop is tried"""


@dataclass
class Greedy:
    """The calls of one target."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: list[list[int]]
    max_new_tokens: int
    plainly: Method = field(default_factory=lambda: Method(PLAIN))
    """what all others are compared with"""

    def __post_init__(self) -> None:
        self.options = {"max_new_tokens": self.max_new_tokens, "do_sample": False, "min_new_tokens": 0}
        self.options |= {"pad_token_id": self.tokenizer.pad_token_id}
        self.inputs = [self._inputs([prompt]) for prompt in self.prompts]
        self.plain = [self.say(self.plainly, inputs)[0] for inputs in self.inputs]
        """plain decoding's new tokens of each prompt"""
        self.together = self.say(self.plainly, self._inputs(self.prompts))
        """plain decoding's new tokens of all prompts in one batch"""

    def findings(self, method: Method) -> Iterator[Finding]:
        """Test by test."""
        yield self.guarded("greedy text", lambda: self._identity(method))
        yield self.guarded("greedy batch", lambda: self._batch(method))
        for name, test in (
            ("stops at an EOS token", self._ends),
            ("stops at a stop string", self._strings),
            ("obeys your criteria", self._criteria),
            ("keeps to max_new_tokens", self._lengths),
            ("streams what it returns", self._streams),
        ):
            yield self.guarded(name, lambda name=name, test=test: self._stops(method, name, test))  # type: ignore[misc]

    def guarded(self, name: str, test: Callable[[], Finding]) -> Finding:
        """A call that raises before the target runs counts as refused, one that raises later as wrong."""
        self.begun = False
        try:
            return test()
        except Exception as error:
            if not self.begun and isinstance(error, (ValueError, NotImplementedError)):
                return Finding(name, True, "refused", [f"refused: {shown(error)}"], refused=True)
            return Finding(name, False, "raised", [f"it raised {shown(error)}"])

    def say(self, method: Method, inputs: dict[str, Tensor], **options: Any) -> list[list[int]]:
        """A method's new tokens of each row, padding included."""
        self.begun = False

        def seen(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.begun = True
            return forward(*args, **kwargs)

        with wrapped_forward(self.target, seen, lambda run, *_: run()):
            return method.generate(self.target, inputs, **self.options | options)

    def _inputs(self, rows: list[list[int]]) -> dict[str, Tensor]:
        return batch(rows, self.tokenizer.pad_token_id, input_device(self.target))

    # ------------------------------------------------------------------ the same tokens

    def _identity(self, method: Method) -> Finding:
        """One prompt at a time."""
        told = [self._parting(number, self.say(method, self.inputs[number])[0]) for number in range(len(self.prompts))]
        return of_texts("greedy text", told)

    def _batch(self, method: Method) -> Finding:
        """All prompts at once: what plain decoding says of that very batch."""
        if len(self.prompts) == 1:
            return Finding("greedy batch", True, "one prompt only")
        rows = self.say(method, self._inputs(self.prompts))
        told = [self._parting(b, row, self.together[b]) for b, row in enumerate(rows)]
        return of_texts("greedy batch", told)

    def _parting(self, number: int, said: list[int], plain: list[int] | None = None) -> tuple[bool, str] | None:
        """Whether rounding explains where a text leaves plain decoding's, and a sentence; None for the same text."""
        prompt = torch.tensor([self.prompts[number]], device=input_device(self.target))
        plain = self.plain[number] if plain is None else plain
        found = Audit(self.target, prompt, plain, pad_token_id=self.tokenizer.pad_token_id).difference(said)
        if found is None:
            return None
        return found.near_tie, f"prompt {number + 1} {found.said(self.tokenizer)}"

    # ------------------------------------------------------------------ the same end

    def _stops(self, method: Method, name: str, test: Callable[[Method, int], str]) -> Finding:
        """A way to stop, on the first prompts that say enough."""
        said = []
        numbers = [number for number, text in enumerate(self.plain) if len(text) >= 8][:MOST_STOPS]
        for number in numbers:
            if wrong := test(method, number):
                said.append(f"prompt {number + 1}: {wrong}")
        if not numbers:
            return Finding(name, True, "no text is long enough")
        return Finding(name, not said, f"{len(numbers) - len(said)} of {len(numbers)}", said)

    def _same(self, method: Method, number: int, most: int | None = None, **options: Any) -> str:
        """What is wrong with a call that plain decoding answers as well; nothing where rounding explains it.

        Args:
            most: new tokens that a criterion of one's own lets pass.
        """

        def fresh() -> dict[str, Any]:
            columns = len(self.prompts[number])
            return {} if most is None else {"stopping_criteria": [_Long(columns + most)]}

        plain = self.say(self.plainly, self.inputs[number], **options, **fresh())[0]
        said = self.say(method, self.inputs[number], **options, **fresh())[0]
        if said == plain:
            return ""
        parting = self._parting(number, said, plain)
        if parting is not None and parting[0]:
            return ""
        return f"{len(said)} tokens, plain decoding {len(plain)}"

    def _middle(self, number: int) -> int:
        """A place in plain decoding's text whose token comes there for the first time."""
        text = self.plain[number]
        fresh = [i for i in range(2, len(text) - 1) if text[i] not in text[:i]]
        return min(fresh, key=lambda i: abs(i - len(text) // 2), default=len(text) // 2)

    def _ends(self, method: Method, number: int) -> str:
        """A list of two, of which the second comes."""
        text = self.plain[number]
        absent = next(token for token in range(len(text) + 1) if token not in text)
        return self._same(method, number, eos_token_id=[absent, text[self._middle(number)]])

    def _strings(self, method: Method, number: int) -> str:
        at = self._middle(number)
        words = self.tokenizer.decode(self.plain[number][at : at + 2])
        if not words.strip():
            return ""
        return self._same(method, number, stop_strings=[words], tokenizer=self.tokenizer)

    def _criteria(self, method: Method, number: int) -> str:
        lengths = (1, 4, len(self.plain[number]) // 2)
        return next(filter(None, (self._same(method, number, most) for most in lengths)), "")

    def _lengths(self, method: Method, number: int) -> str:
        return next(filter(None, (self._same(method, number, max_new_tokens=most) for most in (1, 2, 5))), "")

    def _streams(self, method: Method, number: int) -> str:
        heard = _Heard()
        said = self.say(method, self.inputs[number], streamer=heard)[0]
        if heard.tokens != [*self.prompts[number], *said]:
            return f"{len(heard.tokens) - len(self.prompts[number])} tokens streamed, {len(said)} returned"
        return "" if heard.ended else "the streamer's end() was not called"


class _Long(StoppingCriteria):
    """Ends a text at so many columns, and never sees more."""

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(ids),), ids.shape[1] >= self.columns, device=ids.device)


class _Heard:
    """A streamer that remembers."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, tokens: Tensor) -> None:
        self.tokens += tokens.flatten().tolist()

    def end(self) -> None:
        self.ended = True
