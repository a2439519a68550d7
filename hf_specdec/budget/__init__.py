"""How much to draft: every drafted token has a chance to be kept, every width of a forward has its time, and the nodes
that give most tokens per second are verified."""

from .acceptance import Acceptance, Evidence, Source
from .allowance import Allowance
from .cost import Cost
from .decision import MOST_NODES, SUMMED, Advance, fastest, most_per_second, steps_that_pay
from .draft_cost import LOOK_STEPS, DraftCost, Rest
from .learned import Learned
from .stepwise import Stepwise
from .tree import Tree, are_chains
from .window import Window, why_rested

__all__ = [
    "LOOK_STEPS",
    "MOST_NODES",
    "SUMMED",
    "Acceptance",
    "Advance",
    "Allowance",
    "Cost",
    "DraftCost",
    "Evidence",
    "Learned",
    "Rest",
    "Source",
    "Stepwise",
    "Tree",
    "Window",
    "are_chains",
    "fastest",
    "most_per_second",
    "steps_that_pay",
    "why_rested",
]
