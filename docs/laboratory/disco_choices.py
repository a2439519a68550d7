"""DISCO's table: every method with the numbers that validation records choose for it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from disco_baselines import (
    HF_LONGEST,
    LONGEST,
    Budgeted,
    Chosen,
    Heuristic,
    Perplexity,
    Recalibrated,
    Static,
    Threshold,
)
from hf_specdec.budget import Acceptance
from hf_specdec.drafters.disco import StopClassifier, StopRule
from hf_specdec.train.disco.records import Record
from hf_specdec.train.disco.simulation import Costs, Rule, Values, play, values_of
from hf_specdec.train.disco.tuning import chances, simulated_choices

LIMITS = (1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 6.0)
THRESHOLDS = tuple(0.05 * i for i in range(1, 20))
RATES = (0.03, 0.1, 0.3)
"""of recalibration, in log-odds per token"""
HF_THRESHOLD = 0.4
"""transformers' default"""


def seconds_of(values: Sequence[Values], make: Callable[[], Rule], costs: Costs, longest: int = LONGEST) -> float:
    """All texts under one rule, each with a rule of its own."""
    return sum(costs.seconds(play(value, make(), longest)) for value in values)


def choose_all(
    classifier: StopClassifier,
    plainer: StopClassifier,
    validation: Sequence[Record],
    test: Sequence[Record],
    costs: Costs,
    do_sample: bool,
) -> list[Chosen]:
    """Every method, tuned on validation records, with the test texts as it reads them.

    Args:
        plainer: a classifier that is told nothing of the lookup.
    """

    def top(records: Sequence[Record]) -> list[Values]:
        return [values_of(record, lambda x: x[..., 0]) for record in records]

    seen, held, own, own_held = (
        top(validation),
        top(test),
        *(chances(classifier, r, do_sample) for r in (validation, test)),
    )

    def best(grid: Sequence[Any], rule: Callable[[Any], Rule]) -> Any:
        return min(grid, key=lambda value: seconds_of(seen, lambda: rule(value), costs))

    gamma, limit, confidence = (
        best(range(1, LONGEST + 1), Static),
        best(LIMITS, Perplexity),
        best(THRESHOLDS, Threshold),
    )
    hindsight = min(range(1, LONGEST + 1), key=lambda g: seconds_of(held, lambda: Static(g), costs))
    chosen = [
        Chosen("static 5", "", held, lambda: Static(5)),
        Chosen("static optimal", f"γ {gamma}", held, lambda: Static(gamma)),
        Chosen("static, best on test", f"γ {hindsight}", held, lambda: Static(hindsight)),
        Chosen("transformers heuristic", "", held, Heuristic, longest=LONGEST),
        Chosen("transformers confidence", f"τ {HF_THRESHOLD}", held, lambda: Threshold(HF_THRESHOLD), HF_LONGEST),
        Chosen("confidence, tuned", f"τ {confidence:.2f}", held, lambda: Threshold(confidence)),
        Chosen("perplexity", f"≤ {limit}", held, lambda: Perplexity(limit)),
    ]
    for name in ("token", "draft"):
        found = simulated_choices(own, costs, [name])[0]  # type: ignore[list-item]
        drafter_rule = _disco_rule(name, found.tau)
        label = f"τ {found.tau}, SLmax {found.longest}"
        chosen.append(Chosen(f"DISCO, {name} rule", label, own_held, drafter_rule, found.longest, True))
    blind, blind_held = (chances(plainer, [blinded(r) for r in some], do_sample) for some in (validation, test))
    found = simulated_choices(blind, costs, ["draft"])[0]
    label = f"τ {found.tau}, SLmax {found.longest}"
    chosen.append(
        Chosen("draft rule, no lookup", label, blind_held, _disco_rule("draft", found.tau), found.longest, True)
    )
    grid = [(tau, rate) for tau in THRESHOLDS for rate in RATES]
    tau, rate = min(grid, key=lambda pair: seconds_of(own, lambda: Recalibrated(*pair), costs.with_rule()))
    label = f"τ {tau:.2f}, rate {rate}"
    chosen.append(Chosen("draft rule, recalibrated", label, own_held, lambda: Recalibrated(tau, rate), asks=True))

    def budgeted(name: str, before: list[Values], here: list[Values], asks: bool) -> Chosen:
        survival, paid = Acceptance(), costs.with_rule() if asks else costs
        seconds_of(before, lambda: Budgeted(survival, paid), paid)  # from whose texts it learns
        return Chosen(name, "", here, lambda: Budgeted(survival, paid), asks=asks)

    chosen.append(budgeted("budget, the draft's own chances", seen, held, False))
    chosen.append(budgeted("budget, DISCO without lookup", blind, blind_held, True))
    chosen.append(budgeted("DISCO, budget rule", own, own_held, True))
    chosen.append(Chosen("stops at a mistake", "", [told(value) for value in held], lambda: Threshold(0.5)))
    return chosen


def told(values: Values) -> Values:
    """For a rule that is told of each token, once it is drafted, whether it will be accepted."""
    return Values(
        [float(fine) for fine in values.accepted], [[0.0] * len(row) for row in values.after], values.accepted
    )


def blinded(record: Record) -> Record:
    """The record with nothing known of the lookup."""
    features, after = record.features.clone(), record.after.clone()
    features[..., -2:] = 0
    after[..., -2:] = 0
    return replace(record, features=features, after=after)


def _disco_rule(name: str, tau: float) -> Callable[[], Rule]:
    return lambda: StopRule(tau, name == "draft")
