"""A table's settings as options of its command line."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

Settings = TypeVar("Settings")


def command(settings: type[Settings], run: Callable[[Settings], None]) -> Callable[..., None]:
    """`run` as typer reads it: an option for each field of the dataclass, which says what it means."""

    def main(*args: Any, **options: Any) -> None:
        run(settings(*args, **options))

    lists = {f.name: f.default_factory() for f in fields(settings) if f.default_factory is not MISSING}  # type: ignore[arg-type]
    parameters = inspect.signature(settings).parameters.values()
    parameters_shown = [p.replace(default=lists.get(p.name, p.default)) for p in parameters]
    vars(main)["__signature__"] = inspect.Signature(parameters_shown)
    main.__annotations__ = {p.name: p.annotation for p in parameters_shown}
    main.__doc__ = run.__doc__
    return main
