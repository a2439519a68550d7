"""The pace of a model that another process takes over. A worker finds it by this file's name, as the path has it."""

from typing import Any

from torch import nn

from hf_specdec.clock import Deadline


class Pace:
    """The pace of a model that is sent to another process, as a pair of forward hooks."""

    def __init__(self, model: nn.Module, milliseconds: float) -> None:
        self.seconds, self.pace = milliseconds / 1000, Deadline(0.0)
        self.hooks = [model.register_forward_pre_hook(self.before), model.register_forward_hook(self.after)]

    def before(self, *_: Any) -> None:
        self.pace = Deadline(self.seconds)

    def after(self, *_: Any) -> None:
        self.pace.sleep()

    def __getstate__(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "pace": Deadline(0.0)}
