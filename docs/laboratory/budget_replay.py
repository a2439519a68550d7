"""The budget on a clock of set times: its decisions replayed over recorded texts, beside windows set to a number.

    python docs/laboratory/budget_replay.py --target smollm2 --draft hub_configs/draft_model/draft_model \\
        --pack-linear --prompts code --prompts maths --rows 1 --rows 4 --c 0.12 --c 0.5

The target writes its greedy texts once, and the draft says at each of their places what it finds likeliest; both are
kept in a file. Then `TreeSession` drafts over the recordings as it does over a model. A round takes 1 + slope for
each further token of a row, and c for each draft step: nothing is disturbed, and a table takes seconds. Where a draft
is wrong it goes on with what is recorded of the next place: nothing behind it is kept in any case. What a round takes
beside its forwards, and that times have to be learned, is left out. A window that is set to a number is drafted in
every round; beside its tokens those of the other candidates are verified that pay.

With `--temperature` the target draws its texts, and it is drawn once for each place whether a draw of the draft's is
accepted there: of a token x that the target has drawn with min(1, q(x) / p(x)). All windows write the same texts then
and meet the same luck, and each of them has its own distribution: sessions draw chains, one candidate per place.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from typer import Option

from hf_specdec import SpeculationError
from hf_specdec.budget import MOST_NODES, Controller, Cost, CostView, DraftCost, Experience, most_per_second
from hf_specdec.commands.options import command
from hf_specdec.drafters.chains import ChainSession
from hf_specdec.drafters.rules import Planned, Stepwise
from hf_specdec.drafters.steps import Step, Steps
from hf_specdec.drafters.trees import TreeSession
from hf_specdec.protocol import DraftContext, Sequences, Verdict
from hf_specdec.tools.instruments.ends import until_end
from hf_specdec.tools.loading.chat import batch, prompt_ids
from hf_specdec.tools.loading.models import Pair, PairSettings
from hf_specdec.tools.loading.prompts import load_prompts
from hf_specdec.tools.loading.rows import set_name
from hf_specdec.tools.loading.sampling import sampling_at

RECORDED = 4
"""of the draft's likeliest tokens at each place"""
AT_ONCE = 8
"""prompts that the target goes on with together"""
OPENING = 0.3
"""draft steps that a round with any takes beside them"""


RIGHT, WRONG = 0, 1
"""what drawn texts are recorded as: all of them right tokens, and the draft's right or wrong ones"""


class Recording(NamedTuple):
    """A text of the target's, and what the draft says of it."""

    text: list[int]
    tokens: list[list[int]]
    """[n - 1][k] the draft's likeliest behind each token but the last; of drawn texts the draft's draw"""
    chances: list[list[float]]
    """that the draft gives them"""


@dataclass(kw_only=True)
class ReplaySettings(PairSettings):
    """What is replayed."""

    prompts: Annotated[list[str], Option(help="JSON lines, or text with a prompt per line.")]
    rows: Annotated[list[int], Option(help="Prompts decoded together.")] = field(default_factory=lambda: [1, 4])
    c: Annotated[list[float], Option(help="Time of a draft step, in target steps.")] = field(
        default_factory=lambda: [0.12]
    )
    slope: Annotated[list[float], Option(help="Further time of a forward per token of a row, for each of rows.")] = (
        field(default_factory=lambda: [0.01, 0.085])
    )
    believed: Annotated[float, Option(help="Factor by which the budget misjudges the slopes.")] = 1.0
    window: Annotated[list[int], Option(help="Windows set to a number.")] = field(default_factory=lambda: [1, 2, 3, 4])
    candidates: Annotated[int, Option(help="Tokens thought of at each place, up to 4.")] = 3
    temperature: Annotated[float, Option(help="Of texts that are drawn; 0 for the likeliest tokens.")] = 0.0
    limit: Annotated[int, Option(help="Prompts of each file.")] = 40
    max_new_tokens: Annotated[int, Option(help="Per prompt.")] = 48
    recordings: Annotated[str, Option(help="File that keeps them.")] = "recordings.pt"


class SetTimes(Cost):
    """A target whose forwards are known from the start: 1, and more for each further token of a row."""

    known = True  # type: ignore[assignment]

    def __init__(self, slope: float, believed: float = 1.0) -> None:
        """
        Args:
            believed: factor by which the slope is misjudged.
        """
        super().__init__()
        self.slope, self.believed = slope, believed

    def takes(self, width: int, misjudged: float = 1.0) -> float:
        """What a forward does take."""
        return 1 + misjudged * self.slope * (width - 1)

    def tried(self, rows: int) -> int | None:
        return None

    def most(self, rows: int) -> int:
        return MOST_NODES

    def round(self, rows: int) -> Callable[[int], float]:
        return lambda width: self.takes(width, self.believed)

    def observe_forward(self, *_: Any) -> None:
        """Whatever the clock says."""

    observe_between = observe_forward  # type: ignore[assignment]


class SetSteps(DraftCost):
    """A draft model whose steps are known from the start."""

    step, opening = 0.0, 0.0  # type: ignore[assignment]

    def __init__(self, c: float) -> None:
        super().__init__()
        self.step, self.opening = c, OPENING * c  # type: ignore[misc]

    def observe(self, *_: Any, **__: Any) -> None:
        """Whatever the clock says."""


class Recorded(Steps):
    """In the place of a session's `ModelDraft`."""

    unread = 0

    def __init__(self, rows: Sequence[Recording], candidates: int) -> None:
        self.rows, self.candidates, self.steps = rows, candidates, 0

    def room(self, sequences: Sequences) -> int:
        return 2**31

    def begin(self, sequences: Sequences, steps: int, planned: int = 0) -> None:
        self.here, self.steps = [(row, n - 1) for row, n in zip(sequences.rows, sequences.lengths, strict=True)], 0

    def step(self) -> Step:
        """Tokens and chances [B, k] behind these places, or draws and the q [B, 2] that they are from, as far as it is
        looked at; behind a text's end what is recorded last."""
        said = [(self.rows[row], min(place, len(self.rows[row].tokens) - 1)) for row, place in self.here]
        tokens = torch.tensor([row.tokens[place][: self.candidates] for row, place in said])
        chances = torch.tensor([row.chances[place][: self.candidates] for row, place in said])
        self.here, self.steps = [(row, place + 1) for row, place in self.here], self.steps + 1
        q = torch.zeros(len(tokens), 2).scatter_(1, tokens, chances) if self.context.do_sample else None
        return Step(tokens, chances, q, chances[:, 0].tolist() if q is not None else None)

    def observe(self, *_: Any) -> None:
        """It has read all of the text."""
        self.steps = 0


def main(settings: ReplaySettings) -> None:
    """Record, replay, print."""
    if len(settings.rows) != len(settings.slope):
        raise SpeculationError(
            f"each of rows {settings.rows} needs a slope, got {settings.slope}; name as many of both"
        )
    if not 1 <= settings.candidates <= RECORDED:
        raise SpeculationError(f"candidates is {settings.candidates}, but what is recorded has 1 to {RECORDED}")
    pair = settings.load()
    known: dict[str, list[Any]] = torch.load(path) if (path := Path(settings.recordings)).exists() else {}
    texts = {}
    for name in settings.prompts:
        key = f"{settings.target} {settings.draft} {settings.dtype} {name} {settings.limit} {settings.max_new_tokens}"
        key += f" at {temperature}" if (temperature := settings.temperature) else ""
        if key not in known:
            prompts = [prompt_ids(pair.tokenizer, prompt) for prompt in load_prompts(name, settings.limit)]
            found = record(pair, prompts, settings.max_new_tokens, temperature)
            known[key] = [tuple(recording) for recording in found]
            torch.save(known, path)
        texts[name] = [Recording(*recording) for recording in known[key]]
    for rows, slope in zip(settings.rows, settings.slope, strict=True):
        for c in settings.c:
            title = f"rows {rows}, slope {slope}, c = {c}"
            table = Table("", *map(set_name, texts), "mean", title=title)
            windows: list[int | str] = ["auto", *settings.window]
            for window in windows:
                experience, times = Experience(), SetTimes(slope, settings.believed)
                experience.cost = SetSteps(c)
                speeds = []
                for every in texts.values():
                    calls = [every[i : i + rows] for i in range(0, len(every) - rows + 1, rows)]
                    plain = sum(max(len(row.tokens) for row in call) for call in calls)
                    taken = (
                        play(call, window, settings.candidates, experience, times, temperature > 0) for call in calls
                    )
                    speeds.append(plain / sum(taken))
                shown = "budget" if window == "auto" else f"γ = {window}"
                table.add_row(shown, *(f"{speed:.3f}" for speed in [*speeds, sum(speeds) / len(speeds)]))
            Console().print(table)


def play(
    rows: Sequence[Recording],
    window: int | str,
    candidates: int,
    experience: Experience,
    times: SetTimes,
    drawn: bool = False,
) -> float:
    """The time of a call, in target steps."""
    recorded: Any = Recorded(rows, 1 if drawn else candidates)
    first = torch.tensor([row.text[:1] for row in rows])
    context = DraftContext(
        prompt_ids=first,
        prompt_mask=torch.ones_like(first),
        max_length=max(len(row.text) for row in rows),
        vocab_size=2**31,
        eos_token_ids=frozenset(),
        do_sample=drawn,
        lockstep=False,
        trees=True,
        pick=None,  # type: ignore[arg-type]
        device=torch.device("cpu"),
        stats=SimpleNamespace(notes=[]),  # type: ignore[arg-type]
        cost=CostView(times),
    )
    recorded.context = context
    control = Controller(context, experience, None if window == "auto" else int(window), recorded.candidates)
    session: Any
    if drawn:
        rule: Any = Stepwise(control) if window == "auto" else Planned(control)
        session = ChainSession(context, recorded, rule)
    else:
        session = TreeSession(context, control.acceptance, (), recorded, control, most=MOST_NODES)
    done, taken, alive = [1] * len(rows), 0.0, list(range(len(rows)))
    while alive:
        text = [rows[row].text[: done[row]] for row in alive]
        lengths = [len(mine) for mine in text]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(mine) for mine in text], batch_first=True)
        room = [len(rows[row].text) - 1 - done[row] for row in alive]
        draft = session.propose(Sequences(ids, lengths, alive, text), room)
        made, step = max(draft.lengths) if drawn else recorded.steps, experience.cost.step or 0.0
        spent = (made + OPENING) * step if made else 0.0
        chances = draft.survival or [[1.0] * n for n in draft.lengths]
        seconds = times.round(len(alive))
        pays = most_per_second(chances, seconds, spent, context.advance, least=max(draft.least, default=0))
        count = pays[0] if draft.survival else max(draft.lengths)
        taken += times.takes(1 + count) + spent
        paths = [_path(draft, b, count, rows[row].text[done[row] :]) for b, row in enumerate(alive)]
        told = [rows[row].text[done[row] : done[row] + len(path) + 1] for row, path in zip(alive, paths, strict=True)]
        for row, mine in zip(alive, told, strict=True):
            done[row] += len(mine)
        ended = [done[row] >= len(rows[row].text) for row in alive]
        drafted = [max(deep[: min(n, count)], default=0) for deep, n in zip(draft.depths(), draft.lengths, strict=True)]
        kept = [len(path) for path in paths]
        session.observe(Verdict(list(alive), drafted, kept, told, ended, 1 + count, 0.0, draft, paths))
        alive = [row for row, stopped in zip(alive, ended, strict=True) if not stopped]
    return taken


def _path(draft: Any, b: int, count: int, text: Sequence[int]) -> list[int]:
    """Of the first `count` nodes of a row those that the text goes through; its last token is the target's own."""
    parents = range(-1, draft.tokens.shape[1] - 1) if draft.parents is None else draft.parents[b]
    tokens, path = draft.tokens[b, : min(draft.lengths[b], count)].tolist(), [-1]
    for token in text[:-1]:
        found = [n for n, mine in enumerate(tokens) if mine == token and parents[n] == path[-1]]
        if not found:
            break
        path += found[:1]
    return path[1:]


def record(
    pair: Pair, prompts: Sequence[list[int]], new_tokens: int, temperature: float = 0.0, seed: int = 0
) -> Iterator[Recording]:
    """The target's texts behind these prompts, but for those that end at once."""
    draft, padding = pair.draft, pair.tokenizer.pad_token_id
    for at in tqdm(range(0, len(prompts), AT_ONCE), "recorded", unit="batch"):
        inputs = batch(prompts[at : at + AT_ONCE], padding, pair.target.device)
        torch.manual_seed(seed + at)
        options = {"max_new_tokens": new_tokens, "pad_token_id": padding} | sampling_at(temperature)
        output = pair.target.generate(**inputs, **options)
        for prompt, row in zip(prompts[at:], output[:, inputs["input_ids"].shape[1] :].tolist(), strict=False):
            text = until_end(pair.target, row)
            if len(text) > 1:
                q = distributions(draft, prompt, text, temperature)
                if temperature:
                    yield draw(text, distributions(pair.target, prompt, text, temperature), q)
                else:
                    chances, tokens = q.topk(RECORDED)
                    yield Recording(text, tokens.tolist(), chances.tolist())


@torch.no_grad()
def distributions(model: Any, prompt: list[int], text: list[int], temperature: float) -> Tensor:
    """[n - 1, V] of a model, behind each token of the text but the last."""
    logits = model(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) :].float()
    return (logits / (temperature or 1.0)).softmax(-1)


def draw(text: list[int], p: Tensor, q: Tensor) -> Recording:
    """Which of the draft's draws are accepted where the target has drawn this text, and how likely they were.

    Of all draws x from q, accepted with min(1, p(x) / q(x)), the accepted ones are min(p, q) in all: where the text has
    x, one was with min(p, q)(x) / p(x). One that is not is from what is left of q, (q - p)+.

    Args:
        p, q: [n - 1, V].
    """
    vocab = min(p.shape[1], q.shape[1])
    p, q, told = p[:, :vocab], q[:, :vocab], torch.tensor(text[1:])[:, None]
    accepted = torch.rand(len(told)) * p.gather(1, told)[:, 0] < torch.minimum(p, q).gather(1, told)[:, 0]
    left = (q - p).clamp(min=0.0) + torch.finfo(q.dtype).tiny  # where p is q nothing is left, and nothing drawn
    drawn = torch.where(accepted[:, None], told, torch.multinomial(left, 1))
    tokens = [[RIGHT if right else WRONG] for right in accepted.tolist()]
    return Recording([RIGHT] * len(text), tokens, q.gather(1, drawn).tolist())


if __name__ == "__main__":
    command(main, None, __doc__)()
