"""A first run: plain decoding, transformers' own speculation and ours beside each other, with the tokens in colour.

The pair of models in this folder was trained for it by `docs/laboratory/train_pair.py`; nothing is downloaded.
"""

from .generate import GenerateSettings, run_generate
from .run import run_demo

__all__ = ["GenerateSettings", "run_demo", "run_generate"]
