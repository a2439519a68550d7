"""Published heads against the classes that they are published with."""

import pytest
import torch
from references import KINDS, reference, told_here


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_classes_that_it_is_published_with(kind: str) -> None:
    _, told = reference(kind)
    for i, (anchor, expected) in enumerate(zip(told.anchors.tolist(), told.logits, strict=True)):
        logits, said = told_here(kind, anchor)
        known = logits if logits.shape[1] == expected.shape[1] else logits[:, logits[0] > torch.finfo(logits.dtype).min]
        torch.testing.assert_close(known, expected[-len(known) :], rtol=1e-5, atol=1e-5)
        if told.confidence is not None:
            chances = torch.sigmoid(told.confidence[i])[-len(known) :]
            torch.testing.assert_close(torch.cat(said), chances, rtol=1e-5, atol=1e-5)  # type: ignore[arg-type]
