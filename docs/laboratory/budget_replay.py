"""The budget on a clock of set times: its decisions replayed over recorded texts, beside windows set to a number.

    python docs/laboratory/budget_replay.py --target smollm2 --draft hub_configs/draft_model/draft_model \\
        --pack-linear --prompts data/humaneval.jsonl --prompts data/gsm8k_test.jsonl --rows 1 --rows 4 --c 0.12 --c 0.5

The target writes its greedy texts once, and the draft says at each of their places what it finds likeliest; both are
kept in a file. Then `GrowingSession` drafts over the recordings as it does over a model. A round takes 1 + slope for
each further token of a row, and c for each draft step: nothing is disturbed, and a table takes seconds. Where a draft
is wrong it goes on with what is recorded of the next place: nothing behind it is kept in any case. What a round takes
beside its forwards, and that times have to be learned, is left out. A window that is set to a number is drafted in
every round; beside its tokens those of the other candidates are verified that pay.
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
from hf_specdec.budget import MOST_NODES, Cost, DraftCost, Survival, most_per_second
from hf_specdec.commands.options import command
from hf_specdec.drafters.draft_model import GrowingSession
from hf_specdec.instruments.ends import until_end
from hf_specdec.loading.chat import batch, prompt_ids
from hf_specdec.loading.models import Pair, PairSettings
from hf_specdec.loading.prompts import load_prompts
from hf_specdec.protocol import DraftContext, Sequences, Verdict

RECORDED = 4
"""of the draft's likeliest tokens at each place"""
AT_ONCE = 8
"""prompts that the target goes on with together"""
OPENING = 0.3
"""draft steps that a round with any takes beside them"""


class Recording(NamedTuple):
    """A text of the target's, and what the draft says of it."""

    text: list[int]
    tokens: list[list[int]]
    """[n - 1][k] the draft's likeliest behind each token but the last"""
    chances: list[list[float]]


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

    def copy(self, beside: int = 0) -> Cost:
        return self

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

    def __init__(self, c: float, always: bool = False) -> None:
        """
        Args:
            always: it is asked in every round, whether that pays or not.
        """
        super().__init__()
        self.step, self.opening, self.always = c, OPENING * c, always

    def asked(self, pays: bool, *known: Any, **named: Any) -> float | None:
        return super().asked(pays or self.always, *known, **named)

    def observe_draft(self, *_: Any, **__: Any) -> None:
        """Whatever the clock says."""

    observe = observe_look = observe_reading = observe_draft  # type: ignore[assignment]


class Recorded:
    """In place of a draft model's `Chain`."""

    def __init__(self, rows: Sequence[Recording], candidates: int) -> None:
        self.rows, self.candidates = rows, candidates
        self.model = SimpleNamespace(context_limit=2**31, notes=list)

    def begin(self, sequences: Sequences, steps: int) -> bool:
        self.here = [(row, n - 1) for row, n in zip(sequences.rows, sequences.lengths, strict=True)]
        return True

    def step(self) -> tuple[Tensor, Tensor]:
        said = [(self.rows[row], min(place, len(self.rows[row].tokens) - 1)) for row, place in self.here]
        self.here = [(row, place + 1) for row, place in self.here]
        tokens = torch.tensor([row.tokens[place][: self.candidates] for row, place in said])
        return tokens, torch.tensor([row.chances[place][: self.candidates] for row, place in said])

    def observe(self, verdict: Verdict, drafted: Sequence[Sequence[int]]) -> None:
        """It has read all of the text."""


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
        if key not in known:
            prompts = [prompt_ids(pair.tokenizer, prompt) for prompt in load_prompts(name, settings.limit)]
            known[key] = [tuple(recording) for recording in record(pair, prompts, settings.max_new_tokens)]
            torch.save(known, path)
        texts[name] = [Recording(*recording) for recording in known[key]]
    for rows, slope in zip(settings.rows, settings.slope, strict=True):
        for c in settings.c:
            title = f"rows {rows}, slope {slope}, c = {c}"
            table = Table("", *(Path(name).stem for name in texts), "mean", title=title)
            windows: list[int | str] = ["auto", *settings.window]
            for window in windows:
                survival, times, steps = Survival(), SetTimes(slope, settings.believed), SetSteps(c, window != "auto")
                speeds = []
                for every in texts.values():
                    calls = [every[i : i + rows] for i in range(0, len(every) - rows + 1, rows)]
                    plain = sum(max(len(row.tokens) for row in call) for call in calls)
                    taken = (
                        play(call, pair.draft, window, settings.candidates, survival, times, steps) for call in calls
                    )
                    speeds.append(plain / sum(taken))
                shown = "budget" if window == "auto" else f"γ = {window}"
                table.add_row(shown, *(f"{speed:.3f}" for speed in [*speeds, sum(speeds) / len(speeds)]))
            Console().print(table)


def play(
    rows: Sequence[Recording],
    model: Any,
    window: int | str,
    candidates: int,
    survival: Survival,
    times: SetTimes,
    steps: SetSteps,
) -> float:
    """The time of a call, in target steps."""
    first = torch.tensor([row.text[:1] for row in rows])
    context = DraftContext(
        prompt_ids=first,
        prompt_mask=torch.ones_like(first),
        max_length=max(len(row.text) for row in rows),
        vocab_size=2**31,
        eos_token_ids=frozenset(),
        do_sample=False,
        lockstep=False,
        trees=True,
        pick=None,  # type: ignore[arg-type]
        device=torch.device("cpu"),
        stats=SimpleNamespace(notes=[]),  # type: ignore[arg-type]
        cost=times,
    )
    chain: Any = Recorded(rows, candidates)
    session = GrowingSession(context, model, window, candidates, survival.begin(), steps.begin(), chain=chain)  # type: ignore[arg-type]
    done, taken, alive = [1] * len(rows), 0.0, list(range(len(rows)))
    while alive:
        text = [rows[row].text[: done[row]] for row in alive]
        lengths = [len(mine) for mine in text]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(mine) for mine in text], batch_first=True)
        room = [len(rows[row].text) - 1 - done[row] for row in alive]
        draft = session.propose(Sequences(ids, lengths, alive, text), room)
        spent = (session.steps + OPENING) * (steps.step or 0) if session.steps else 0.0
        chances = draft.survival or [[1.0] * n for n in draft.lengths]
        seconds = times.round(len(alive))
        count = most_per_second(chances, seconds, spent, context.advance)[0] if draft.survival else max(draft.lengths)
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


def record(pair: Pair, prompts: Sequence[list[int]], new_tokens: int) -> Iterator[Recording]:
    """The target's texts behind these prompts, but for those that end at once."""
    draft, padding = pair.draft, pair.tokenizer.pad_token_id
    assert draft is not None
    for at in tqdm(range(0, len(prompts), AT_ONCE), "recorded", unit="batch"):
        inputs = batch(prompts[at : at + AT_ONCE], padding, pair.target.device)
        output = pair.target.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, pad_token_id=padding)
        for prompt, row in zip(prompts[at:], output[:, inputs["input_ids"].shape[1] :].tolist(), strict=False):
            text = until_end(pair.target, row)
            if len(text) > 1:
                with torch.no_grad():
                    said = draft(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) :].float().softmax(-1)
                chances, tokens = said.topk(RECORDED)
                yield Recording(text, tokens.tolist(), chances.tolist())


if __name__ == "__main__":
    command(main, None, __doc__)()
