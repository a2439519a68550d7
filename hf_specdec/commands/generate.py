"""`hf-specdec generate`."""

from ..demo import GenerateSettings, run_generate


def generate(settings: GenerateSettings) -> None:
    """Continue a text."""
    run_generate(settings)
