"""Copies that join draws: how draws are tested must not depend on what was drawn."""

from collections import Counter
from typing import Any

import pytest
import torch
import toy_drafters as toys

from hf_specdec.budget import Acceptance, Controller, Evidence, Experience
from hf_specdec.drafters.chains import ChainSession
from hf_specdec.drafters.rules import Planned
from hf_specdec.drafters.sources import Source
from hf_specdec.drafters.steps import Step, Steps
from hf_specdec.engine.fitting import checked_draft, fit
from hf_specdec.protocol import Forward, Sequences
from hf_specdec.stats import SpeculationStats
from hf_specdec.verify.judging import Judge
from hf_specdec.verify.processing import Processing
from hf_specdec.verify.randomness import Randomness
from hf_specdec.verify.rules import Rules
from hf_specdec.verify.trial import Trial

P = torch.tensor([[0.4, 0.4, 0.2], [0.05, 0.9, 0.05], [0.3, 0.3, 0.4], [0.2, 0.2, 0.6]])
"""of the target, behind the text and behind each first token"""
Q = torch.tensor([[0.8, 0.1, 0.1], [0.3, 0.5, 0.2], [0.3, 0.3, 0.4], [0.5, 0.3, 0.2]])
"""of the draft"""
ROUNDS = 4000
"""a difference of 0.04 in the chance of a token is seen in 999 of 1,000 tests at the level of five deviations"""


class Two(Steps):
    """Two draws."""

    unread = 0

    def __init__(self, context: Any) -> None:
        self.context = context

    def room(self, sequences: Sequences) -> int:
        return 9

    def begin(self, sequences: Sequences, steps: int, planned: int = 0) -> None:
        self.steps, self.state = 0, 0

    def step(self) -> Step:
        q = Q[self.state][None]
        token = torch.multinomial(q, 1)
        self.steps, self.state = self.steps + 1, 1 + int(token)
        return Step(token, q=q)

    def observe(self, *_: Any) -> None:
        """It learns nothing."""


class Copy(Source):
    """Says what the draws often say: where they do, nodes make a chain."""

    name, kind = "copied", "prompt_lookup"

    def join(self, trees: Any, sequences: Sequences, room: list[int]) -> None:
        for tree in trees:
            tree.add(tree.add(-1, 0, 0.6, Evidence.of("copied")), 1, 0.6, Evidence.of("copied"))


@pytest.mark.parametrize("nodes", [9, 2], ids=["copies", "draws alone"])
@pytest.mark.parametrize("verification", ["block", "token"])
def test_the_first_token_has_the_targets_distribution(verification: Any, nodes: int) -> None:
    torch.manual_seed(0)
    first: Counter[int] = Counter()
    for seed in range(ROUNDS):
        context = toys.context(do_sample=True, trees=True, vocab_size=3)
        control = Controller(context, Experience(), 2, alone=False)
        session = ChainSession(context, Two(context), Planned(control), 1, Acceptance(), [Copy()])
        sequences = Sequences(torch.zeros(1, 64, dtype=torch.long), [1], [0], [[1]])
        draft = fit(checked_draft(session.propose(sequences, [9]), [9], 3), [nodes], context, [None])
        assert draft.parents is not None, "a tree, whatever was drawn"
        states = [
            0,
            *(1 + token if depth == 1 else 3 for token, depth in zip(draft.tokens[0], draft.depths()[0], strict=True)),
        ]
        forward = Forward(P[torch.tensor(states)].log()[None])
        rules, stats = Rules(verification=verification), SpeculationStats()
        judge = Judge(Processing([]), lambda ids, scores: scores, True, Randomness(seed), stats, rules)
        first[judge.verify(Trial(draft, forward, sequences))[0].tokens[0]] += 1
    for token, p in enumerate(P[0].tolist()):
        assert abs(first[token] / ROUNDS - p) < 5 * (p * (1 - p) / ROUNDS) ** 0.5, (first, P[0])
