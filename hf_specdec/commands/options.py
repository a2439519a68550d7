"""Functions as commands: parameters are options, and so are the fields of a parameter that is a settings dataclass."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import typer
from typer.core import TyperCommand

from ..errors import SpeculationError
from ..tools.loading.models import LOADING


class _Command(TyperCommand):
    """Ends with the message of an error of ours, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SpeculationError as error:
            typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from None


def command(run: Callable[..., None], name: str | None, help: str | None) -> Any:
    """The command that calls `run` with what was typed."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name, cls=_Command, help=help, epilog=_example(run))(expanded(run))
    return typer.main.get_command(app)


def _example(run: Callable[..., None]) -> str | None:
    """The last part of the docstring, which `--help` ends with."""
    _, found, text = (inspect.getdoc(run) or "").partition("Example:")
    return found + text if found else None


def expanded(run: Callable[..., None]) -> Callable[..., None]:
    """`run` as typer reads it: an option for each field of a parameter that is a dataclass; those that must be given
    come first, how models are loaded comes last."""
    parameters = inspect.signature(run).parameters.values()
    settings: dict[str, Any] = {p.name: p.annotation for p in parameters if is_dataclass(p.annotation)}
    shown = [option for p in parameters for option in (_options(p.annotation) if p.name in settings else [p])]
    signature = inspect.Signature(sorted(shown, key=lambda p: (p.default is not p.empty, _is_aside(p))))

    def main(*args: Any, **options: Any) -> None:
        given = signature.bind(*args, **options).arguments
        for name, kind in settings.items():
            given[name] = kind(**{f.name: given.pop(f.name) for f in fields(kind) if f.name in given})
        run(**given)

    vars(main)["__signature__"] = signature
    main.__annotations__ = {p.name: p.annotation for p in shown}
    main.__doc__ = run.__doc__
    return main


def _is_aside(parameter: inspect.Parameter) -> bool:
    panels = (getattr(option, "rich_help_panel", None) for option in getattr(parameter.annotation, "__metadata__", ()))
    return LOADING in panels


def _options(settings: Any) -> Iterator[inspect.Parameter]:
    lists = {f.name: f.default_factory() for f in fields(settings) if f.default_factory is not MISSING}
    for p in inspect.signature(settings).parameters.values():
        yield p.replace(kind=p.POSITIONAL_OR_KEYWORD, default=lists.get(p.name, p.default))
