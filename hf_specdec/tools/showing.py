"""What the commands share when they show something: HTML pages, and silence."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path

from transformers.utils import logging

from ..errors import SpeculationError

STYLE = """
:root { --text: #1c2330; --soft: #5b6575; --line: #dde2ea; --page: #fff; --card: #f5f7fa; --accent: #3559c7;
  --good: #17703a; --bad: #b3261e; --own: #2450b8; --draft: #5b9bd5; --target: #7d5ba6; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ef; --soft: #9aa4b5; --line: #333b49; --page: #14181f;
  --card: #1d232d; --accent: #8fa8ff; --good: #6fd08c; --bad: #ff8a80; --own: #8fb4ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
p { max-width: 46rem; } .soft { color: var(--soft); } code { font-size: .88em; }
.cards { display: flex; flex-wrap: wrap; gap: .7rem; margin: 1.2rem 0; }
.card { flex: 1 1 9rem; background: var(--card); border-radius: .6rem; padding: .7rem .9rem; }
.card b { display: block; font-size: 1.5rem; line-height: 1.25; } .card span { color: var(--soft); font-size: .85rem; }
.wide { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; min-width: 40rem;
  width: 100%; }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
tr.best td { font-weight: 600; } th.text, td.text { text-align: left; }
figure { margin: 1rem 0; }
figure img { width: 46rem; max-width: 100%; height: auto; background: #fff; border-radius: .4rem; }
figcaption { color: var(--soft); font-size: .85rem; max-width: 46rem; } details { margin: 1rem 0; }
pre { overflow-x: auto; background: var(--card); padding: .8rem; border-radius: .5rem; font-size: .8rem; }
"""


def html_page(title: str, body: str, style: str = "") -> str:
    """A whole page in one file: no scripts, no network, readable on a phone and in the dark.

    Args:
        title: text.
        body: HTML.
        style: CSS that this page needs beside `STYLE`.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def cards(figures: dict[str, str]) -> str:
    """The few numbers to see first: label → value."""
    items = (f'<div class="card"><b>{escape(v)}</b><span>{escape(k)}</span></div>' for k, v in figures.items())
    return f'<div class="cards">{"".join(items)}</div>'


def html_table(
    header: Sequence[str],
    rows: Iterable[Iterable[str]],
    tips: Mapping[str, str] | None = None,
    best: int | None = None,
    text: Iterable[str] = (),
) -> str:
    """A table that scrolls inside its frame where the page is too narrow.

    Args:
        tips: what a column means, shown when the pointer rests on its title.
        best: index of the row in bold.
        text: the columns that are aligned to the left.
    """
    kinds = [' class="text"' if name in set(text) else "" for name in header]
    titles = (escape((tips or {}).get(name, ""), quote=True) for name in header)
    head = "".join(
        f'<th{kind} title="{title}">{escape(name)}</th>'
        for kind, title, name in zip(kinds, titles, header, strict=True)
    )
    body = "".join(
        f"<tr{' class=best' if i == best else ''}>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for i, row in enumerate(rows)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def write_page(path: Path, text: str) -> None:
    """Write a text file, and the folder that it lies in.

    Raises:
        SpeculationError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpeculationError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and notes of transformers inside the block."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
