"""The `hf-specdec` command as it starts: what it can do is said before the package is imported, which takes seconds.

This module stands outside of the package for that reason alone; what a command does is told in `hf_specdec.commands`.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

COMMANDS = {
    "bench": "Measure how fast drafters are, beside plain decoding and transformers' own speculation.",
    "report": "Turn result files of bench into Markdown tables, plots and one HTML page.",
    "audit": "Check that drafters change nothing: texts, samples and stops are compared with plain decoding's.",
    "explain": "Show round by round what was drafted, what was accepted, and where the time went.",
    "demo": "See a real model answer plainly, with transformers' own speculation and with hf_specdec, and how fast.",
    "generate": "Answer a question, a chat or a file of prompts, and print what speculation gained.",
    "serve": "Serve a model with speculation over HTTP: transformers' server, compatible with OpenAI's API.",
    "export": "Write a drafter as vLLM or SGLang load it, and print the command that starts them.",
    "push": "Upload a drafter's folder to the Hub.",
    "train disco": "Train a classifier that decides when to stop drafting (DISCO).",
    "train draft": "Cut a draft model out of the target, and train it on text that the target writes.",
    "train streaming": "Train streams in the target's upper layers, with which it drafts for itself.",
    "train head": "Train a head (EAGLE-3, DFlash, DSpark), which drafts over the target's states.",
    "train ngram": "Make an n-gram drafter by counting in text.",
}
"""`train disco` is the function `train_disco` of a module of the same name, and so on."""

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
train = typer.Typer(help="Train a drafter for your model.", no_args_is_help=True)
app.add_typer(train, name="train")


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("hf-specdec"))
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Lossless speculative decoding inside Hugging Face model.generate: several tokens per call of the target."""


def _later(words: str) -> type[TyperCommand]:
    """A command of which name and help are known, and the rest once it is called."""

    class Later(TyperCommand):
        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            name = words.replace(" ", "_")
            run = getattr(import_module(f"hf_specdec.commands.{name}"), name)
            command = import_module("hf_specdec.commands.options").command(run, self.name, self.help)
            return command.make_context(info_name, args, parent, **extra)

    return Later


for words, text in COMMANDS.items():
    *group, name = words.split()
    (train if group else app).command(name, cls=_later(words), help=text)(lambda: None)
