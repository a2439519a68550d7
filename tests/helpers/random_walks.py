"""Texts that have something to learn in them."""

import numpy as np


def documents(vocab, count=60, seed=0):
    """Random walks that like some steps more than others."""
    dice = np.random.default_rng(seed)
    steps = dice.dirichlet(np.full(vocab, 0.3), size=vocab)
    texts = []
    for _ in range(count):
        text = [int(dice.integers(vocab))]
        for _ in range(dice.integers(0, 40)):
            text.append(int(dice.choice(vocab, p=steps[text[-1]])))
        texts.append(text)
    return texts
