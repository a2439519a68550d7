"""Published heads against the classes that they are published with."""

import pytest
import torch
from references import KINDS, logits_here, reference


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_classes_that_it_is_published_with(kind: str) -> None:
    _, told = reference(kind)
    for anchor, expected in zip(told.anchors.tolist(), told.logits, strict=True):
        logits = logits_here(kind, anchor)
        known = logits[:, logits[0] > torch.finfo(logits.dtype).min]
        torch.testing.assert_close(known, expected[-len(known) :], rtol=1e-5, atol=1e-5)
