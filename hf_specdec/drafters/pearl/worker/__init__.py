"""Where a draft model can run beside the target: in a thread or in a process.

In each place `serving.serve` drafts, and the wire to it is the same. A call talks to it through a `Conversation`.
"""

from .conversation import Conversation
from .process import Processes
from .thread import Threads
from .wire import Fork, Order, Setup, Step
from .workers import Worker, Workers

__all__ = [
    "Conversation",
    "Fork",
    "Order",
    "Processes",
    "Setup",
    "Step",
    "Threads",
    "Worker",
    "Workers",
]
