"""`DraftSession`: what drafts for one call. A simple drafter writes `propose` and nothing else."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import CandidateGenerator

from .protocol import Draft, DraftContext, Feature, Runner, Sequences, Verdict


class DraftSession(CandidateGenerator):
    """One generation. It is made before the prompt's forward. The engine calls, in every round: `start_draft`, `poll`
    and `take`, then `observe`; the last alone in rounds without room for a draft, and where drafts are paused.

    Background drafters override those; all others write `propose`. It is also a transformers `CandidateGenerator`
    (batch 1), which can be constructed into transformers' own assisted loop.
    """

    patience: float = 60.0
    """seconds a draft may take before the drafter is given up; 60 where a session sets none"""
    weighs: bool = False
    """whether it is never paused: it weighs by itself what a draft gains against what it costs, or does what the user
    has asked for; others are paused where they lose"""
    features: Sequence[Feature] = ()
    """what verdicts shall carry of the target's forwards beside tokens"""
    likeliest: int = 0
    """how many of the tokens that the target finds likeliest at each place verdicts shall carry"""
    slots_per_token: int = 1
    """of the cache that a runner of its own takes for each token of a forward"""
    drafts_early: bool = False
    """whether `draft_early` is to be called"""
    spent: float = 0.0
    """seconds that the present draft is said to have taken, in calls that go by no clock"""

    def __init__(self, context: DraftContext) -> None:
        self.context = context
        self._draft: Draft | None = None

    @abstractmethod
    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        """Draft at most `room[b]` tokens (tree depth) for each row. An empty draft is fine."""

    def runner(self, runner: Runner) -> Runner:
        """A runner of its own around the engine's, for drafts that come out of the verification forward."""
        return runner

    def observe_prompt(self, verdict: Verdict) -> None:
        """The prompt was read: the verdict on an empty draft, with the target's first token."""

    def start_draft(self, sequences: Sequences, room: list[int]) -> None:
        """Begin to draft. A serial session drafts here and now."""
        self._draft = self.propose(sequences, room)
        if self._draft is None:
            raise TypeError(f"{type(self).__name__}.propose returned None instead of a Draft")

    def poll(self) -> bool:
        """Is the whole draft there?"""
        return self._draft is not None

    def take(self) -> Draft:
        """The draft, or as much of it as is there. Called once per round."""
        draft, self._draft = self._draft, None
        assert draft is not None, "take() follows start_draft()"
        return draft

    def draft_early(self, n: Tensor, last: Tensor) -> None:
        """Begin the next draft before the host knows behind what. It may turn out not to be wanted.

        Args:
            n: [B] on the device, how many tokens of the draft taken last are accepted.
            last: [B, 2] on the device, the last two tokens of each text then.
        """

    def cancel(self, rows: list[int]) -> None:
        """Drafting for these rows has become useless."""

    def q(self, row: int, node: int) -> Tensor:
        """q [V] at node `node` of row `row` of the draft taken last.

        Asked only of drafts with `token_probs` and without `q`, before they are tested.
        """
        raise TypeError(f"{type(self).__name__} gives token_probs without Draft.q, and has no q() of its own")

    def observe(self, verdict: Verdict) -> None:
        """What became of the draft."""

    def close(self) -> None:
        """Always called at the end, also after an error."""

    def get_candidates(self, input_ids: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
        """transformers' protocol, batch 1: the sequence with the draft appended, and log q for sampled drafts."""
        length = input_ids.shape[1]
        sequences = Sequences(input_ids, [length], [0], [input_ids[0].tolist()])
        draft = self.propose(sequences, [self.context.max_length - length - 1])
        k, q = draft.lengths[0], draft.q
        if q is None and draft.token_probs is not None and k:
            q = torch.stack([self.q(0, i) for i in range(k)])[None]
        logits = None if q is None or not k else q[:, :k].log()
        return torch.cat([input_ids, draft.tokens[:, :k].to(input_ids.device)], dim=1), logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """transformers' protocol: tells what was accepted."""
        tested, n = scores.shape[1] - 1, int(num_matches)
        # The matched tokens and the target's own one are the last of input_ids.
        tokens = input_ids[0, input_ids.shape[1] - n - 1 :].tolist()
        self.observe(Verdict([0], [tested], [n], [tokens], [False], tested + 1, 0.0, paths=[list(range(n))]))
