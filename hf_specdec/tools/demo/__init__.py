"""What people see first: a demo of all that a drafter gains, single answers, and a talk with a model."""

from .generate import GenerateSettings, run_generate
from .run import DemoSettings, run_demo

__all__ = ["DemoSettings", "GenerateSettings", "run_demo", "run_generate"]
