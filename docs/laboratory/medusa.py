"""Medusa-style heads (Cai et al. 2024) as a drafter: what streams are compared with. Head j foretells, from the last
hidden state of a place, the token j further on: one residual block each, before the target's own head."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.budget import Acceptance, Evidence, Learned
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.streaming.tree import joined, likeliest_nodes
from hf_specdec.drafters.tree_session import TreeSession
from hf_specdec.protocol import Draft, DraftContext, Sequences, Verdict
from hf_specdec.transfer import to_host

CANDIDATES, NODES = 4, 64


class Medusa(nn.Module):
    """The heads; `known` are the rows of the target's head that they ask."""

    known: Tensor

    def __init__(self, size: int, heads: int, known: Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(heads))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)
        self.register_buffer("known", known)

    def states(self, hidden: Tensor) -> Tensor:
        """[..., H] → [..., heads, H]"""
        return torch.stack([hidden + torch.nn.functional.silu(block(hidden)) for block in self.blocks], -2)


class MedusaSession(TreeSession):
    """Each head's likeliest tokens as a tree, those of head j behind those of head j - 1."""

    features = (-1,)

    def __init__(self, context: DraftContext, heads: Medusa, acceptance: Acceptance) -> None:
        super().__init__(context, acceptance)
        assert context.target is not None
        self.heads, self.state = heads, torch.empty(0)
        self.rows: list[int] = []
        self.head = context.target.get_output_embeddings().weight[heads.known]

    def observe_prompt(self, verdict: Verdict) -> None:
        self.state, self.rows = verdict.features[-1][:, -1], list(verdict.rows)

    def observe(self, verdict: Verdict) -> None:
        super().observe(verdict)
        ends = [len(tokens) - 1 for tokens in verdict.tokens]
        self.state, self.rows = verdict.features[-1][range(len(ends)), ends], list(verdict.rows)

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        state = self.state[[self.rows.index(row) for row in sequences.rows]]
        logits = nn.functional.linear(self.heads.states(state), self.head)
        best = logits.float().softmax(-1).topk(CANDIDATES)
        named, estimates = to_host(torch.stack([self.heads.known[best.indices].float(), best.values]))
        self.begin(len(budget))
        for b, (tokens, found) in enumerate(zip(named, estimates, strict=True)):
            self.trees[b] = self._foretold(tokens, found)
        return self.draft()

    def _foretold(self, tokens: Sequence[Sequence[float]], estimates: Sequence[Sequence[float]]):  # type: ignore[no-untyped-def]
        evidence = [[Evidence.of(f"head {j}").at(estimate) for estimate in row] for j, row in enumerate(estimates)]
        chances = [[self.acceptance.calibrated(each) for each in row] for row in evidence]
        return joined(likeliest_nodes(chances, NODES), tokens, evidence)


class MedusaDrafter(Drafter):
    """Trained heads for one target."""

    proposes_trees = True

    def __init__(self, heads: Medusa, target: PreTrainedModel) -> None:
        super().__init__()
        self.heads = heads.to(target.dtype).requires_grad_(False)
        self._acceptance = Learned(Acceptance)

    def start(self, context: DraftContext) -> MedusaSession:
        return MedusaSession(context, self.heads, self._acceptance.of(context.target, context.do_sample))
