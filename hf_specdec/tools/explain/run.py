"""`hf-specdec explain`: load, take apart, print and write."""

from pathlib import Path

from ...drafters.pearl import Timeline
from ...errors import SpeculationError
from ..showing import quiet, write_page
from .page import explain_page, print_explanation
from .reading import Explanation, explain
from .settings import PAGES, ExplainSettings


def run_explain(settings: ExplainSettings) -> Explanation:
    """Generate, print what was found, and write the files that are asked for.

    Raises:
        SpeculationError: bad settings, models that do not work, or a file that cannot be written.
    """
    settings.check()
    files = settings.files()
    with quiet():
        pair = settings.load()
        explanation = explain(settings, pair.target, pair.draft, pair.tokenizer)
    print_explanation(explanation)
    for file in files:
        if file.suffix.lower() in PAGES:
            write_page(file, explain_page(explanation))
        else:
            save_timeline(explanation.timeline, file)
    return explanation


def save_timeline(timeline: Timeline, path: Path) -> None:
    """Draw it into a picture.

    Raises:
        SpeculationError: it cannot be written, or matplotlib is not installed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        timeline.plot(path)
    except (OSError, ValueError) as error:  # matplotlib: a file format that it does not know
        raise SpeculationError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
