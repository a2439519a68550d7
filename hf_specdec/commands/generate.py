"""`hf-specdec generate`."""

from typer import Exit

from ..tools.demo import GenerateSettings, run_generate


def generate(settings: GenerateSettings) -> None:
    """Continue a text, or answer a file of prompts.

    Example:

    hf-specdec generate --target smollm2 --drafter hub_configs/hybrid --chat
    """
    raise Exit(run_generate(settings))
