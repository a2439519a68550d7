"""`hf-specdec generate`."""

from ..tools.demo import GenerateSettings, run_generate


def generate(settings: GenerateSettings) -> None:
    """Continue a text.

    Example:

    hf-specdec generate --target smollm2 --drafter hub_configs/hybrid --chat
    """
    run_generate(settings)
