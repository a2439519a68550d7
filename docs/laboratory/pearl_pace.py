"""The pace of a model that another process takes over. A worker finds it by this file's name, as the path has it."""

import time
from typing import Any

from torch import nn

from hf_specdec.instruments.pacing import sleep_until


class Pace:
    """The pace of a model that is sent to another process, as a pair of forward hooks."""

    def __init__(self, model: nn.Module, milliseconds: float) -> None:
        self.seconds, self.began = milliseconds / 1000, 0.0
        self.hooks = [model.register_forward_pre_hook(self.before), model.register_forward_hook(self.after)]

    def before(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def after(self, *_: Any) -> None:
        sleep_until(self.began + self.seconds)

    def __getstate__(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "began": 0.0}
