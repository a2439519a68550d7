"""How much to draft: every drafted token has a chance to be kept, every width of a forward has its time, and the nodes
that give most tokens per second are verified."""

from .acceptance import Acceptance
from .account import SAVED, Account
from .controller import DRAFTED, GUESS, LOOK, Controller, Drafted, Experience
from .cost import Cost, CostView, DraftCost, Times, padded_to
from .decision import FORESIGHT, LONGEST, MOST_NODES, SUMMED, Advance, most_per_second, nodes_that_pay, steps_that_pay
from .evidence import Evidence, Proposer
from .learned import Learned
from .overlap import Overlap
from .prices import Prices
from .tree import Candidate, Tree, are_chains

__all__ = [
    "DRAFTED",
    "FORESIGHT",
    "GUESS",
    "LONGEST",
    "LOOK",
    "MOST_NODES",
    "SAVED",
    "SUMMED",
    "Acceptance",
    "Account",
    "Advance",
    "Candidate",
    "Controller",
    "Cost",
    "CostView",
    "DraftCost",
    "Drafted",
    "Evidence",
    "Experience",
    "Learned",
    "Overlap",
    "Prices",
    "Proposer",
    "Times",
    "Tree",
    "are_chains",
    "most_per_second",
    "nodes_that_pay",
    "padded_to",
    "steps_that_pay",
]
