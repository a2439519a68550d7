"""`model.generate(custom_generate="org/repo", trust_remote_code=True)`: speculate with the drafter of this repo.

Needs `pip install hf-specdec`; nothing has to be imported.
"""

from typing import Any

import hf_specdec  # noqa: F401  (registers with transformers' generate)

SPECULATION_TYPE: str | None = "disco"
# The repo and the revision of its files, written on push: this code is never told them.
DRAFTER: dict[str, str] | None = None


def generate(model: Any, speculation: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """As `model.generate`; from a local folder pass `speculation={"drafter": folder}`."""
    speculation = speculation or {}
    if "drafter" not in speculation:
        speculation = (DRAFTER or {}) | speculation
    if "drafter" not in speculation:
        raise ValueError('this copy was not pushed to a repo; pass speculation={"drafter": <its folder>}')
    # The class's generate: the model's own may be this very function, where the target's repo carries it.
    return type(model).generate(model, speculation_type=SPECULATION_TYPE, speculation=speculation, **kwargs)
