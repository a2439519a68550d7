"""Toy drafters: right, wrong, in between, branching, in the background, out of the forward."""

import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_specdec.drafters.base import Drafter
from hf_specdec.protocol import Draft, DraftContext, Sequences, Verdict
from hf_specdec.session import DraftSession
from hf_specdec.stats import SpeculationStats

Propose = Callable[[DraftContext, Sequences, list[int]], Draft]


class ToySession(DraftSession):
    """Drafts with a function."""

    def __init__(self, context: DraftContext, function: Propose) -> None:
        super().__init__(context)
        self.function = function
        self.verdicts: list[Verdict] = []
        self.closed = 0

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        return self.function(self.context, sequences, room)

    def observe(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)

    def close(self) -> None:
        self.closed += 1


class Toy(Drafter):
    """A drafter made of a function from (context, sequences, budget) to a draft."""

    session_class = ToySession
    reads_prompt = False

    def __init__(self, function: Propose, trees: bool = False) -> None:
        super().__init__()
        self.function, self.proposes_trees = function, trees
        self.sessions: list[Any] = []

    def start(self, context: DraftContext) -> DraftSession:
        self.sessions.append(self.session_class(context, self.function))
        return self.sessions[-1]


class Future:
    """What plain decoding says after a prompt, row by row: the knowledge of the drafters below.

    Args:
        sequences: [B, columns] plain decoding's output, laid out as the call's `ids`.
    """

    def __init__(self, sequences: Tensor) -> None:
        self.rows = sequences.tolist()

    def __call__(self, sequences: Sequences, room: list[int], gamma: int) -> list[list[int]]:
        return [
            self.rows[row][length : length + min(gamma, most)]
            for row, length, most in zip(sequences.rows, sequences.lengths, room, strict=True)
        ]


def oracle(future: Future, gamma: int) -> Toy:
    """Always right."""
    return Toy(lambda context, sequences, room: Draft.from_lists(future(sequences, room, gamma)))


def adversary(future: Future, gamma: int, vocab: int) -> Toy:
    """Always wrong."""
    return Toy(
        lambda context, sequences, room: Draft.from_lists(
            [[(x + 1) % vocab for x in row] for row in future(sequences, room, gamma)]
        )
    )


def noisy(future: Future, gamma: int, vocab: int, noise: float = 0.3, seed: int = 0) -> Toy:
    """Right most of the time; drafts of uneven lengths, sometimes none."""
    dice = random.Random(seed)

    def propose(context: DraftContext, sequences: Sequences, room: list[int]) -> Draft:
        rows = future(sequences, room, gamma)
        rows = [row[: dice.randint(0, gamma)] if dice.random() < 0.3 else row for row in rows]
        return Draft.from_lists([[x if dice.random() > noise else dice.randrange(vocab) for x in row] for row in rows])

    return Toy(propose)


def bushy(future: Future, gamma: int, vocab: int, seed: int = 0) -> Toy:
    """A tree of point masses: beside the true continuation, wrong branches before and after it at every depth."""
    dice = random.Random(seed)

    def propose(context: DraftContext, sequences: Sequences, room: list[int]) -> Draft:
        trees = [_bush(row, vocab, dice) for row in future(sequences, room, gamma)]
        width = max(len(tokens) for tokens, _ in trees)
        lengths = [len(tokens) for tokens, _ in trees]
        tokens = [t + [0] * (width - len(t)) for t, _ in trees]
        parents = [p + [-1] * (width - len(p)) for _, p in trees]
        return Draft(torch.tensor(tokens).view(-1, width), lengths, torch.tensor(parents).view(-1, width))

    return Toy(propose, trees=True)


def _bush(truth: list[int], vocab: int, dice: random.Random) -> tuple[list[int], list[int]]:
    tokens: list[int] = []
    parents: list[int] = []
    here = -1
    for x in truth:
        first = len(tokens)
        siblings = [(x + 1) % vocab, x, (x + 2) % vocab]
        dice.shuffle(siblings)
        tokens += siblings
        parents += [here] * 3
        wrong = next(first + i for i in range(3) if siblings[i] != x)
        tokens.append(x)  # the right token below the wrong parent
        parents.append(wrong)
        here = first + siblings.index(x)
    return tokens, parents


def with_logits(logits_of: Callable[[Tensor], Tensor], gamma: int, branches: int = 1) -> "Drawing":
    """Draws at random from what `logits_of` ([N] last tokens → [N, V]) says, `branches` siblings per node."""
    return Drawing(logits_of, gamma, branches)


class DrawingSession(DraftSession):
    """A stochastic drafter: every token through `context.pick`, siblings as independent draws from one q."""

    def __init__(self, context: DraftContext, drafter: "Drawing") -> None:
        super().__init__(context)
        self.drafter = drafter
        self.drawn_from: list[list[Tensor]] = []

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        drafter, rows = self.drafter, len(sequences.rows)
        gamma, branches = min(drafter.gamma, max(room)), drafter.branches
        ids = torch.nn.functional.pad(sequences.ids, (0, gamma))
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        parents: list[int] = []
        self.drawn_from = []
        last = ids.gather(1, torch.tensor(sequences.lengths)[:, None] - 1)[:, 0]
        here = -1
        for depth in range(gamma):
            lengths = [length + depth for length in sequences.lengths]
            children = []
            for _ in range(branches):
                x, q = self._draw(ids, lengths, sequences.rows, drafter.logits_of(last), children)
                children.append(x)
                tokens.append(x)
                parents.append(here)
                if q is not None:
                    probs.append(q.gather(1, x[:, None])[:, 0])
                    self.drawn_from.append(list(q))
            here = len(tokens) - branches  # grow on below the first child
            last = children[0]
            ids[torch.arange(rows), torch.tensor(lengths)] = last
        if not tokens:
            return Draft.from_lists([[]] * rows)
        lengths = [min(gamma, most) * branches for most in room]
        tree = torch.tensor([parents] * rows) if branches > 1 else None
        return Draft(torch.stack(tokens, 1), lengths, tree, torch.stack(probs, 1) if probs else None)

    def _draw(
        self, ids: Tensor, lengths: list[int], rows: list[int], logits: Tensor, siblings: list[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The engine's draw for the first child; the same q and fresh numbers for its siblings."""
        x, q = self.context.pick(ids, lengths, rows, logits.clone())
        if siblings and q is not None:
            x = torch.multinomial(q, 1)[:, 0]
        elif siblings:
            x = (siblings[-1] + 1) % self.context.vocab_size
        return x, q

    def q(self, row: int, node: int, tokens: Tensor | None = None) -> Tensor:
        q = self.drawn_from[node][row]
        return q if tokens is None else q[tokens]


class Drawing(Drafter):
    """See `with_logits`."""

    def __init__(self, logits_of: Callable[[Tensor], Tensor], gamma: int, branches: int) -> None:
        super().__init__()
        self.logits_of, self.gamma, self.branches = logits_of, gamma, branches
        self.proposes_trees = branches > 1

    def start(self, context: DraftContext) -> DraftSession:
        return DrawingSession(context, self)


class BackgroundSession(ToySession):
    """Drafts in a thread, as PEARL will."""

    worker: threading.Thread | None = None

    def start_draft(self, sequences: Sequences, room: list[int]) -> None:
        self._draft = None

        def work() -> None:
            self._draft = self.propose(sequences, room)

        self.worker = threading.Thread(target=work)
        self.worker.start()

    def close(self) -> None:
        super().close()
        if self.worker is not None:
            self.worker.join()


class Background(Toy):
    """A drafter whose sessions work in a thread."""

    session_class = BackgroundSession


class OwnRunner:
    """Wraps the engine's runner: the next draft comes out of the verification forward, as in Speculative Streaming.

    After every forward it remembers, per row and position, the token that the logits say comes twice in a row.
    """

    def __init__(self, inner: Any, guesses: list[Tensor]) -> None:
        self.inner, self.guesses = inner, guesses

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        answer = self.inner.forward(*args, **kwargs)
        self.guesses.append(answer.logits.argmax(-1))
        return answer


class FromForwardSession(ToySession):
    """Drafts what its runner's last forward guessed."""

    def __init__(self, context: DraftContext, gamma: int) -> None:
        self.gamma, self.guesses = gamma, []
        super().__init__(context, self.guess)

    def runner(self, runner: Any) -> Any:
        return OwnRunner(runner, self.guesses)

    def guess(self, context: DraftContext, sequences: Sequences, room: list[int]) -> Draft:
        if not self.guesses or len(self.guesses[-1]) != len(sequences.rows):
            return Draft.from_lists([[]] * len(sequences.rows))
        rows = self.guesses[-1][:, -1:].tolist()
        return Draft.from_lists([(row * self.gamma)[:most] for row, most in zip(rows, room, strict=True)])


class FromForward(Drafter):
    """See `FromForwardSession`."""

    brings_runner = True

    def __init__(self, gamma: int) -> None:
        super().__init__()
        self.gamma = gamma

    def start(self, context: DraftContext) -> DraftSession:
        return FromForwardSession(context, self.gamma)


def faulty(good: Toy, at_round: int, fault: Callable[[Draft], Draft], patience: float = 60.0) -> Toy:
    """A good drafter that does something else from one round on."""
    rounds = [0]

    def propose(context: DraftContext, sequences: Sequences, room: list[int]) -> Draft:
        rounds[0] += 1
        draft = good.function(context, sequences, room)
        return fault(draft) if rounds[0] > at_round else draft

    toy = Toy(propose)
    toy.session_class = type("Faulty", (ToySession,), {"patience": patience})
    return toy


def context(**known: Any) -> DraftContext:
    """What a session would know of a greedy call of one row, but for what is `known`."""
    nothing = torch.zeros(1, 0, dtype=torch.long)
    usual: dict[str, Any] = {
        "prompt_ids": nothing, "prompt_mask": nothing, "max_length": 1 << 20, "vocab_size": 1 << 30,
        "eos_token_ids": frozenset(), "do_sample": False, "lockstep": False, "trees": False, "pick": None,
        "device": torch.device("cpu"), "stats": SpeculationStats(),
    }  # fmt: skip
    return DraftContext(**usual | known)
