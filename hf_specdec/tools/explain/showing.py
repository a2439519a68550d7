"""An explanation as it is shown: a coloured line per round, and what it cost."""

from rich.console import Console
from rich.text import Text

from .reading import Explanation, Likeliest

KINDS = {
    "first": ("", ("", ""), "the target's first token, from the prefill"),
    "accepted": ("green", ("", ""), "drafted and accepted"),
    "rejected": ("red strike", ("[-", "-]"), "drafted and rejected"),
    "own": ("blue", ("{+", "+}"), "the target's own: a correction, or the bonus token"),
    "dropped": ("bright_black strike", ("(-", "-)"), "drafted after a rejection, thrown away"),
}
"""Kind of token → terminal style, signs in its place, meaning. The colours are those of the paper's Figure 1."""


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Figure 1 in colours, a line per round, then the costliest rejections, Figure 5, and the audit."""
    for number, line in enumerate(explanation.lines):
        row = Text(f"{number:>3}  ", style="bright_black")
        for token in line:
            row.append(_marked(console, _visible(token.text), token.kind))
        console.print(row)
    legend = (_marked(console, meaning, kind) for kind, (*_, meaning) in KINDS.items() if kind != "first")
    console.print(Text("\n").append(Text("   ").join(legend)))
    for label, value in headline(explanation).items():
        console.print(f"{label:<28} {value}", highlight=False)
    if explanation.rejections:
        console.print("\nCostliest rejections", style="bold")
    for r in explanation.rejections:
        tops = f"target {_tops(r.target_top)}" + (f"; draft {_tops(r.draft_top)}" if r.draft_top else "")
        text = f"round {r.round:>3}: {r.drafted!r} → {r.replaced_by!r}, {r.wasted_tokens} tokens"
        console.print(Text(f"{text}, {1000 * r.wasted_seconds:.1f} ms; {tops}"))
    console.print(Text("\n" + explanation.timeline.text(console.width - len("target  100% busy"))))
    console.print(Text("\n" + explanation.exactness))


def headline(explanation: Explanation) -> dict[str, str]:
    """The few numbers to see first."""
    e = explanation
    speed, plain_speed = (made.stats.tokens_per_second for made in (e.ours, e.plain))
    figures = {
        "speed-up over plain decoding": f"{speed / plain_speed:.2f}x",
        "tokens per second": f"{speed:.1f}",
        "tokens": str(e.ours.stats.emitted_tokens),
        "target calls": str(len(e.ours.meter.of("target"))),
        "draft calls": str(e.ours.stats.draft_calls),
    }
    if e.stats is not None:
        figures["tokens per call"] = f"{e.stats.mean_acceptance_length:.2f}"
        figures["acceptance rate α"] = "-" if e.stats.alpha is None else f"{e.stats.alpha:.2f}"
    return figures


def _marked(console: Console, text: str, kind: str) -> Text:
    """The text in its style, or between its signs on a console without colours (no terminal, or NO_COLOR is set)."""
    style, signs, _ = KINDS[kind]
    if text and (console.color_system is None or console.no_color):
        return Text(f"{signs[0]}{text}{signs[1]}")
    return Text(text, style=style)


def _tops(likeliest: Likeliest) -> str:
    return ", ".join(f"{text!r} {chance:.2f}" for text, chance in likeliest)


def _visible(text: str) -> str:
    """Line breaks and tabs as signs, so that a round stays on its line."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
