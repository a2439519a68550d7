"""What `hf-specdec explain` is asked."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Option

from ...errors import SpeculationError
from ..loading.checks import check_decoding
from ..loading.drafters import DrafterSettings
from ..loading.outputs import writable_file, writable_folder

PAGES, PICTURES = (".html", ".htm"), (".png", ".svg", ".pdf")


@dataclass(kw_only=True)
class ExplainSettings(DrafterSettings):
    """What to explain."""

    prompt: Annotated[str, Option(help="Text to continue.")]
    output: Annotated[
        list[str],
        Option(
            "--output",
            "--html",
            "--timeline",
            help="File to write: a page (.html) or a picture of when each model was busy (.png, .svg, .pdf); or a "
            "folder for both. May be given several times.",
        ),
    ] = field(default_factory=list)
    max_new_tokens: Annotated[int, Option(help="New tokens, at most.")] = 128
    temperature: Annotated[float, Option(help="Sampling temperature; 0 is greedy.")] = 0.0
    seed: Annotated[int, Option(help="Seed of sampling.")] = 0

    def check(self) -> None:
        """
        Raises:
            SpeculationError: an argument out of range.
        """
        if not self.prompt.strip():
            raise SpeculationError(f"prompt must hold text to continue, got {self.prompt!r}")
        check_decoding(self.max_new_tokens, self.temperature, self.seed)

    def files(self) -> list[Path]:
        """The pages and pictures to write.

        Raises:
            SpeculationError: a file of another kind, or one that cannot be written.
        """
        return [file for output in self.output for file in _files_of(output)]


def _files_of(output: str) -> list[Path]:
    """The page, the picture, or both in a folder. The folder is made; it gets no picture without matplotlib."""
    can_draw = find_spec("matplotlib") is not None
    suffix = Path(output).suffix.lower()
    if Path(output).is_dir() or output.endswith("/") or not suffix:
        folder = writable_folder(output)
        return [folder / "explanation.html", *([folder / "timeline.png"] if can_draw else [])]
    if suffix not in PAGES + PICTURES:
        raise SpeculationError(
            f"output must be a page ({', '.join(PAGES)}), a picture ({', '.join(PICTURES)}) or a folder, got {output!r}"
        )
    if suffix in PICTURES and not can_draw:
        raise SpeculationError(f"output {output!r} is a picture, which needs matplotlib; pip install matplotlib")
    return [writable_file(output, "output")]
