"""What is recorded of a round is what was drafted in it, chains and trees alike."""

import pytest
import torch
from models import VOCAB, llama
from toy_drafters import Future, Toy

from hf_specdec.protocol import Draft
from hf_specdec.tools.instruments.recording import RecordingDrafter

PROMPT = torch.tensor([[5, 9, 3, 17]])


def other(token: int) -> int:
    return (token + 1) % VOCAB


SHAPES = {
    "chain": (lambda x, y, z: [(x, -1), (other(y), 0), (z, 1)], lambda x, y, z: ([x, other(y), z], other(y))),
    "rejected at once": (
        lambda x, y, z: [(other(x), -1), (other(y), 0), (other(other(x)), -1)],
        lambda x, y, z: ([other(x), other(y)], other(x)),
    ),
    "rejected below another branch": (
        lambda x, y, z: [(other(x), -1), (x, -1), (y, 0), (other(y), 1), (z, 3)],
        lambda x, y, z: ([x, other(y), z], other(y)),
    ),
    "accepted to a leaf": (lambda x, y, z: [(other(x), -1), (x, -1), (y, 0)], lambda x, y, z: ([x], None)),
    "the same token twice": (
        lambda x, y, z: [(x, -1), (x, -1), (other(y), 1)],
        lambda x, y, z: ([x, other(y)], other(y)),
    ),
}
"""(token, parent) of each node where plain decoding goes on with x, y, z → what is recorded, and the rejected token"""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_round_holds_what_was_drafted(shape: str) -> None:
    nodes, recorded = SHAPES[shape]
    target = llama().eval()
    future = Future(plain := target.generate(PROMPT, max_new_tokens=20, do_sample=False))

    def propose(context, sequences, room):
        (truth,) = future(sequences, room, 3)
        if len(truth) < 3:
            return Draft.from_lists([[]])
        tokens, parents = zip(*nodes(*truth), strict=True)
        chain = parents == tuple(range(-1, len(parents) - 1))
        return Draft(torch.tensor([tokens]), [len(tokens)], None if chain else torch.tensor([parents]))

    recorder = RecordingDrafter(Toy(propose, trees=True))
    output = target.generate(PROMPT, max_new_tokens=20, do_sample=False, assistant_model=recorder)
    assert torch.equal(output, plain)
    at, seen = PROMPT.shape[1] + 1, 0
    for r in recorder.rounds:
        truth = plain[0, at : at + 3].tolist()
        if r.drafted:
            assert (r.draft, r.rejected) == recorded(*truth)
            seen += 1
        at += len(r.tokens)
    assert seen > 3 and at == plain.shape[1]
