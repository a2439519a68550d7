"""A first run: plain decoding, transformers' own speculation and ours beside each other, with the tokens in colour.

The pair of models in this folder was trained for it by `train_pair.py`; nothing is downloaded.
"""

from .run import run_demo, run_generate

__all__ = ["run_demo", "run_generate"]
