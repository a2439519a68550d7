"""What serial decoding and Figure 3's schedule would take for the very texts of a run, without any overhead."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_specdec.drafters.pearl import Timeline
from hf_specdec.tools.instruments.recording import Round

WINDOWS = range(1, 25)
TRIALS = 200
"""sampled texts of one acceptance record over which the serial bound is averaged"""


def serial_seconds(accepts: list[list[float]], window: int, ratio: float, step: float) -> float:
    """Serial decoding without overhead, from the probability that the draft of each token is accepted.

    Args:
        accepts: per text, per token after the first; 0 or 1 where it is known.
        step: seconds of a draft step; the target takes `ratio` of them. The draft's prefill counts as a step.
    """
    total = 0.0
    for probabilities in accepts:
        trials = 1 if all(p in (0.0, 1.0) for p in probabilities) else TRIALS
        coins = torch.rand(trials, len(probabilities), generator=torch.Generator().manual_seed(0))
        for passed in (coins < torch.tensor(probabilities)).tolist():
            at, seconds = 0, step
            while at < len(passed):
                drafted = min(window, len(passed) - at - 1)
                run = next((i for i in range(drafted) if not passed[at + i]), drafted)
                at += run + 1
                seconds += step * (drafted + ratio)
            total += seconds / trials
    return total


def pearl_seconds(line: Timeline, window: int, ratio: float, step: float) -> float:
    """Figure 3's schedule of one row without overhead: a round that passes all tests waits for γ draft steps, as does
    one whose correction was foreseen; others wait for one."""
    whole, short = max(ratio, window) * step, max(ratio, 1.0) * step
    rounds = zip(line.tests, line.corrections, strict=True)
    return step + sum(whole if tested == accepted or hits else short for (tested, accepted), (_, hits) in rounds)


@torch.no_grad()
def acceptances(target: Any, draft: Any, ids: Tensor, prompt: int, temperature: float) -> list[float]:
    """Of every new token x after the first, the chance that it came out of an acceptance: min(p, q)(x) / p(x), or
    whether the greedy choices agree."""
    p, q = (model(ids).logits[0, prompt : ids.shape[1] - 1].float() for model in (target, draft))
    if not temperature:
        return (p.argmax(-1) == q.argmax(-1)).float().tolist()
    p, q = ((x / temperature).softmax(-1).gather(1, ids[0, prompt + 1 :, None])[:, 0] for x in (p, q))
    return (q / p).clamp(max=1.0).tolist()


def outcomes(rounds: Sequence[Round], chances: list[float]) -> list[float]:
    """The same where it is known what was accepted: all but the target's own tokens behind a draft that passed."""
    known: list[float] = []
    for one in rounds:
        known += [1.0] * one.accepted
        if one.rejected is not None:
            known.append(0.0)
        known += chances[len(known) : len(known) + len(one.tokens) - one.accepted - (one.rejected is not None)]
    return known
