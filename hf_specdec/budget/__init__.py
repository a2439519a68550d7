"""How much to draft: every drafted token has a chance to be kept, every width of a forward has its time, and the nodes
that give most tokens per second are verified."""

from .cost import Cost, DraftCost
from .decision import MOST_NODES, most_per_second, steps_that_pay
from .learned import Learned
from .survival import Survival, band, centre
from .tree import Tree, are_chains

__all__ = [
    "MOST_NODES",
    "Cost",
    "DraftCost",
    "Learned",
    "Survival",
    "Tree",
    "are_chains",
    "band",
    "centre",
    "most_per_second",
    "steps_that_pay",
]
