"""`PromptLookupDrafter`: copies what followed the longest earlier match of the text's end. Needs no model.

Leviathan et al. 2023, section 3.6, name copying from the context among the drafters of negligible cost.
"""

from typing import Any

from ...budget import Acceptance, Learned
from ...hub.registry import register_drafter
from ...protocol import DraftContext
from ..base import Drafter
from ..sources import Copies
from ..trees import TreeSession
from .config import PromptLookupConfig


@register_drafter
class PromptLookupDrafter(Drafter):
    """Copies what followed the same words before. Needs no model."""

    config_class = PromptLookupConfig
    reads_prompt = False
    config: PromptLookupConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.proposes_trees = self.config.num_branches > 1
        self._acceptance = Learned(Acceptance)

    def start(self, context: DraftContext) -> TreeSession:
        acceptance = self._acceptance.of(context.target, context.do_sample)
        return TreeSession(context, acceptance, [Copies(context, self.config, acceptance)])
