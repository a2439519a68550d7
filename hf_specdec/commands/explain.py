"""`hf-specdec explain`."""

from ..explain.explanation import ExplainSettings
from ..explain.run import run_explain


def explain(settings: ExplainSettings) -> None:
    """Take a generation apart."""
    run_explain(settings)
