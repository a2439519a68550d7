"""Serving: transformers' OpenAI-compatible server, over a model whose every answer is drafted."""

from .server import ServerOptions, ServeSettings, run_serve
from .speculating import Speculating

__all__ = ["ServeSettings", "ServerOptions", "Speculating", "run_serve"]
