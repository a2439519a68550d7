"""What transformers' server says of drafts: in each answer's `usage`, and at `/metrics`.

It has no place for either. The names that it makes both with are exchanged while it runs.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from typing import Any

from transformers.cli.serving import chat_completion, completion, server, utils
from transformers.cli.serving.server import build_server as stock

from ..stats import SpeculationStats
from .counts import Counts

DRAFTS: ContextVar[list[SpeculationStats]] = ContextVar("DRAFTS")
"""what drafts did for the request that is being answered, once that is known"""
FORMAT = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format"""


@contextmanager
def exchanged(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the block a name of transformers' server stands for something else."""
    stock = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, stock)


@contextmanager
def reporting(counts: Counts, model_name: str) -> Iterator[None]:
    """Within the block transformers' server tells of drafts."""
    from fastapi import Response

    def build_server(*args: Any, **kwargs: Any) -> Any:
        app = stock(*args, **kwargs)
        app.add_api_route("/metrics", lambda: Response(counts.exposition(model_name), media_type=FORMAT))
        return app

    with ExitStack() as blocks:
        blocks.enter_context(exchanged(server, "build_server", build_server))
        blocks.enter_context(exchanged(utils, "GenerateManager", Apart))
        for handler in (chat_completion, completion):
            blocks.enter_context(exchanged(handler, "CompletionUsage", usage))
        yield


def usage(**counts: Any) -> Any:
    """OpenAI's, with its names for tokens that were foretold. Of completion tokens the rejected ones are none."""
    from openai.types.completion_usage import CompletionTokensDetails, CompletionUsage

    made = CompletionUsage(**counts)
    for stats in DRAFTS.get([]):
        accepted, rejected = stats.accepted_tokens, stats.drafted_tokens - stats.accepted_tokens
        made.completion_tokens_details = CompletionTokensDetails(
            accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected
        )
    return made


class Apart(utils.GenerateManager):
    """transformers' thread for `generate` calls, where each finds `DRAFTS` of its request."""

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_run_within(), fn, *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        return super().async_submit(_run_within(), fn, *args, **kwargs)


def _run_within() -> Callable[..., Any]:
    """Calls what it is given as part of this request."""
    DRAFTS.set([])
    return copy_context().run
