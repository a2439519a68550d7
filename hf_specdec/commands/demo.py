"""`hf-specdec demo`."""

from ..demo import DemoSettings, run_demo


def demo(settings: DemoSettings) -> None:
    """Answer a few prompts."""
    run_demo(settings)
