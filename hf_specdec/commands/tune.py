"""`hf-specdec tune`."""

from ..tools.tune.run import TuneSettings, run_tune


def tune(settings: TuneSettings) -> None:
    r"""Find the fastest drafter for prompts.

    Example:

    hf-specdec tune --target smollm2 --draft hub_configs/draft_model/draft_model \
      --prompts chat --pack-linear --output my-drafter
    """
    run_tune(settings)
