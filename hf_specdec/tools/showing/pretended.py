"""The costs that models pretend to have, in words, for wherever figures are shown."""

from collections.abc import Mapping
from typing import Any


def pretended_costs(settings: Mapping[str, Any]) -> list[str]:
    """A phrase for each option in use; none where the models cost what they cost.

    Args:
        settings: `pad_target_mlp`, `pad_draft_mlp` (units), `pace_target`, `pace_draft` (milliseconds); others are
            passed over.
    """
    padded = [
        f"the {role}'s MLPs cost-padded to {settings[name]:,}"
        for role in ("target", "draft")
        if settings.get(name := f"pad_{role}_mlp")
    ]
    return padded + [
        f"the {role} paced at {settings[name]:g} ms"
        for role in ("target", "draft")
        if settings.get(name := f"pace_{role}")
    ]
