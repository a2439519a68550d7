"""How much to draft: every drafted token has a chance to be kept, every width of a forward has its time, and the nodes
that give most tokens per second are verified."""

from .allowance import Allowance
from .cost import Cost
from .decision import MOST_NODES, SUMMED, Advance, fastest, most_per_second, steps_that_pay
from .draft_cost import LOOK_STEPS, DraftCost, Rest
from .learned import Learned
from .stepwise import Stepwise
from .survival import Band, Survival, speakers
from .tree import Tree, are_chains
from .window import Window, why_rested

__all__ = [
    "LOOK_STEPS",
    "MOST_NODES",
    "SUMMED",
    "Advance",
    "Allowance",
    "Band",
    "Cost",
    "DraftCost",
    "Learned",
    "Rest",
    "Stepwise",
    "Survival",
    "Tree",
    "Window",
    "are_chains",
    "fastest",
    "most_per_second",
    "speakers",
    "steps_that_pay",
    "why_rested",
]
