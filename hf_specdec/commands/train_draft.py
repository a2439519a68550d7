"""`hf-specdec train draft`."""

import shlex

from typer import echo

from ..training import draft


def train_draft(settings: draft.DraftSettings) -> None:
    """Train a draft model, say how good it is, and what to do with it."""
    found = draft.train_draft(settings)
    echo(
        f"The draft has {found['parameters'] / 1e6:.1f} M parameters. The tokens that it knows are "
        f"{found['covered']:.1%} of those the target writes."
    )
    echo(
        f"In texts that it did not learn from, {found['greedy_match']:.1%} of its first choices are the target's, and "
        f"at temperature 1 {found['acceptance']:.1%} of its tokens are accepted."
    )
    echo(f"It lies in {settings.output}. To measure what it gains on your prompts:")
    own = [] if settings.gguf_file is None else ["--gguf-file", settings.gguf_file]
    models = shlex.join(["--target", settings.target, *own, "--draft", settings.output])
    echo(f"hf-specdec bench {models} --prompts prompts.jsonl --json results.json")
