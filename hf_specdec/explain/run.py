"""`hf-specdec explain`: load, take apart, print and write."""

from pathlib import Path

from ..loading.outputs import writable_file
from ..showing.page import write_page
from .explanation import ExplainSettings, Explanation
from .page import explain_page, print_explanation
from .reading import explain
from .timeline import save_timeline


def run_explain(settings: ExplainSettings, html: Path | None = None) -> Explanation:
    """Generate, print the picture, and write the page if one is asked for.

    Raises:
        SpeculationError: bad settings, models that do not work, or a file that cannot be written.
    """
    settings.check()
    for name, file in (("html", html), ("timeline", settings.timeline)):
        if file is not None:
            writable_file(file, name)
    pair = settings.load()
    explanation = explain(settings, pair.target, pair.draft, pair.tokenizer)
    print_explanation(explanation)
    if settings.timeline is not None:
        save_timeline(explanation.timeline, Path(settings.timeline))
    if html is not None:
        write_page(html, explain_page(explanation))
    return explanation
