"""What this library raises and warns with."""

import warnings


class SpeculationError(ValueError):
    """Bad input: the message names the argument, what was got, what is allowed, and the fix."""


class SpeculationWarning(UserWarning):
    """Speculation was narrowed or given up for a call; the text is what plain decoding gives all the same."""


def warn(message: str) -> None:
    """Tell the user once per call that speculation was narrowed or given up."""
    warnings.warn(message, SpeculationWarning, stacklevel=2)
