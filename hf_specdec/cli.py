"""The `hf-specdec` command: a thin list of commands, each importing what it runs."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .errors import SpeculationError


class _Commands(TyperGroup):
    """Ends with the message of an error of ours, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SpeculationError as error:
            typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    help="Lossless speculative decoding inside Hugging Face model.generate: several tokens per call of the target.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


Target = Annotated[str, typer.Option(help="Folder or Hub repo of the model to speed up.")]
Draft = Annotated[str | None, typer.Option(help="Folder or Hub repo of a draft model.")]
Dtype = Annotated[str, typer.Option(help="Of the weights: bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one.", callback=_device)]
Threads = Annotated[int | None, typer.Option(help="CPU threads; all where not given.")]
Prompt = Annotated[str, typer.Option(help="The text to continue.")]
OneDrafter = Annotated[
    str | None,
    typer.Option(help="Folder, repo or type:key=value,...; draft_model where there is a --draft, else prompt_lookup."),
]
NewTokens = Annotated[int, typer.Option(help="Tokens to generate, per prompt.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[int, typer.Option(help="Of sampling.")]
PadTarget = Annotated[int | None, typer.Option(help="Widen the target's MLPs to cost more, outputs the same.")]
PadDraft = Annotated[int | None, typer.Option(help="Widen the draft's MLPs likewise.")]


train = typer.Typer(help="Train a drafter for your model.", no_args_is_help=True)
app.add_typer(train, name="train")


@app.command()
def bench(
    target: Target,
    prompts: Annotated[list[Path], typer.Option(help="JSON lines of a known task, or text with a prompt per line.")],
    json: Annotated[Path, typer.Option(help="Result file to write.")],
    draft: Draft = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Folder, repo or type:key=value,... such as draft_model:num_draft_tokens=5."),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(help="plain (always there), hf-assisted, hf-confidence, hf-prompt-lookup; all where not given."),
    ] = None,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    threads: Threads = None,
    max_new_tokens: NewTokens = 128,
    limit: Annotated[int | None, typer.Option(help="Prompts to take of each file.")] = None,
    batch_size: Annotated[list[int], typer.Option(help="Prompts per generate call; may be given several times.")] = [1],  # noqa: B006
    temperature: Annotated[list[float], typer.Option(help="0 is greedy; may be given several times.")] = [0.0],  # noqa: B006
    repeats: Annotated[int, typer.Option(help="Times each prompt is decoded by each method; medians count.")] = 3,
    pad_target_mlp: PadTarget = None,
    pad_draft_mlp: PadDraft = None,
    pace_target: Annotated[
        float | None, typer.Option(help="Milliseconds that each forward of the target takes.")
    ] = None,
    pace_draft: Annotated[float | None, typer.Option(help="Milliseconds that each forward of the draft takes.")] = None,
    synthetic_acceptance: Annotated[
        float | None, typer.Option(help="Share of draft tokens to get right, whatever the draft has learned.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of sampling, of synthetic acceptance and of the bootstrap.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a result file that was not finished.")] = False,
) -> None:
    """Measure drafters against plain decoding and transformers' own speculation, prompt by prompt."""
    from .bench.plan import Settings
    from .bench.run import run_bench

    settings = Settings(
        target=target,
        prompts=[str(path) for path in prompts],
        draft=draft,
        drafters=drafter or [],
        baselines=baseline,
        dtype=dtype,
        device=device,
        threads=threads,
        max_new_tokens=max_new_tokens,
        limit=limit,
        batch_sizes=tuple(batch_size),
        temperatures=tuple(temperature),
        repeats=repeats,
        pad_target_mlp=pad_target_mlp,
        pad_draft_mlp=pad_draft_mlp,
        pace_target=pace_target,
        pace_draft=pace_draft,
        synthetic_acceptance=synthetic_acceptance,
        seed=seed,
    )
    raise typer.Exit(run_bench(settings, json, resume))


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="Result files of `hf-specdec bench`.")],
    output: Annotated[Path, typer.Option(help="Folder for report.md, report.html and the plots.")] = Path("report"),
) -> None:
    """Turn result files into a Markdown table, plots and one HTML page."""
    from .bench.report import write_report

    for path in write_report(results, output):
        typer.echo(path)


@app.command()
def explain(
    target: Target,
    prompt: Prompt,
    draft: Draft = None,
    drafter: OneDrafter = None,
    html: Annotated[Path | None, typer.Option(help="Page to write, beside the picture in the terminal.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="PNG to draw of when each model was busy; the terminal shows it, too.")
    ] = None,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    threads: Threads = None,
    pad_target_mlp: PadTarget = None,
    seed: Seed = 0,
) -> None:
    """Show round by round what was drafted, what was kept, and where the time went."""
    from .explain.explanation import ExplainSettings
    from .explain.run import run_explain
    from .loading.drafters import default_drafter

    settings = ExplainSettings(
        target=target,
        drafter=drafter or default_drafter(draft),
        prompt=prompt,
        draft=draft,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        dtype=dtype,
        device=device,
        threads=threads,
        pad_target_mlp=pad_target_mlp,
        seed=seed,
        timeline=str(timeline) if timeline else None,
    )
    run_explain(settings, html)


@app.command()
def demo(
    svg: Annotated[Path | None, typer.Option(help="Picture to save of what is printed.")] = None,
) -> None:
    """A first look with the pair of models in the package: plain decoding beside speculation."""
    from .demo import run_demo

    run_demo(svg=svg)


@app.command()
def generate(
    target: Target,
    prompt: Prompt,
    draft: Draft = None,
    drafter: OneDrafter = None,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Continue a text with speculation, and say what it gained."""
    from .demo import GenerateSettings, run_generate

    settings = GenerateSettings(
        target=target,
        drafter=drafter,
        prompt=prompt,
        draft=draft,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        dtype=dtype,
        device=device,
        threads=threads,
        seed=seed,
    )
    run_generate(settings)


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="A drafter's folder, such as hub_configs/prompt_lookup.")],
    repo_id: Annotated[str, typer.Option(help="Repo on the Hub; made if it is not there.")],
    private: Annotated[
        bool | None, typer.Option(help="Visibility of a new repo; the account's default if left out.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch; made if it is not there.")] = None,
    commit_message: Annotated[str | None, typer.Option(help="Of the commit with the files.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    results: Annotated[Path | None, typer.Option(help="Result file of `bench` for the model card.")] = None,
    license: Annotated[str | None, typer.Option(help="For the model card, such as apache-2.0.")] = None,
    draft_repo: Annotated[
        str | None, typer.Option(help="Repo of the draft model, where the folder names one beside it.")
    ] = None,
) -> None:
    """Upload a drafter's folder to the Hub."""
    from .hub import push_folder

    typer.echo(
        push_folder(
            folder,
            repo_id,
            private=private,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
            results=results,
            license=license,
            draft_repo=draft_repo,
        )
    )


@train.command("disco")
def train_disco(
    target: Target,
    draft: Annotated[str, typer.Option(help="Folder or Hub repo of the draft model.")],
    data: Annotated[list[Path], typer.Option(help="Prompts to train on; may be given several times.")],
    output: Annotated[Path, typer.Option(help="Folder of the drafter; an interrupted run goes on from there.")],
    validation: Annotated[
        list[Path] | None, typer.Option(help="Prompts to choose τ and SLmax on; a quarter of the data if not given.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts to take of each file, drawn at random.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens that the target writes per prompt.")] = 128,
    timed_prompts: Annotated[int, typer.Option(help="Prompts on which the clock decides among the best rules.")] = 12,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    threads: Threads = None,
    pad_target_mlp: PadTarget = None,
    pad_draft_mlp: PadDraft = None,
    seed: Annotated[int, typer.Option(help="Of sampling, of the split and of the classifier.")] = 0,
) -> None:
    """Train a classifier that decides when to stop drafting (DISCO)."""
    from .training.disco import TrainSettings
    from .training.disco import train_disco as run

    settings = TrainSettings(
        target=target,
        draft=draft,
        data=[str(path) for path in data],
        output=str(output),
        validation=[str(path) for path in validation or []],
        limit=limit,
        max_new_tokens=max_new_tokens,
        timed_prompts=timed_prompts,
        dtype=dtype,
        device=device,
        threads=threads,
        pad_target_mlp=pad_target_mlp,
        pad_draft_mlp=pad_draft_mlp,
        seed=seed,
    )
    report = run(settings)
    for name in ("greedy", "sampled"):
        quality, choice = report[name]["quality"], report[name]["choices"][0]
        typer.echo(
            f"{name}: F1 {quality['f1']:.3f} (always accepting: {quality['f1_always']:.3f}), calibration error "
            f"{quality['calibration_error']:.3f}, rule {choice['rule']}, τ {choice['tau']}, SLmax {choice['longest']}"
        )
    typer.echo(f"saved to {output}")


@train.command("ngram")
def train_ngram(
    tokenizer: Annotated[str, typer.Option(help="Folder or Hub repo with the target's tokenizer.")],
    data: Annotated[
        list[Path], typer.Option(help="Text, a document per line, or JSON lines; may be given several times.")
    ],
    output: Annotated[Path, typer.Option(help="Folder to write the drafter to.")],
    order: Annotated[int, typer.Option(help="2 is a bigram model.")] = 3,
    min_count: Annotated[int, typer.Option(help="Leave out n-grams that occur less often.")] = 1,
) -> None:
    """Count an n-gram drafter from text."""
    from .training.ngram import train_ngram_drafter

    train_ngram_drafter(tokenizer, data, order, min_count).save_pretrained(str(output))
    typer.echo(output)
