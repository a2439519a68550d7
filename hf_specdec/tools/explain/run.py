"""`hf-specdec explain`: load, take apart, print and write."""

from importlib.util import find_spec
from pathlib import Path

from ...errors import SpeculationError
from ..loading.outputs import writable_file, writable_folder
from ..showing.page import write_page
from ..showing.quiet import quiet
from .explanation import ExplainSettings, Explanation
from .page import explain_page, print_explanation
from .reading import explain
from .timeline import save_timeline

PAGES, PICTURES = (".html", ".htm"), (".png", ".svg", ".pdf")


def run_explain(settings: ExplainSettings) -> Explanation:
    """Generate, print what was found, and write the files that are asked for.

    Raises:
        SpeculationError: bad settings, models that do not work, or a file that cannot be written.
    """
    settings.check()
    files = [file for output in settings.output for file in files_of(output)]
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


def files_of(output: str) -> list[Path]:
    """The page, the picture, or both, in a folder that is made if it is not there.

    Raises:
        SpeculationError: a file of another kind, or one that cannot be written.
    """
    suffix = Path(output).suffix.lower()
    if Path(output).is_dir() or output.endswith("/") or not suffix:
        folder = writable_folder(output)
        return [folder / "explanation.html", *([folder / "timeline.png"] if can_draw() else [])]
    if suffix not in PAGES + PICTURES:
        raise SpeculationError(
            f"output must be a page ({', '.join(PAGES)}), a picture ({', '.join(PICTURES)}) or a folder, got {output!r}"
        )
    if suffix in PICTURES and not can_draw():
        raise SpeculationError(f"output {output!r} is a picture, which needs matplotlib; pip install matplotlib")
    return [writable_file(output, "output")]


def can_draw() -> bool:
    """Whether there is matplotlib, an extra. A folder goes without the picture where there is none."""
    return find_spec("matplotlib") is not None
