"""`UnseenSession`: a head's tree whose nodes are chosen before anybody has seen what they say."""

import torch

from ...budget import DRAFTED, MOST_NODES, Controller, Drafted, Evidence
from ...protocol import Draft, DraftContext, Sequences, Verdict
from ...session import DraftSession
from ...transfer import to_device
from ..trees import Node, likeliest_nodes, tested_behind
from .draft import HeadDraft


class UnseenSession(DraftSession):
    """Greedy, where to see what is drafted would be to wait for an accelerator: each candidate's chance is how often
    those of its rank were right."""

    weighs = True

    def __init__(self, context: DraftContext, heads: HeadDraft, control: Controller) -> None:
        super().__init__(context)
        self.heads, self.control, self.features = heads, control, heads.features
        self.nodes: list[Node] = []
        """of this round, the likeliest first"""
        self.drafted = torch.empty(0, device="cpu")
        """[B, K, k] all candidates of this round"""

    def observe_prompt(self, verdict: Verdict) -> None:
        self.heads.observe_prompt(verdict)

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        self.nodes, heads = [], self.heads
        active = [limit for limit in room if limit > 0]
        most = min(max(active), heads.room(sequences))
        left = self.context.max_length - max(sequences.lengths)
        here = Drafted(sequences.rows, [[]] * len(active), [1.0] * len(active), 0, heads.unread, left)
        steps = self.control.plan(here, most, enough=most)
        if steps < 1:
            return Draft.from_lists([[]] * len(room), self.context.device)
        steps = most if heads.at_once else steps
        heads.begin(sequences, steps, steps)
        self.drafted = torch.stack([heads.step().tokens for _ in range(steps)], 1)
        heads.end()
        k = self.control.candidates
        alphas = [self.control.alpha(rank) for rank in range(k)]
        likeliest = likeliest_nodes([alphas] * steps, MOST_NODES, lambda node: heads.independent or node.rank == 0)
        self.nodes = [node for _, node in likeliest]
        index = to_device([node.place * k + node.rank for node in self.nodes], self.drafted.device)
        # The engine ends a row before the first node that is deeper than it has room for.
        draft = Draft(self.drafted.flatten(1)[:, index], [len(self.nodes) if limit else 0 for limit in room])
        draft.parents = None if k == 1 else [[node.parent for node in self.nodes]] * len(room)
        draft.survival = [[chance for chance, _ in likeliest]] * len(room)
        return draft

    def observe(self, verdict: Verdict) -> None:
        for b, path in enumerate(verdict.paths if self.nodes else ()):
            if verdict.draft is None or verdict.stopped[b] or not verdict.draft.lengths[b]:
                continue
            kept, accepted = self.nodes[: verdict.draft.lengths[b]], list(zip([-1, *path], [*path, None], strict=True))
            for node, right in tested_behind(kept, accepted):
                self.control.acceptance.observe(Evidence.of(DRAFTED, node.rank), right)
        self.heads.observe(verdict, verdict.accepted)
        self.control.observe(verdict.accepted, verdict)
        self.nodes = []

    def close(self) -> None:
        self.context.stats.notes += self.control.notes()
