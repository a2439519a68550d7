"""Where a draft model can run beside the target: in a thread, in a process, or on another rank.

In each place `serving.serve` drafts, and the wire to it is the same. A call talks to it through a `Conversation`.
"""

from .conversation import Conversation
from .process import Processes
from .rank import Seat, join
from .thread import Threads
from .wire import Fork, Order, Setup, Step
from .workers import Worker, Workers

__all__ = [
    "Conversation",
    "Fork",
    "Order",
    "Processes",
    "Seat",
    "Setup",
    "Step",
    "Threads",
    "Worker",
    "Workers",
    "join",
]
