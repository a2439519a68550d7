"""`hf-specdec train disco`: extract, train, choose τ where the rule has one, write a drafter's folder."""

import json
import random
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from transformers import PreTrainedModel
from typer import Option

from ...drafters.disco.classifier import StopClassifier
from ...drafters.disco.config import DiscoConfig
from ...drafters.disco.drafter import DiscoDrafter
from ...errors import SpeculationError, warn
from ...options import help_of, range_of
from ...tools.loading.checks import SEEDS, Range
from ...tools.loading.models import Pair, PairSettings
from ...tools.loading.outputs import writable_folder
from ...tools.loading.prompts import Prompt, sample_prompts
from ...tools.loading.rows import PROMPT_SOURCES
from ..folder import interruptible
from ..own_text import texts_option
from .extraction import Regime, extract
from .fitting import Quality, fit, quality
from .records import Record
from .tuning import TAUS, seconds_per_token

REGIMES = {"greedy": False, "sampled": True}

_rule: Any = partial(Option, rich_help_panel="The stop rule")
_classifier: Any = partial(Option, rich_help_panel="The classifier")
_of = partial(help_of, DiscoConfig)


def _in(name: str) -> Range:
    return Range(*range_of(DiscoConfig, name))


@dataclass(kw_only=True)
class TrainSettings(PairSettings):
    """Arguments of the command."""

    draft: Annotated[str, Option(help="Draft model: a folder, a Hub repo or a GGUF file.")] = field()  # must be named
    data: Annotated[
        list[str],
        Option(
            help=f"Prompts to train on: {PROMPT_SOURCES}; may be given several times. Of a conversation the first turn "
            "is taken, of a data set by default the split train."
        ),
    ]
    output: Annotated[
        str, Option(help="Folder to write the drafter to; the same command continues an interrupted training there.")
    ]
    validation: Annotated[
        list[str],
        Option(
            help="Prompts to validate on, and to choose τ on: as --data, but of a data set the split validation. "
            "Default: a quarter of --data."
        ),
    ] = field(default_factory=list)
    limit: Annotated[
        int | None,
        texts_option(
            help="Take only this many prompts of each --data, at random; of --validation half as many. Default: all."
        ),
        Range(1),
    ] = None
    max_new_tokens: Annotated[
        int, texts_option(help="Tokens that the target writes per prompt, at most."), Range(2)
    ] = 128
    rule: Annotated[Literal["budget", "token"], _rule(help=_of("rule"))] = DiscoConfig.rule
    max_draft_tokens: Annotated[int, _rule(help=_of("max_draft_tokens")), _in("max_draft_tokens")] = (
        DiscoConfig.max_draft_tokens
    )
    timed_prompts: Annotated[int, _rule(help="Validation prompts on which thresholds τ are timed."), Range(1)] = 12
    k: Annotated[int, _classifier(help=_of("k")), _in("k")] = DiscoConfig.k
    lookup: Annotated[bool, _classifier(help=_of("lookup"))] = DiscoConfig.lookup
    hidden: Annotated[int, _classifier(help=_of("hidden")), _in("hidden")] = DiscoConfig.hidden
    epochs: Annotated[int, _classifier(help="Training epochs of the classifier."), Range(1)] = 100
    seed: Annotated[int, _classifier(help="Seed of sampling, of the split and of the classifier."), SEEDS] = 0

    def check(self) -> None:
        """
        Raises:
            SpeculationError: an argument out of range.
        """
        super().check()
        if not self.data:
            raise SpeculationError("data must name at least one file of prompts")


@dataclass
class _Training:
    """What the steps of one run work on."""

    settings: TrainSettings
    pair: Pair
    training: list[Prompt]
    validation: list[Prompt]

    @property
    def draft(self) -> PreTrainedModel:
        assert self.pair.draft is not None  # the settings name one
        return self.pair.draft


def train_disco(settings: TrainSettings) -> dict[str, Any]:
    """Train a DISCO drafter and save it to `settings.output`; what was seen stays in its subfolder `extraction`.

    Run again after an interruption, it goes on where it stopped.

    Returns:
        The content of `training.json`: the settings, and of each regime the classifier's quality and, by rule "token",
        the seconds per token with each τ.

    Raises:
        SpeculationError: bad arguments, data or models.
    """
    settings.check()
    writable_folder(settings.output)
    prompts = _prompts(settings)
    with interruptible("run the same command again to continue"):
        return _train(_Training(settings, settings.load(), *prompts))


def closing(settings: TrainSettings, report: dict[str, Any]) -> Iterator[str]:
    """What the command says at its end."""
    for name in REGIMES:
        found = report[name]["quality"]
        chosen = f", τ {report[name]['tau']:g}" if "tau" in report[name] else ""
        window = max(found["f1_windows"], key=found["f1_windows"].__getitem__)
        mean, deviation = found["oracle"]
        yield (
            f"{name}: F1 {found['f1']:.3f} (always accepting: {found['f1_always']:.3f}, best fixed window, "
            f"γ = {window}: {found['f1_windows'][window]:.3f}), calibration error "
            f"{found['calibration_error']:.3f}{chosen}"
        )
        yield f"{name}: an oracle would draft {mean:.1f} ± {deviation:.1f} tokens a round"
    yield f"saved to {settings.output}; try it:"
    command = ["hf-specdec", "generate", "--target", settings.target, "--drafter", settings.output, "--prompt", "..."]
    yield shlex.join(command)


def _train(run: _Training) -> dict[str, Any]:
    settings = run.settings
    records = {name: _extract(run, name) for name in REGIMES}
    classifier = fit(
        {REGIMES[name]: seen for name, (seen, _) in records.items()},
        {REGIMES[name]: held_out for name, (_, held_out) in records.items()},
        settings.hidden,
        settings.epochs,
        settings.seed,
    )
    report: dict[str, Any] = {"settings": asdict(settings)}
    for name, do_sample in REGIMES.items():
        found = quality(classifier, records[name][1], do_sample)
        _warn_of(name, found)
        report[name] = {"quality": asdict(found)}
        if settings.rule == "token":
            seconds = _seconds_by_tau(run, classifier, do_sample)
            report[name] |= {"tau": min(seconds, key=seconds.__getitem__), "seconds_per_token": seconds}
    _save(run, classifier, report)
    return report


def _prompts(settings: TrainSettings) -> tuple[list[Prompt], list[Prompt]]:
    """For training and for validation; never the same prompt in both."""
    training = [prompt for path in settings.data for prompt in sample_prompts(path, settings.limit, settings.seed)]
    if settings.validation:
        limit = None if settings.limit is None else max(1, settings.limit // 2)
        validation = [
            prompt
            for path in settings.validation
            for prompt in sample_prompts(path, limit, settings.seed, split="validation")
        ]
    else:
        random.Random(settings.seed).shuffle(training)
        held = max(1, len(training) // 4)
        training, validation = training[held:], training[:held]
    training = [prompt for prompt in dict.fromkeys(training) if prompt not in set(validation)]
    if not training:
        raise SpeculationError("data has no prompt left for training beside those for validation; give more prompts")
    return training, validation


def _regime(settings: TrainSettings, do_sample: bool, number: int = 0) -> Regime:
    """How the target writes; each split has a seed of its own."""
    return Regime(do_sample, settings.max_new_tokens, settings.k, settings.seed + number, settings.lookup)


def _extract(run: _Training, name: str) -> tuple[list[Record], list[Record]]:
    """Records of one regime, for training and for validation."""
    pair, folder = run.pair, Path(run.settings.output) / "extraction"

    def records(prompts: Sequence[Prompt], split: str, number: int) -> list[Record]:
        regime = _regime(run.settings, REGIMES[name], number)
        where, label = folder / f"{name}-{split}", f"{name} {split} records"
        return extract(pair.target, run.draft, pair.tokenizer, prompts, regime, where, label)

    return records(run.training, "training", 0), records(run.validation, "validation", 1)


def _warn_of(name: str, found: Quality) -> None:
    """Say so where the classifier is worse than none."""
    if found.f1 < found.f1_always:
        warn(
            f"{name}: the classifier's F1, {found.f1:.3f}, is below the {found.f1_always:.3f} of always "
            "accepting: it stops drafts that the target would accept. Texts are not affected, only speed; "
            "give it more prompts or longer texts to learn from, or use a fixed window "
            "(speculation_type='draft_model')"
        )


def _seconds_by_tau(run: _Training, classifier: StopClassifier, do_sample: bool) -> dict[float, float]:
    """Seconds per token on validation prompts."""
    drafters = {tau: _drafter(run, classifier, tau, tau) for tau in TAUS}
    prompts = run.validation[: run.settings.timed_prompts]
    regime = _regime(run.settings, do_sample)
    return seconds_per_token(run.pair.target, drafters, run.pair.tokenizer, prompts, regime)


def _drafter(run: _Training, classifier: StopClassifier, tau: float, tau_sampled: float) -> DiscoDrafter:
    return DiscoDrafter(
        run.draft,
        classifier,
        rule=run.settings.rule,
        tau=tau,
        tau_sampled=tau_sampled,
        max_draft_tokens=run.settings.max_draft_tokens,
        lookup=run.settings.lookup,
    )


def _save(run: _Training, classifier: StopClassifier, report: dict[str, Any]) -> None:
    settings, pair = run.settings, run.pair
    drafter = _drafter(run, classifier, *(report[name].get("tau", DiscoConfig.tau) for name in REGIMES))
    names = ", ".join(Path(path).name for path in settings.data)
    f1 = " and ".join(f"{report[name]['quality']['f1']:.2f} ({name})" for name in REGIMES)
    error = " and ".join(f"{report[name]['quality']['calibration_error']:.3f}" for name in REGIMES)
    trained_on = (
        f"The target's own continuations of {len(run.training)} prompts ({names}), "
        f"up to {settings.max_new_tokens} tokens each, greedy and at temperature 1. "
        f"On held-out prompts its F1 is {f1}, its calibration error {error}."
    )
    if settings.rule == "token":
        trained_on += (
            f" On the machine of the training the fastest thresholds were τ = {drafter.config.tau:g} (greedy) and "
            f"{drafter.config.tau_sampled:g} (sampled)."
        )
    drafter.save_pretrained(settings.output, target=pair.target, tokenizer=pair.tokenizer, trained_on=trained_on)
    (Path(settings.output) / "training.json").write_text(json.dumps(report, indent=2) + "\n")
