"""`hf-specdec serve`: transformers' own server, handed a model that speculates."""

import errno
import inspect
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager
from transformers.utils import logging
from transformers.utils.import_utils import is_serve_available
from typer import Argument, Option

from ..errors import SpeculationError
from ..generate.decoder import BatchDecoder
from ..tools.loading.drafters import DrafterSettings
from ..tools.loading.models import Pair
from .continuous import in_place_of_stock
from .reporting import exchanged, reporting
from .speculating import BAD, Speculating
from .threads import apart

NOT_OURS = ("force_model", "model_timeout", "compile", "non_blocking")
"""options of transformers' server that say how it loads models, or ask for what serves no drafter; and its tests'"""

_batching: Any = partial(Option, rich_help_panel="With --continuous-batching")


@dataclass(kw_only=True)
class ServeSettings(DrafterSettings):
    """What is served."""

    target: Annotated[
        str,
        Argument(help="Model to serve: a folder, a Hub repo, a GGUF file, or smollm2.", metavar="MODEL"),
    ]
    continuous_batching: Annotated[
        bool, Option(help="Decode requests together, in a batch that each joins when it comes, instead of in turn.")
    ] = False
    max_rows: Annotated[int, _batching(help="Requests decoded at the same time.", min=1)] = 16
    max_tokens: Annotated[int, _batching(help="Size of the cache, in tokens of all requests together.", min=1)] = 32_768
    max_waiting: Annotated[
        int, _batching(help="Requests that may wait; one more is refused with the status 429.", min=1)
    ] = 1024
    forwards: Annotated[str, _batching(help="How forwards run: auto, eager, captured or bitwise.")] = "auto"


def _options_of(server: type) -> type:
    """Options of transformers' server, as this release of it has them."""
    known = {one.name for one in fields(ServeSettings)}.union(NOT_OURS)
    own = [p for p in inspect.signature(server).parameters.values() if p.name not in known and p.name[:3] != "cb_"]
    return make_dataclass(
        "ServerOptions", [(p.name, _of_server(p.annotation), field(default=p.default)) for p in own], kw_only=True
    )


def _of_server(annotation: Any) -> Any:
    """The option under a heading of its own."""
    if get_origin(annotation) is not Annotated:
        return annotation
    kind, option = get_args(annotation)[0], copy(annotation.__metadata__[0])
    option.rich_help_panel = "The server (transformers' own options)"
    return Annotated[kind, option]


ServerOptions = _options_of(Serve)


def run_serve(settings: ServeSettings, options: Any) -> None:
    """Load, warm up, and serve until the process is told to end.

    Args:
        options: `ServerOptions`.

    Raises:
        SpeculationError: the server's packages are missing, the port is taken, or a model or drafter cannot be loaded.
    """
    if not is_serve_available():
        raise SpeculationError('serving needs more packages; pip install "hf-specdec[serve]"')
    check_options(options)
    check_address(options.host, options.port)
    pair, speculating = apart(lambda: ready(settings))
    serving = joining(settings, speculating) if settings.continuous_batching else speculating.in_place()
    told = reporting(speculating.counts, settings.target)
    with serving as summary, told, handing_out(pair, settings.target), ending_by_signal():
        if speculating.plain_because:
            say(f"{settings.target} is served without drafts: {speculating.plain_because}")
        else:
            say(f"{settings.target} is served with {speculating.drafter}")
            if speculating.drafter.because:
                say(speculating.drafter.because)
        if not getattr(pair.tokenizer, "chat_template", None):
            say(f"{settings.target} has no chat template: use /v1/completions, not /v1/chat/completions")
        try:
            Serve(settings.target, continuous_batching=settings.continuous_batching, **asdict(options))
        except KeyboardInterrupt:
            pass
        finally:
            say(summary())


def ready(settings: ServeSettings) -> tuple[Pair, Speculating]:
    """Load, and do what only first answers do.

    Raises:
        SpeculationError: a model or drafter cannot be loaded.
    """
    pair = settings.load()
    speculating = Speculating(pair.target, settings.load_drafter(pair), say)
    say("warming up")
    speculating.warm_up(pair.tokenizer)
    return pair, speculating


@contextmanager
def joining(settings: ServeSettings, speculating: Speculating) -> Iterator[Callable[[], str]]:
    """Within the block requests join one batch."""
    drafter = None if speculating.plain_because else speculating.drafter
    bounds = {"max_rows": settings.max_rows, "max_tokens": settings.max_tokens, "max_waiting": settings.max_waiting}
    decoder = BatchDecoder(speculating.model, drafter, **bounds, forwards=settings.forwards)
    with decoder, in_place_of_stock(decoder, say, speculating.counts) as summary:
        yield summary


def say(text: str) -> None:
    """A line on stderr, with the time. That nobody reads it any more is no reason to end."""
    with suppress(OSError):
        print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def check_options(options: Any) -> None:
    """What the server would stumble over, after the model was loaded.

    Raises:
        SpeculationError: a bad option.
    """
    if options.log_level.lower() not in logging.log_levels:
        raise SpeculationError(f"log_level must be one of {', '.join(logging.log_levels)}, got {options.log_level!r}")
    if (given := options.chat_template_kwargs) is not None:
        with suppress(ValueError):
            given = json.loads(given)
        if not isinstance(given, dict):
            raise SpeculationError(f"chat_template_kwargs must be a JSON object, got {given!r}")
    decisions = getattr(options, "decision_config", None)  # of newer releases
    if decisions is not None and not Path(decisions).is_file():
        raise SpeculationError(f"decision_config must be a JSON file, got {decisions!r}, which does not exist")


def check_address(host: str, port: int) -> None:
    """
    Raises:
        SpeculationError: nothing can be served there.
    """
    if not 0 <= port <= 65535:
        raise SpeculationError(f"port must be from 0 to 65535, got {port}")
    try:
        for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                socket.create_server(address[:2], family=family).close()
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # this machine has no such network
                    raise
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise SpeculationError(
            f"cannot serve on host={host!r}, port={port}: {why}; choose another --host or --port, or stop what uses it"
        ) from error


@contextmanager
def handing_out(pair: Pair, name: str) -> Iterator[None]:
    """Within the block transformers' server loads nothing: it finds this model, by this name."""
    stock = model_manager.ModelManager

    class Loaded(stock):  # type: ignore[misc, valid-type]
        """transformers' manager of models, with one that is there already."""

        def load_model_and_processor(self, *args: Any, **kwargs: Any) -> Any:
            return pair.target, _answering(pair.tokenizer)

        @staticmethod
        def get_gen_models(cache_dir: str | None = None) -> list[dict[str, Any]]:
            return [{"id": name, "object": "model", "created": 0, "owned_by": "hf_specdec"}]

    with exchanged(model_manager, "ModelManager", Loaded):
        yield


def _answering(tokenizer: Any) -> Any:
    """The tokenizer as a request is given it: what its chat template cannot put into words is refused, which is no
    failure of the server."""
    from fastapi import HTTPException
    from jinja2 import TemplateError

    def apply_chat_template(*args: Any, **options: Any) -> Any:
        if not tokenizer.chat_template:
            raise HTTPException(BAD, "this model has no chat template; use /v1/completions")
        try:
            return tokenizer.apply_chat_template(*args, **options)
        except (ValueError, TypeError, KeyError, TemplateError) as error:
            raise HTTPException(BAD, f"the chat template does not accept this conversation: {error}") from error

    twin = copy(tokenizer)
    twin.apply_chat_template = apply_chat_template
    return twin


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """A signal to end, which the server passes on once its answers are finished, ends the block like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
