"""Drafters made by dice: sound ones of every shape, with faults, lies and meddling thrown in at random."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from random_faults import Dice, Undecided, errors, lie, nonsense, spoil
from torch import Tensor
from toy_drafters import Drafter, Future

from hf_specdec.protocol import Draft, DraftContext, Sequences, Verdict
from hf_specdec.session import DraftSession

# ---------------------------------------------------------------------- sound drafts

Propose = Callable[["WildSession", Sequences, list[int]], Draft]


def chains(session: "WildSession", sequences: Sequences, room: list[int], over: int = 0) -> Draft:
    """Mostly right, of uneven lengths, some of them empty, and some beyond the room."""
    plan, vocab = session.plan, session.vocab
    rows = []
    for row in plan.future(sequences, [n + over for n in room], plan.gamma + over):
        row = [x if plan.dice.random() < plan.skill else plan.dice.randrange(vocab) for x in row]
        rows.append(row[: plan.dice.randint(0, len(row))] if plan.dice.random() < 0.3 else row)
    rows = [row + [plan.dice.randrange(vocab) for _ in range(over)] for row in rows]
    return Draft.from_lists(rows)


def beyond(session: "WildSession", sequences: Sequences, room: list[int]) -> Draft:
    return chains(session, sequences, room, over=session.plan.dice.choice([1, 7, 60]))


def nothing(session: "WildSession", sequences: Sequences, room: list[int]) -> Draft:
    return Draft.from_lists([[]] * len(room))


def trees(session: "WildSession", sequences: Sequences, room: list[int]) -> Draft:
    """The future somewhere in a random tree."""
    plan, tokens, parents = session.plan, [], []
    for truth in plan.future(sequences, room, plan.gamma):
        row: list[int] = []
        above: list[int] = []
        depth: list[int] = []
        for i in range(plan.dice.randint(0, 3 * plan.gamma)):
            parent = plan.dice.randint(-1, i - 1)
            below = depth[parent] + 1 if parent >= 0 else 0
            depth.append(below)
            above.append(parent)
            row.append(truth[below] if below < len(truth) and plan.dice.random() < 0.7 else i % session.vocab)
        tokens.append(row)
        parents.append(above)
    width = max(map(len, tokens))
    draft = Draft.from_lists(tokens)
    draft.parents = [row + [-1] * (width - len(row)) for row in parents]
    return draft


def drawn(session: "WildSession", sequences: Sequences, room: list[int]) -> Draft:
    """Through `pick`, with q in the draft or told when asked; in trees two independent draws per node."""
    plan, context = session.plan, session.context
    depth, branches = min(plan.gamma, max(room)), plan.branches
    ids = torch.nn.functional.pad(sequences.ids, (0, depth))
    every = torch.arange(len(room))
    tokens, probs, session.q_of, parents, here, first = [], [], [], [], -1, ids[:, 0]
    for i in range(depth):
        at = [n + i for n in sequences.lengths]
        scores = plan.scores[ids[every, torch.tensor(at) - 1]]
        for branch in range(branches):
            x, q = context.pick(ids, at, sequences.rows, scores.clone())
            x = torch.multinomial(q, 1)[:, 0] if branch and q is not None else x
            first = x if branch == 0 else first
            tokens.append(x)
            parents.append(here)
            if q is not None:
                session.q_of.append(q)
                probs.append(q.gather(1, x[:, None])[:, 0])
        here = len(tokens) - branches
        ids[every, torch.tensor(at)] = first
    if not tokens:
        return nothing(session, sequences, room)
    draft = Draft(torch.stack(tokens, 1), [min(depth, n) * branches for n in room])
    draft.parents = [parents] * len(room) if branches > 1 else None
    how = plan.dice.choice(["q", "both", "asked"])
    if probs and how != "asked":
        draft.q = torch.stack(session.q_of, 1)
    if probs and how != "q":
        draft.token_probs = torch.stack(probs, 1)
    return draft


PROPOSALS: list[Propose] = [chains, chains, beyond, nothing, trees, trees, drawn, drawn]


# ---------------------------------------------------------------------- drafters

METHODS = ["__init__", "start_draft", "propose", "poll", "take", "observe", "observe_prompt", "q", "close"]
TRAITS = ["takes_ragged", "schedule", "start", "proposes_trees", "brings_runner", "recordable", "last_stats"]
FAULTS = ["raise", "mumble", "lie", "meddle", "patience", "features", "likeliest", "trait"]
BAD_PATIENCE: list[Any] = [float("nan"), -1.0, "long", None, 1j, Undecided(), [], torch.tensor(float("nan")), True]


@dataclass
class Plan:
    """What the dice said of a drafter."""

    dice: Dice
    future: Future
    scores: Tensor
    """[V, V] what it draws from, by the last token"""
    propose: Propose
    gamma: int
    skill: float
    branches: int
    raises: dict[str, int] = field(default_factory=dict)
    """methods, and the call of theirs from which on they raise"""
    mumbles: dict[str, int] = field(default_factory=dict)
    """methods, and the call of theirs from which on they answer nonsense"""
    lies_from: int = 10**6
    meddles: float = 0.0
    """share of what it is handed that it writes into"""

    def then(self, method: str, answer: Callable[[], Any]) -> Any:
        """Let a method do its work, or what the dice have in mind for it."""
        for fates, act in ((self.raises, self.fail), (self.mumbles, lambda: nonsense(self.dice))):
            if method in fates:
                fates[method] -= 1
                if fates[method] < 0:
                    return act()
        return answer()

    def fail(self) -> None:
        raise self.dice.choice(errors())

    def meddle(self, *things: Any) -> None:
        for thing in things:
            if self.dice.random() < self.meddles:
                spoil(thing, self.dice)


class WildSession(DraftSession):
    """Does what its plan says. Where that makes it never answer, the call goes on without it after its patience."""

    plan: Plan
    patience = 0.2

    def __init__(self, context: DraftContext, plan: Plan) -> None:
        self.plan, self.vocab, self.q_of = plan, context.vocab_size, []
        plan.then("__init__", lambda: super(WildSession, self).__init__(context))
        plan.meddle(context)

    def propose(self, sequences: Sequences, room: list[int]) -> Draft:
        draft = self.plan.then("propose", lambda: self.plan.propose(self, sequences, room))
        self.plan.meddle(sequences, room, sequences.tokens, sequences.ids, self.context)
        self.plan.lies_from -= 1
        return lie(draft, self.plan.dice) if self.plan.lies_from < 0 and isinstance(draft, Draft) else draft

    def start_draft(self, sequences: Sequences, room: list[int]) -> None:
        self.plan.then("start_draft", lambda: super(WildSession, self).start_draft(sequences, room))

    def poll(self) -> bool:
        return self.plan.then("poll", super().poll)

    def take(self) -> Draft:
        return self.plan.then("take", super().take)

    def q(self, row: int, node: int, tokens: Tensor | None = None) -> Tensor:
        return self.plan.then("q", lambda: self.q_of[node][row])

    def observe_prompt(self, verdict: Verdict) -> None:
        self.plan.then("observe_prompt", lambda: None)
        self.plan.meddle(verdict, verdict.features, self.context)

    def observe(self, verdict: Verdict) -> None:
        self.plan.then("observe", lambda: None)
        self.plan.meddle(verdict, verdict.features, verdict.likeliest, verdict.draft, self.context)

    def runner(self, runner: Any) -> Any:
        return self.plan.then("runner", lambda: runner)

    def close(self) -> None:
        self.plan.then("close", lambda: None)


class WildDrafter(Drafter):
    """Starts sessions of its plan."""

    def __init__(self, plan: Plan, session: type[WildSession]) -> None:
        super().__init__()
        self.plan, self.session = plan, session

    def start(self, context: DraftContext) -> DraftSession:
        return self.session(context, self.plan)


def make(dice: Dice, future: Future, scores: Tensor) -> WildDrafter:
    """A drafter with no fault, with one, or with several."""
    propose = dice.choice(PROPOSALS)
    plan = Plan(dice, future, scores, propose, dice.randint(1, 5), dice.choice([0.0, 0.7, 1.0]), dice.choice([1, 1, 2]))
    ours: dict[str, Any] = {}
    traits: dict[str, Any] = {"proposes_trees": dice.random() < 0.5, "brings_runner": dice.random() < 0.05}
    for fault in dice.choices(FAULTS, k=dice.choice([0, 1, 1, 2])):
        method, at = dice.choice(METHODS), dice.choice([0, 0, 1, 3])
        if fault == "raise":
            plan.raises[method] = at
        elif fault == "mumble":
            plan.mumbles[method] = at
        elif fault == "lie":
            plan.lies_from = at
        elif fault == "meddle":
            plan.meddles = dice.choice([0.3, 1.0])
        elif fault == "patience":
            ours["patience"] = dice.choice([*BAD_PATIENCE, property(lambda self: plan.fail())])
        elif fault == "features":
            ours["features"] = dice.choice([nonsense(dice), (99,), ("x",), property(lambda self: plan.fail()), (-1, 0)])
        elif fault == "likeliest":
            ours["likeliest"] = dice.choice([nonsense(dice), -1, 10**9, property(lambda self: plan.fail())])
        else:
            traits |= trait(dice, plan)
    if dice.random() < 0.2:
        ours.setdefault("likeliest", 3)
    if dice.random() < 0.2:
        ours.setdefault("features", (-1, 0))
    if traits["brings_runner"] is True and dice.random() < 0.5:
        dice.choice([plan.raises, plan.mumbles])["runner"] = dice.choice([0, 1])
    return type("Wild", (WildDrafter,), traits)(plan, type("Session", (WildSession,), ours))


def trait(dice: Dice, plan: Plan) -> dict[str, Any]:
    """One of the drafter's own members, raising or answering nonsense."""
    name = dice.choice(TRAITS)
    bad = nonsense(dice)

    def method(self: Any, *args: Any) -> Any:
        return bad if dice.random() < 0.5 else plan.fail()

    def refuse(self: Any, value: Any) -> None:
        if value is not None:
            plan.fail()

    if name == "last_stats":
        return {name: property(lambda self: None, refuse)}
    if name in ("proposes_trees", "brings_runner", "recordable"):
        return {name: bad if dice.random() < 0.2 else property(method)}
    return {name: method}
