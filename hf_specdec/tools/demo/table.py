"""What the demo's turns say: speeds over plain decoding's, each in the same turns, and whether texts are the same."""

from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table

from ..bench.decoding import Generation
from ..bench.measure import Bench
from ..bench.method import Method
from ..bench.methods import PLAIN
from ..bench.summary import speed_ratio, total
from ..instruments.audit import Audit, Difference
from .turns import Turn, inputs_of

Pair = tuple[Generation, Generation]
"""a method's, and plain decoding's in the same turn"""


def table(methods: Sequence[Method], turns: Sequence[Turn]) -> Table:
    """One line per method: its speed-up on each kind of prompt, and over all kinds that every method takes.

    Args:
        methods: plain decoding and ours first.
    """
    kinds = {turn.unit.dataset: turn.unit for turn in turns}
    alone = any(method.single_row for method in methods)
    for_all = [turn for turn in turns if turn.unit.batch_size == 1 or not alone]
    lines = Table(
        box=None,
        padding=(0, 1, 0, 0),
        caption=f"{_counted(turns, methods)}; range: of its slowest and fastest turn",
        caption_justify="left",
    )
    lines.add_column("", no_wrap=True)
    for title in (*kinds, "all", "range", "tokens\n/call", "same\ntext"):
        lines.add_column(title, justify="right", no_wrap=True)
    for method in methods:
        everything = _pairs(turns, method.name)
        shared = _pairs(for_all, method.name)
        lines.add_row(
            method.name,
            *(
                "refused" if unit.batch_size > 1 and method.single_row else _ratio(_pairs(turns, method.name, kind))
                for kind, unit in kinds.items()
            ),
            _ratio(shared),
            _range(shared),
            _tokens_per_call(shared),
            "" if method.name == PLAIN else f"{sum(a.rows == b.rows for a, b in everything)} of {len(everything)}",
        )
    return lines


def _pairs(turns: Iterable[Turn], name: str, kind: str | None = None) -> list[Pair]:
    """Of the turns that both took, on one kind of prompt or on all."""
    return [
        (turn.made[name], turn.made[PLAIN])
        for turn in turns
        if {name, PLAIN} <= turn.made.keys() and kind in (None, turn.unit.dataset)
    ]


def _counted(turns: Sequence[Turn], methods: Sequence[Method]) -> str:
    """Those that plain decoding and ours finished; the last column says in how many of them others took part."""
    count = len(_pairs(turns, methods[1].name))
    return f"{count} turn{'s' * (count != 1)}"


def _ratio(pairs: Sequence[Pair]) -> str:
    return f"{_speed_up(pairs):.2f}x" if pairs else "-"


def _range(pairs: Sequence[Pair]) -> str:
    ratios = [_speed_up([pair]) for pair in pairs]
    return f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "-"


def _speed_up(pairs: Sequence[Pair]) -> float:
    return speed_ratio((made.stats for made, _ in pairs), (plain.stats for _, plain in pairs))


def _tokens_per_call(pairs: Sequence[Pair]) -> str:
    return f"{total(made.stats for made, _ in pairs).mean_acceptance_length:.2f}" if pairs else "-"


def differences(bench: Bench, turns: Iterable[Turn]) -> Iterator[tuple[str, str, Difference]]:
    """Method, kind of prompt, and where its first answer leaves plain decoding's; in batches that is not looked up."""
    audits: dict[str, Audit] = {}
    seen: set[tuple[str, str]] = set()
    for turn in (turn for turn in turns if turn.unit.batch_size == 1 and PLAIN in turn.made):
        kind = turn.unit.dataset
        if kind not in audits:
            ids, plain = inputs_of(bench, turn.unit)["input_ids"], turn.made[PLAIN].rows[0]
            audits[kind] = Audit(bench.target, ids, plain, **bench.options(turn.unit))
        for name, made in turn.made.items():
            if (name, kind) not in seen and (found := audits[kind].difference(made.rows[0])):
                yield name, kind, found
            seen.add((name, kind))


def said_of_texts(found: Iterable[tuple[str, str, Difference]]) -> Iterator[str]:
    """Where single answers differ from plain decoding's: near ties in one line, all else in a line each."""
    parted = list(found)
    if ties := sum(difference.near_tie for *_, difference in parted):
        yield f"Texts that leave plain decoding's at near ties of two tokens: {ties}. `hf-specdec audit` says where."
    for name, kind, difference in parted:
        if not difference.near_tie:
            yield f"WRONG: {name}, {kind}: differs at new token {difference.position}"
