"""Train the stop classifier on records, and say how good it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import trange

from ...drafters.disco.classifier import EXTRA, StopClassifier
from ...errors import SpeculationError
from .records import Record

BATCH = 1024
LEARNING_RATE = 1e-2
PATIENCE = 8
"""epochs without a better validation loss before training stops"""
SMALLEST_EPOCH = 32
"""steps that an epoch has at least, so that little data is looked at often enough"""


@dataclass(frozen=True)
class Quality:
    """How well the classifier tells accepted tokens from rejected ones, on records it was not trained on."""

    f1: float
    """of "accepted", at a chance of one half"""
    f1_always: float
    """of a rule that expects every token to be accepted"""
    calibration_error: float
    """mean distance of predicted and observed acceptance over ten bins, weighted by how full they are"""


def fit(
    training: Mapping[bool, Sequence[Record]],
    validation: Mapping[bool, Sequence[Record]],
    hidden: int = 32,
    epochs: int = 100,
    seed: int = 0,
) -> StopClassifier:
    """Train until the validation loss stops falling.

    The loss is the cross-entropy between the predicted chance C and the chance that the drafted token x is accepted,
    min(1, p(x) / q(x)), of which the mean over q is 1 − TV(p, q); greedy decoding makes p and q point masses, and the
    chance the paper's label.

    Args:
        training, validation: records by regime: False is greedy, True is sampled. Both must have the same regimes.

    Raises:
        SpeculationError: no records, or records of one class only: all tokens accepted, or none.
    """
    torch.manual_seed(seed)
    x, regime, label = _stack(training)
    for do_sample in training:
        mean = float(label[regime == int(do_sample)].mean())
        if min(mean, 1 - mean) < 1e-6:
            name = "sampled" if do_sample else "greedy"
            raise SpeculationError(
                f"the {name} training records hold {'accepted' if mean > 0.5 else 'rejected'} tokens only, so "
                "there is nothing to learn; give more data, or use a fixed window "
                "(speculation_type='draft_model')"
            )
    classifier = StopClassifier(x.shape[1] - EXTRA, hidden, sees_token=True)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=LEARNING_RATE, weight_decay=1e-3)
    held_out = _stack(validation)
    best, best_loss, waited = classifier.state_dict(), float("inf"), 0
    steps = max(SMALLEST_EPOCH, len(x) // BATCH)
    bar = trange(epochs, desc="training the stop classifier", unit=" epochs")
    for epoch in bar:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - epoch / epochs)
        for _ in range(steps):
            some = torch.randint(len(x), (min(BATCH, len(x)),))
            loss = _loss(classifier, x[some], regime[some], label[some])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            now = float(_loss(classifier, *held_out))
        bar.set_postfix(loss=f"{now:.4f}")
        waited += 1
        if now < best_loss - 1e-5:
            best, best_loss, waited = {n: w.clone() for n, w in classifier.state_dict().items()}, now, 0
        if waited == PATIENCE:
            break
    classifier.load_state_dict(best)
    return classifier.requires_grad_(False)


def quality(classifier: StopClassifier, records: Sequence[Record], do_sample: bool) -> Quality:
    """F1 and calibration against what was accepted."""
    chance = classifier(torch.cat([r.features for r in records]))[:, int(do_sample)].sigmoid()
    accepted = torch.cat([r.accepted for r in records])
    bins = (chance * 10).long().clamp(max=9)
    lost = sum(float((chance - accepted.float())[bins == i].sum().abs()) for i in range(10))
    return Quality(f1(chance >= 0.5, accepted), f1(torch.ones_like(accepted), accepted), lost / len(chance))


def f1(predicted: Tensor, actual: Tensor) -> float:
    """2 TP / (2 TP + FP + FN) of two boolean tensors."""
    hits = int((predicted & actual).sum())
    return 2 * hits / max(1, int(predicted.sum()) + int(actual.sum()))


def _stack(records: Mapping[bool, Sequence[Record]]) -> tuple[Tensor, Tensor, Tensor]:
    """Features [N, k + 6], regime [N], chance of acceptance [N] of all tokens."""
    if not records or any(not some for some in records.values()):
        raise SpeculationError("there are no records to train on; give at least one prompt")
    x = torch.cat([r.features for some in records.values() for r in some])
    label = torch.cat([r.chance for some in records.values() for r in some])
    sizes = {do_sample: sum(map(len, some)) for do_sample, some in records.items()}
    regime = torch.cat([torch.full((n,), int(do_sample)) for do_sample, n in sizes.items()])
    return x, regime, label


def _loss(classifier: StopClassifier, x: Tensor, regime: Tensor, label: Tensor) -> Tensor:
    logit = classifier(x).gather(1, regime[:, None])[:, 0]
    return binary_cross_entropy_with_logits(logit, label)
