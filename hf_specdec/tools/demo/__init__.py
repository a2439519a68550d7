"""`demo`, which shows what drafters gain, and `generate`: single answers and chats in the terminal."""

from .generate import GenerateSettings, run_generate
from .run import DemoSettings, run_demo

__all__ = ["DemoSettings", "GenerateSettings", "run_demo", "run_generate"]
