"""`hf-specdec explain`."""

from ..tools.explain.run import ExplainSettings, run_explain


def explain(settings: ExplainSettings) -> None:
    r"""Take a generation apart.

    Example:

    hf-specdec explain --target smollm2 --drafter hub_configs/hybrid \
      --prompt "Once upon a time" --output explained.html
    """
    run_explain(settings)
