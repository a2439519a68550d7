"""Two whole drafters that live inside the target, each as small as one can be: what the seam must carry."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdec.drafters import Draft, DraftContext, Drafter, DraftSession, Sequences, Verdict
from hf_specdec.protocol import Forward, Runner

# ---------------------------------------------------------------------- a head on the last hidden state


class HeadSession(DraftSession):
    """Drafts a chain: each next token by the target's own head, from the last hidden state and the token before."""

    features = (-1,)

    def __init__(self, context: DraftContext, gamma: int) -> None:
        super().__init__(context)
        self.gamma = gamma
        self.state: dict[int, Tensor] = {}
        self.embed = context.target.get_input_embeddings()
        self.head = context.target.get_output_embeddings()

    def observe_prompt(self, verdict: Verdict) -> None:
        """[B, P, H]: the last column decided the first token."""
        states = verdict.features[-1]
        self.state |= {row: states[b, -1] for b, row in enumerate(verdict.rows)}

    def observe(self, verdict: Verdict) -> None:
        for b, row in enumerate(verdict.rows):
            self.state[row] = verdict.features[-1][b, len(verdict.tokens[b]) - 1]

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        state = torch.stack([self.state[row] for row in sequences.rows])
        last = torch.tensor([tokens[-1] for tokens in sequences.tokens])
        ids = nn.functional.pad(sequences.ids, (0, self.gamma))
        tokens, drawn_from = [], []
        for i in range(min(self.gamma, max(room))):
            state = state + 0.1 * self.embed(last)
            last, q = self.context.pick(ids, [n + i for n in sequences.lengths], sequences.rows, self.head(state))
            ids[range(len(room)), [n + i for n in sequences.lengths]] = last
            tokens.append(last)
            drawn_from.append(q)
        lengths = [min(len(tokens), most) for most in room]
        q = torch.stack(drawn_from, 1) if self.context.do_sample and tokens else None
        return Draft(torch.stack(tokens, 1), lengths, q=q) if tokens else Draft.from_lists([[]] * len(room))


class HeadDrafter(Drafter):
    """See `HeadSession`."""

    def __init__(self, gamma: int = 3) -> None:
        super().__init__()
        self.gamma = gamma

    def start(self, context: DraftContext) -> DraftSession:
        return HeadSession(context, self.gamma)


# ---------------------------------------------------------------------- extra positions in the upper layers


class StreamRunner:
    """From layer `first` on every node has a stream beside it, which sees what its node sees and leaves no keys behind;
    before that layer the worse half of a tree's leaves is pruned. The streams' logits are the next draft."""

    def __init__(self, engine: Any, session: "StreamSession", first: int) -> None:
        self.engine, self.session, self.first = engine, session, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def prefill(self) -> Forward:
        answer = self.engine.prefill()
        self.upper = self.engine.cache.split(self.first)
        return answer

    def forward(self, tokens: Tensor, parents: Sequence[Sequence[int]] | None = None, counts: Any = None) -> Forward:
        engine, slots, rows, width = self.engine, self.upper, *tokens.shape
        seen, depth = engine.shape(parents, width)
        seen = (torch.ones(1, width, width).tril().bool() if seen is None else seen).expand(rows, -1, -1)
        leaves = [] if parents is None else [i for i in range(2, width, 2) if not any(i in row for row in parents)]
        kept = torch.tensor([i for i in range(width) if i not in leaves])
        n, twice = len(kept), torch.cat([kept, kept])
        among = seen[:, kept][:, :, kept]
        nobody, itself = torch.zeros_like(among), torch.eye(n).bool().expand_as(among)
        wide = torch.cat([torch.cat([among, nobody], 2), torch.cat([among, itself], 2)], 1)

        def widened(layer: Any, args: Any, kwargs: Any) -> Any:
            states = args[0]
            if layer is layers[0]:  # the streams begin
                states = torch.cat([states[:, kept], states[:, kept].roll(1, -1)], 1)
            rotary = tuple(x.expand(rows, -1, -1)[:, twice] for x in kwargs["position_embeddings"])
            slots.reserve(2 * n)
            mask = engine.masks(wide, depth.expand(rows, -1)[:, twice], slots)
            return (states, *args[1:]), kwargs | {"attention_mask": mask, "position_embeddings": rotary}

        layers = engine.model.model.layers[self.first :]
        with ExitStack() as hooks:
            for layer in layers:
                hooks.callback(layer.register_forward_pre_hook(widened, with_kwargs=True).remove)
            outputs = engine.over(tokens, parents, engine.read)
        engine.cache.slots.advance(width)
        slots.advance(n)
        self.session.guesses, self.kept = outputs.logits[:, n:], kept.tolist()
        nodes = (kept[1:] - 1).expand(rows, -1) if leaves else None
        return Forward(outputs.logits[:, :n], nodes, outputs=outputs)

    def truncate(self, lengths: list[int]) -> None:
        self.engine.cache.set_lengths(lengths)

    def keep(self, lengths: list[int], paths: list[list[int]]) -> None:
        cache, places = self.engine.cache, [[self.kept.index(node + 1) - 1 for node in path] for path in paths]
        cache.set_lengths(lengths)
        cache.keep(paths, cache.slots)
        cache.keep(places, self.upper)
        cache.set_lengths([n + len(path) for n, path in zip(lengths, paths, strict=True)])


class StreamSession(DraftSession):
    """Drafts a tree of the streams' likeliest tokens: two that may follow, two behind the first, one deeper."""

    guesses: Tensor | None = None

    def runner(self, runner: Runner) -> Runner:
        return StreamRunner(runner, self, first=1)

    def observe(self, verdict: Verdict) -> None:
        if self.guesses is not None:  # of the streams beside the token that the draft hung on
            self.ends = dict(zip(verdict.rows, self.guesses[:, 0], strict=True))

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        if self.guesses is None:
            return Draft.from_lists([[]] * len(room))
        best = torch.stack([self.ends[row] for row in sequences.rows]).topk(4).indices
        tokens = torch.cat([best, best[:, :2]], 1)
        tree = [-1, -1, 0, 0, 2, 2] if self.context.trees else None
        return Draft(tokens, [6] * len(room), [tree] * len(room) if tree else None)


class StreamDrafter(Drafter):
    """See `StreamRunner` and `StreamSession`."""

    proposes_trees = brings_runner = True

    def start(self, context: DraftContext) -> DraftSession:
        return StreamSession(context)
