"""An explanation as it is shown: coloured lines in the terminal, a page with hover in the browser."""

from collections.abc import Sequence
from html import escape

from rich.console import Console
from rich.text import Text

from ..instruments.meter import Meter
from ..instruments.recording import Node
from ..showing import cards, html_page, html_table
from .reading import Candidate, Explanation, TokenInfo

KINDS = {
    "first": ("", ("", ""), "the target's first token, from the prefill"),
    "accepted": ("green", ("", ""), "drafted and accepted"),
    "rejected": ("red strike", ("[-", "-]"), "drafted and rejected"),
    "own": ("blue", ("{+", "+}"), "the target's own: a correction, or the bonus token"),
    "dropped": ("bright_black strike", ("(-", "-)"), "drafted after a rejection, thrown away"),
}
"""Kind of token → terminal style, signs in its place, meaning. The colours are those of the paper's Figure 1."""

STYLE = """
.round { display: flex; gap: .8rem; padding: .28rem 0; border-bottom: 1px solid var(--line); }
.round > span:first-child { flex: 0 0 2.2rem; color: var(--soft); text-align: right; font-size: .8rem; }
.tokens { white-space: pre-wrap; font: .92rem/1.7 ui-monospace, monospace; min-width: 0; }
.t { position: relative; border-radius: .2rem; padding: .08rem 0; cursor: default; outline-offset: 1px; }
.accepted { color: var(--good); background: color-mix(in srgb, var(--good) 12%, transparent); }
.rejected { color: var(--bad); text-decoration: line-through; }
.own { color: var(--own); font-weight: 600; }
.dropped { color: var(--soft); text-decoration: line-through; opacity: .7; }
.t[data-tip]:hover::after, .t[data-tip]:focus::after { content: attr(data-tip); position: fixed; left: 1rem;
  right: 1rem; bottom: 1rem; margin: 0 auto; max-width: 34rem; background: var(--text); color: var(--page);
  padding: .5rem .8rem; border-radius: .5rem; font: 500 .9rem/1.4 system-ui, sans-serif; white-space: pre-wrap;
  z-index: 9; }
.pruned { color: var(--soft); opacity: .55; }
.tree summary { color: var(--soft); font-size: .8rem; cursor: pointer; }
.tree ul { margin: 0; padding-left: 1.1rem; } .tree li { list-style: none; }
.legend span { margin-right: 1.1rem; display: inline-block; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); } svg.timeline { display: block; min-width: 46rem; }
"""


def print_explanation(explanation: Explanation, console: Console | None = None) -> None:
    """Figure 1 in colours, a line per round, then the costliest rejections and the audit."""
    console = console or Console()
    for number, line in enumerate(explanation.lines):
        row = Text(f"{number:>3}  ", style="bright_black")
        for token in line:
            row.append(marked(console, _visible(token.text), *KINDS[token.kind][:2]))
        console.print(row)
    legend = (marked(console, meaning, style, signs) for style, signs, meaning in list(KINDS.values())[1:])
    console.print(Text("\n").append(Text("   ").join(legend)))
    for label, value in headline(explanation).items():
        console.print(f"{label:<28} {value}", highlight=False)
    if explanation.rejections:
        console.print("\nCostliest rejections", style="bold")
    for r in explanation.rejections:
        tops = f"target {_tops(r.target_top)}" + (f"; draft {_tops(r.draft_top)}" if r.draft_top else "")
        text = f"round {r.round:>3}: {r.drafted!r} → {r.replaced_by!r}, {r.wasted_tokens} tokens"
        console.print(Text(f"{text}, {1000 * r.wasted_seconds:.1f} ms; {tops}"))
    if explanation.settings.output:
        console.print(Text("\n" + explanation.timeline.text(console.width - len("target  100% busy"))))
    console.print(Text("\n" + explanation.exactness))


def marked(console: Console, text: str, style: str, signs: tuple[str, str]) -> Text:
    """The text in its style, or between its signs on a console without colours (no terminal, or NO_COLOR is set)."""
    if text and (console.color_system is None or console.no_color):
        return Text(f"{signs[0]}{text}{signs[1]}")
    return Text(text, style=style)


def headline(explanation: Explanation) -> dict[str, str]:
    """The few numbers to see first."""
    e = explanation
    speed, plain_speed = (made.tokens / made.meter.seconds for made in (e.ours, e.plain))
    figures = {
        "speed-up over plain decoding": f"{speed / plain_speed:.2f}x",
        "tokens per second": f"{speed:.1f}",
        "tokens": str(e.ours.tokens),
        "target calls": str(len(e.ours.meter.of("target"))),
        "draft calls": str(e.ours.acceptance.draft_calls),
    }
    if e.stats is not None:
        figures["tokens per call"] = f"{e.stats.mean_acceptance_length:.2f}"
        figures["acceptance rate α"] = "-" if e.stats.alpha is None else f"{e.stats.alpha:.2f}"
    return figures


def explain_page(explanation: Explanation) -> str:
    """The page, as HTML."""
    e = explanation
    trees = [*e.trees, *[[]] * (len(e.lines) - len(e.trees))]
    rounds = "".join(
        f'<div class="round"><span>{number}</span><span class="tokens">{"".join(map(_token_html, line))}'
        f"{_tree_html(tree)}</span></div>"
        for number, (line, tree) in enumerate(zip(e.lines, trees, strict=True))
    )
    legend = "".join(
        f'<span><b class="{kind}">token</b> {escape(meaning)}</span>'
        for kind, (*_, meaning) in KINDS.items()
        if kind != "first"
    )
    body = f"""
<h1>{escape(e.settings.spec)}, round by round</h1>
<p class="soft">Target <code>{escape(e.settings.target)}</code>, T={e.settings.temperature:g}. Each line is one call of
the target. Hover over a token, or tap it, for its probabilities.</p>
{cards(headline(e))}
<h2>The prompt</h2><pre>{escape(e.settings.prompt)}</pre>
<h2>What was drafted, what was kept</h2><p class="legend">{legend}</p>{rounds}
<h2>Where the time went</h2>{timeline(e)}
<h2>The costliest rejections</h2>{_rejections_html(e)}
<h2>Exactness</h2><p>{escape(e.exactness)}</p>
"""
    return html_page(f"{e.settings.spec}, explained", body, STYLE)


def timeline(explanation: Explanation) -> str:
    """The paper's Figure 5: forwards of draft and target over time, with plain decoding on the same scale below."""
    e = explanation
    rows = [("speculative", e.ours.meter), ("plain", e.plain.meter)]
    total = max(meter.seconds for _, meter in rows)
    drawn = "".join(_timeline_row(label, meter, 8 + 62 * i, total) for i, (label, meter) in enumerate(rows))
    use = e.timeline.utilisation()
    said = ", ".join(f"{label} {1000 * meter.seconds:.0f} ms" for label, meter in rows)
    return (
        f'<div class="wide"><svg class="timeline" viewBox="0 0 1000 132" role="img" aria-label="{said}">{drawn}</svg>'
        "</div>"
        f'<p class="soft">Draft steps in <b style="color:var(--draft)">blue</b>, target calls in '
        f'<b style="color:var(--target)">purple</b>, everything else is gap. {said}. While decoding, the target was '
        f"busy {use['target']:.0%} of the time and waited for the draft {use['waited']:.0%} of it, the draft was busy "
        f"{use['draft']:.0%}.</p>"
    )


def _timeline_row(label: str, meter: Meter, top: int, total: float) -> str:
    scale = 1000 / total
    blocks = "".join(
        f'<rect x="{f.start * scale:.2f}" y="{top + (16 if f.role == "draft" else 32)}" height="14" '
        f'width="{max(f.seconds * scale - 0.15, 0.15):.2f}" fill="var(--{f.role})">'
        f"<title>{f.role}: {f.width} token{'s' * (f.width != 1)}, {1000 * f.seconds:.2f} ms</title></rect>"
        for f in meter.forwards
    )
    return f'<text x="0" y="{top + 10}">{label}</text>{blocks}'


def _token_html(token: TokenInfo) -> str:
    tip = [KINDS[token.kind][-1]]
    if token.p is not None:
        tip.append(f"target p = {token.p:.3f}")
    if token.q is not None:
        tip.append(f"draft q = {token.q:.3f}")
    if token.p is not None and token.q:
        tip.append(f"min(1, p/q) = {min(1.0, token.p / token.q):.3f}")
    tip_text = escape(f"{_visible(token.text)}   " + " · ".join(tip), quote=True)
    return f'<span class="t {token.kind}" tabindex="0" data-tip="{tip_text}">{escape(_visible(token.text))}</span>'


def _tree_html(nodes: Sequence[tuple[str, Node]]) -> str:
    """A drafted tree, folded: each node below its parent, with how likely the drafter found it."""

    def below(parent: int) -> str:
        items = []
        for i, (text, node) in enumerate(nodes):
            if node.parent == parent:
                chance = "" if node.estimate is None else f' <span class="soft">{node.estimate:.2f}</span>'
                items.append(f'<li><span class="{node.fate}">{escape(_visible(text))}</span>{chance}{below(i)}</li>')
        return f"<ul>{''.join(items)}</ul>" if items else ""

    if not nodes:
        return ""
    pruned = sum(node.fate == "pruned" for _, node in nodes)
    said = f"tree of {len(nodes)}" + (f", {pruned} pruned" if pruned else "")
    return f'<details class="tree"><summary>{said}</summary>{below(-1)}</details>'


def _rejections_html(explanation: Explanation) -> str:
    if not explanation.rejections:
        return "<p>The target replaced no drafted token.</p>"
    drafted, own, tops = "drafted", "target's own", ("target's top 2", "draft's top 2")
    rows = (
        (
            str(r.round),
            repr(r.drafted),
            repr(r.replaced_by),
            str(r.wasted_tokens),
            f"{1000 * r.wasted_seconds:.1f}",
            _tops(r.target_top),
            _tops(r.draft_top) or "-",
        )
        for r in explanation.rejections
    )
    return html_table(("round", drafted, own, "tokens lost", "ms lost", *tops), rows, text=(drafted, own, *tops))


def _tops(candidates: list[Candidate]) -> str:
    return ", ".join(f"{c.text!r} {c.prob:.2f}" for c in candidates)


def _visible(text: str) -> str:
    """Line breaks and tabs as signs, so that a round stays on its line."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
