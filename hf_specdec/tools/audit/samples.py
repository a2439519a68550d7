"""Two samples of texts, and how likely they are to be of one distribution."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from .findings import Finding

PLACES, WORDS = 4, 3
"""tokens that are looked at together, behind the prompt's own; each is one of the likeliest, or another"""
SAMPLED_PROMPTS = 2
LEAST_EXPECTED, LEVEL, POWER = 5, 1e-3, 0.9

Sample = list[tuple[int, ...]]
"""the tokens in `PLACES` of each text"""


def of_samples(pairs: Sequence[tuple[Sample, Sample]], unit: str = "tokens") -> Finding:
    """Plain samples and a method's, of each prompt: the smallest p-value, times how many there are."""
    tested = [two_samples(plain, drawn) for plain, drawn in pairs]
    p, power = min(1.0, len(tested) * min(p for p, _ in tested)), max(found for _, found in tested)
    detail = (
        f"{PLACES} {unit} of {len(pairs[0][0])} sampled texts, for each of {len(tested)} prompts, with plain "
        f"decoding and with the method; a difference in {power:.0%} of the probability mass would be found "
        f"{POWER:.0%} of the time, at a significance level of {LEVEL:g}"
    )
    return Finding("sampled distribution", p >= LEVEL, f"p = {p:.2g}", [detail])


def two_samples(a: Sample, b: Sample) -> tuple[float, float]:
    """The p-value of a chi-square test that two samples of texts are of one distribution, and the total variation
    distance, over its cells, that it finds with a power of `POWER`.

    A cell is what stands in each place: one of the likeliest tokens of both samples there, or any other. Both make the
    cells alike, so that they favour no side.
    """
    from scipy import optimize, stats

    both = a + b
    known = [dict(Counter(text[i] for text in both).most_common(WORDS)).keys() for i in range(len(both[0]))]
    cells = [tuple(token if token in known[i] else -1 for i, token in enumerate(text)) for text in both]
    share = min(len(a), len(b)) / len(both)
    common = {cell for cell, count in Counter(cells).items() if count * share >= LEAST_EXPECTED}
    names = sorted(common)
    sides = [Counter(cell if cell in common else None for cell in part) for part in (cells[: len(a)], cells[len(a) :])]
    columns = [*names, None] if any(side[None] for side in sides) else names
    table = np.array([[side[cell] for cell in columns] for side in sides])
    if table.shape[1] < 2:
        return 1.0, 1.0  # every text falls into one cell: nothing can be told apart
    p = float(stats.chi2_contingency(table, correction=False).pvalue)
    freedom = table.shape[1] - 1
    threshold = stats.chi2.ppf(1 - LEVEL, freedom)
    needed = optimize.brentq(lambda nc: stats.ncx2.sf(threshold, freedom, nc) - POWER, 1e-9, 1e4)
    size = len(a) * len(b) / len(both)
    return p, min(1.0, float((needed / size) ** 0.5) / 2)  # Σ d² / p ≥ (Σ |d|)², the square of twice the distance
