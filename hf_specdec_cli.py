"""The `hf-specdec` command as it starts: what it can do is said before the package is imported, which takes seconds.

This module stands outside of the package for that reason alone; what a command does is told in `hf_specdec.commands`.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

COMMANDS = {
    "bench": "Measure drafters against plain decoding and transformers' own speculation, prompt by prompt.",
    "report": "Turn result files into a Markdown table, plots and one HTML page.",
    "audit": "Is it lossless? Texts, distribution and stops of any way to draft, beside plain decoding's.",
    "explain": "Show round by round what was drafted, what was kept, and where the time went.",
    "demo": "A first look: a real model answers, plainly, with transformers' speculation and with ours.",
    "generate": "Answer a question, continue a text or talk, and say what speculation gained.",
    "serve": "Serve a model over HTTP as OpenAI does, every answer drafted: transformers' server, and its options.",
    "translate": "Say a drafter's settings in the words of vLLM or SGLang.",
    "push": "Upload a drafter's folder to the Hub.",
    "train disco": "Train a classifier that decides when to stop drafting (DISCO).",
    "train draft": "Cut a draft model out of the target, and train it on text that the target writes.",
    "train streaming": "Train streams in the target's upper layers, by which it drafts for itself.",
    "train ngram": "Count an n-gram drafter from text.",
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
        bool, typer.Option("--version", help="Say the version and end.", callback=_say_version, is_eager=True)
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
