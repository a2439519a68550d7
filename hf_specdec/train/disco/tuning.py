"""τ and SLmax for least latency: simulated over validation records with measured costs, then confirmed by the clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...clock import now
from ...drafters.disco.classifier import StopClassifier, read
from ...drafters.disco.drafter import DiscoDrafter
from ...drafters.disco.rules import StopRule
from ...target.devices import input_device
from ...theory import interpolate_widths
from ...tools.instruments.bare import time_bare_forwards
from ...tools.instruments.meter import Forward
from ...tools.loading.chat import batch, prompt_ids
from ...tools.loading.prompts import Prompt
from .extraction import Regime
from .records import Record
from .simulation import Costs, Values, play, values_of

TAUS = tuple(round(0.02 * i, 2) for i in range(1, 50))
LONGEST = (4, 6, 8, 12, 16, 24, 32)
WIDTHS = (1, 2, 3, 5, 9, 17, 33)
FINALISTS = 3
"""choices per rule that are confirmed by the clock"""

RuleName = Literal["token", "draft"]


@dataclass(frozen=True)
class Choice:
    """A stop rule's free numbers, and what they cost."""

    rule: RuleName
    tau: float
    longest: int
    seconds: float
    """for the validation texts: simulated, or measured where the clock decided"""


@torch.no_grad()
def measure_costs(target: PreTrainedModel, draft: PreTrainedModel, classifier: StopClassifier) -> Costs:
    """Bare forwards at a cache of 128 tokens, and the stop rule by itself."""
    forwards = [Forward("target", 1, width, 128, 0.0) for width in WIDTHS] + [Forward("draft", 1, 1, 128, 0.0)]
    ids = torch.ones(1, 128 + max(WIDTHS), dtype=torch.long, device=input_device(target))
    table = time_bare_forwards({"target": target, "draft": draft}, forwards, ids)
    verify = interpolate_widths({width: table["target", 1, width] for width in WIDTHS})
    return Costs(table["draft", 1, 1], verify, rule_seconds(draft, classifier))


@torch.no_grad()
def rule_seconds(draft: PreTrainedModel, classifier: StopClassifier, repeats: int = 200) -> float:
    """What the stop rule adds to a draft step: features, classifier, and the way to the host."""
    vocab = draft.config.get_text_config(decoder=True).vocab_size
    chance = classifier.reader(do_sample=False)
    logits = torch.randn(1, vocab, device=input_device(draft), dtype=draft.dtype)
    seconds = []
    for _ in range(repeats):
        began = now()
        chance(read(logits, classifier.k), [5], [7])
        seconds.append(now() - began)
    return sorted(seconds)[repeats // 2]


def chances(classifier: StopClassifier, records: Sequence[Record], do_sample: bool) -> list[Values]:
    """What the stop rule reads of each text: C at every position."""
    return [values_of(record, lambda x: classifier(x)[..., int(do_sample)].sigmoid()) for record in records]


def simulated_choices(values: Sequence[Values], costs: Costs, rules: Sequence[RuleName]) -> list[Choice]:
    """Every τ and SLmax of the grid, fastest first; each drafted token pays for asking the classifier."""
    costs = costs.with_rule()
    reach = max((len(row) for value in values for row in value.after), default=0) + 1
    longest_ones = [longest for longest in LONGEST if longest <= reach] or [reach]
    found = []
    for name in rules:
        for longest in longest_ones:
            for tau in TAUS:
                rule = StopRule(tau, name == "draft")
                seconds = sum(costs.seconds(play(value, rule, longest)) for value in values)
                found.append(Choice(name, tau, longest, seconds))
    return sorted(found, key=lambda choice: choice.seconds)


def measured_choice(
    target: PreTrainedModel,
    drafter: Callable[[Choice], DiscoDrafter],
    choices: Sequence[Choice],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    regime: Regime,
) -> Choice:
    """The choice that decodes the prompts in the least time. Choices take turns at each prompt."""
    totals = [0.0] * len(choices)
    drafters = [drafter(choice) for choice in choices]
    for number, prompt in enumerate(tqdm(prompts, desc="timing the best stop rules", unit=" prompts")):
        inputs = batch([prompt_ids(tokenizer, prompt)], tokenizer.pad_token_id, input_device(target))
        for turn in range(len(choices)):
            i = (turn + number) % len(choices)
            torch.manual_seed(regime.seed + number)
            began = now()
            target.generate(
                **inputs,
                assistant_model=drafters[i],
                pad_token_id=tokenizer.pad_token_id,
                **regime.options(),
            )
            if number:  # the first prompt warms up
                totals[i] += now() - began
    best = min(range(len(choices)), key=totals.__getitem__)
    return Choice(choices[best].rule, choices[best].tau, choices[best].longest, totals[best])
