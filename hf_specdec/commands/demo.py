"""`hf-specdec demo`."""

from ..tools.demo import DemoSettings, run_demo


def demo(settings: DemoSettings) -> None:
    """Answer a few prompts.

    Example:

    hf-specdec demo --max-new-tokens 48 --seconds 30
    """
    run_demo(settings)
