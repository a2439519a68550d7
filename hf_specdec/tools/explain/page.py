"""An explanation as a picture: coloured lines in the terminal, a page with hover in the browser."""

from collections.abc import Sequence
from html import escape

from rich.console import Console
from rich.text import Text

from ..instruments.meter import Meter
from ..showing.marks import marked
from ..showing.page import cards, html_page
from ..showing.pretended import pretended_costs
from .explanation import Candidate, Explanation, TokenInfo, TreeNode

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
    for phrase in pretended_costs(vars(explanation.settings)):
        console.print(f"{'pretended costs':<28} {phrase}", highlight=False)
    if explanation.rejections:
        console.print("\nCostliest rejections", style="bold")
    for r in explanation.rejections:
        tops = f"target {_tops(r.target_top)}" + (f"; draft {_tops(r.draft_top)}" if r.draft_top else "")
        text = f"round {r.round:>3}: {r.drafted!r} → {r.replaced_by!r}, {r.wasted_tokens} tokens"
        console.print(Text(f"{text}, {1000 * r.wasted_seconds:.1f} ms; {tops}"))
    if explanation.settings.output:
        console.print(Text("\n" + explanation.timeline.text(console.width - len("target  100% busy"))))
    console.print(Text("\n" + audit_text(explanation)))


def headline(explanation: Explanation) -> dict[str, str]:
    """The few numbers to see first."""
    e = explanation
    speed, plain_speed = e.new_tokens / e.meter.seconds, e.plain_tokens / e.plain_meter.seconds
    figures = {
        "speed-up over plain decoding": f"{speed / plain_speed:.2f}x",
        "tokens per second": f"{speed:.1f}",
        "tokens": str(e.new_tokens),
        "target calls": str(len(e.meter.of("target"))),
        "draft calls": str(len(e.meter.of("draft")) if e.stats is None else e.stats.draft_calls),
    }
    if e.stats is not None:
        figures["tokens per call"] = f"{e.stats.mean_acceptance_length:.2f}"
        figures["acceptance rate α"] = "-" if e.stats.alpha is None else f"{e.stats.alpha:.2f}"
    return figures


def audit_text(explanation: Explanation) -> str:
    """Whether the text is plain decoding's, and where not, how close the call was."""
    d = explanation.difference
    if explanation.same_text is None:
        return "Exactness: sampled text is not compared; its distribution is the target's."
    if d is None or explanation.difference_texts is None:
        return "Exactness: every token is plain decoding's."
    plain, other = explanation.difference_texts
    if d.gap is None:
        return f"Exactness: one text ends at new token {d.position}, where the other goes on ({plain!r}, {other!r})."
    verdict = "a near tie, within rounding" if d.near_tie else "not a near tie: please report this"
    return (
        f"Exactness: first difference at new token {d.position}: plain decoding chose {plain!r}, this drafter's "
        f"text has {other!r}. Plain decoding's logits of the two are {d.gap:.4g} apart "
        f"({explanation.settings.dtype} rounds them to {d.rounding:.4g}): {verdict}."
    )


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
    how = ", ".join([f"T={e.settings.temperature:g}", *pretended_costs(vars(e.settings))])
    body = f"""
<h1>{escape(e.settings.spec)}, round by round</h1>
<p class="soft">Target <code>{escape(e.settings.target)}</code>, {how}. Each line is one call of the
target. Hover over a token, or tap it, for its probabilities.</p>
{cards(headline(e))}
<h2>The prompt</h2><pre>{escape(e.settings.prompt)}</pre>
<h2>What was drafted, what was kept</h2><p class="legend">{legend}</p>{rounds}
<h2>Where the time went</h2>{timeline(e)}
<h2>The costliest rejections</h2>{_rejections_html(e)}
<h2>Exactness</h2><p>{escape(audit_text(e))}</p>
"""
    return html_page(f"{e.settings.spec}, explained", body, STYLE)


def timeline(explanation: Explanation) -> str:
    """The paper's Figure 5: forwards of draft and target over time, with plain decoding on the same scale below."""
    e = explanation
    total = max(e.meter.seconds, e.plain_meter.seconds)
    rows = [("speculative", e.meter), ("plain", e.plain_meter)]
    drawn = "".join(_timeline_row(label, meter, 8 + 62 * i, total) for i, (label, meter) in enumerate(rows))
    milliseconds = [(label, 1000 * meter.seconds) for label, meter in rows]
    use = e.timeline.utilisation()
    said = ", ".join(f"{label} {ms:.0f} ms" for label, ms in milliseconds)
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


def _tree_html(nodes: Sequence[TreeNode]) -> str:
    """A drafted tree, folded: each node below its parent, with how likely the drafter found it."""

    def below(parent: int) -> str:
        items = []
        for i, node in enumerate(nodes):
            if node.parent == parent:
                chance = "" if node.estimate is None else f' <span class="soft">{node.estimate:.2f}</span>'
                items.append(
                    f'<li><span class="{node.kind}">{escape(_visible(node.text))}</span>{chance}{below(i)}</li>'
                )
        return f"<ul>{''.join(items)}</ul>" if items else ""

    if not nodes:
        return ""
    pruned = sum(node.kind == "pruned" for node in nodes)
    said = f"tree of {len(nodes)}" + (f", {pruned} pruned" if pruned else "")
    return f'<details class="tree"><summary>{said}</summary>{below(-1)}</details>'


def _rejections_html(explanation: Explanation) -> str:
    if not explanation.rejections:
        return "<p>The target replaced no drafted token.</p>"
    rows = "".join(
        f'<tr><td>{r.round}</td><td class="text">{escape(repr(r.drafted))}</td>'
        f'<td class="text">{escape(repr(r.replaced_by))}</td><td>{r.wasted_tokens}</td>'
        f"<td>{1000 * r.wasted_seconds:.1f}</td>"
        f'<td class="text">{escape(_tops(r.target_top))}</td>'
        f'<td class="text">{escape(_tops(r.draft_top) or "-")}</td></tr>'
        for r in explanation.rejections
    )
    head = (
        '<th>round</th><th class="text">drafted</th><th class="text">target\'s own</th><th>tokens lost</th>'
        '<th>ms lost</th><th class="text">target\'s top 2</th><th class="text">draft\'s top 2</th>'
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _tops(candidates: list[Candidate]) -> str:
    return ", ".join(f"{c.text!r} {c.prob:.2f}" for c in candidates)


def _visible(text: str) -> str:
    """Line breaks and tabs as signs, so that a round stays on its line."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
