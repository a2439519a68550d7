"""`hf-specdec train disco`: extract, train, choose τ and SLmax, write a drafter's folder."""

import json
import random
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from transformers import PreTrainedModel
from typer import Option

from ...drafters.disco.classifier import StopClassifier
from ...drafters.disco.drafter import DiscoDrafter
from ...errors import SpeculationError, warn
from ...tools.loading.checks import check_seed
from ...tools.loading.models import Pair, PairSettings
from ...tools.loading.outputs import writable_folder
from ...tools.loading.prompts import Prompt, sample_prompts
from ...tools.loading.rows import PROMPT_SOURCES
from ..folder import interruptible
from ..own_text import texts_option
from .extraction import Regime, extract
from .fitting import fit, quality
from .records import Record
from .simulation import Costs
from .tuning import FINALISTS, Choice, RuleName, chances, measure_costs, measured_choice, simulated_choices

REGIMES = {"greedy": False, "sampled": True}


BUDGET: Literal["budget"] = "budget"
"""the rule without a τ"""

_rule: Any = partial(Option, rich_help_panel="The stop rule")
_classifier: Any = partial(Option, rich_help_panel="The classifier")


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
            help="Prompts to choose τ and SLmax on: as --data, but of a data set the split validation. Default: a "
            "quarter of --data."
        ),
    ] = field(default_factory=list)
    limit: Annotated[
        int | None,
        texts_option(
            help="Take only this many prompts of each --data, at random; of --validation half as many. Default: all."
        ),
    ] = None
    max_new_tokens: Annotated[int, texts_option(help="Tokens that the target writes per prompt, at most.")] = 128
    rules: Annotated[
        list[str],
        _rule(
            "--rule",
            help="When drafting stops: budget (by measured times), or by a threshold τ: token, draft, or both.",
        ),
    ] = field(default_factory=lambda: ["budget"])
    longest: Annotated[int, _rule(help="Largest SLmax (draft tokens per round) to try.")] = 32
    timed_prompts: Annotated[
        int, _rule(help="Prompts on which the best rules are timed; 0 chooses by a simulation instead.")
    ] = 12
    k: Annotated[int, _classifier(help="Number of the draft's largest probabilities that the classifier sees.")] = 10
    lookup: Annotated[bool, _classifier(help="Also show the classifier what copying earlier text would draft.")] = True
    hidden: Annotated[int, _classifier(help="Hidden units of the classifier.")] = 32
    epochs: Annotated[int, _classifier(help="Training epochs of the classifier.")] = 100
    seed: Annotated[int, _classifier(help="Seed of sampling, of the split and of the classifier.")] = 0

    @property
    def rule_names(self) -> list[RuleName]:
        """Rules with a τ, which is chosen; beside the budget that of "draft", for whoever takes that instead."""
        return [cast(RuleName, rule) for rule in self.rules if rule != BUDGET] or ["draft"]

    def check(self) -> None:
        """
        Raises:
            SpeculationError: an argument out of range.
        """
        least = {"max_new_tokens": 2, "longest": 1, "timed_prompts": 0, "k": 1, "hidden": 1, "epochs": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise SpeculationError(f"{name} must be {bound} or more, got {getattr(self, name)}")
        if self.limit is not None and self.limit < 1:
            raise SpeculationError(f"limit must be 1 or more, got {self.limit}")
        check_seed(self.seed)
        if not self.data:
            raise SpeculationError("data must name at least one file of prompts")
        if self.rules != [BUDGET] and (not self.rules or set(self.rules) - {"token", "draft"}):
            raise SpeculationError(f"rules must be {BUDGET}, or one or both of token and draft, got {self.rules}")


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
        The content of `training.json`: quality of the classifier, costs, and the choices that were compared.

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
        found, choice = report[name]["quality"], report[name]["choices"][0]
        threshold = f"τ {choice['tau']} of rule {choice['rule']}, SLmax {choice['longest']}"
        rule = f"rule {BUDGET} (of thresholds: {threshold})" if settings.rules == [BUDGET] else threshold
        yield (
            f"{name}: F1 {found['f1']:.3f} (always accepting: {found['f1_always']:.3f}), calibration error "
            f"{found['calibration_error']:.3f}, {rule}"
        )
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
    costs = measure_costs(run.pair.target, run.draft, classifier)
    report: dict[str, Any] = {
        "settings": asdict(settings),
        "draft_seconds": costs.draft,
        "target_seconds": costs.verify(1),
    }
    chosen = {}
    for name, do_sample in REGIMES.items():
        held_out = records[name][1]
        found = quality(classifier, held_out, do_sample)
        report[name] = {"quality": asdict(found)}
        if found.f1 < found.f1_always:
            warn(
                f"{name}: the classifier's F1, {found.f1:.3f}, is below the {found.f1_always:.3f} of always "
                "accepting: it stops drafts that the target would accept. Texts are not affected, only speed; "
                "give it more prompts or longer texts to learn from, or use a fixed window "
                "(speculation_type='draft_model')"
            )
        chosen[name] = _choose(run, classifier, held_out, costs, do_sample)
        report[name]["choices"] = [asdict(choice) for choice in chosen[name]]
    # The rule and SLmax are one for both regimes: those of greedy decoding; sampling gets the best τ for them.
    best, sampled = chosen["greedy"][0], chosen["sampled"]
    match = next(
        (choice for choice in sampled if (choice.rule, choice.longest) == (best.rule, best.longest)), sampled[0]
    )
    return _save(run, _drafter(run, classifier, best, match.tau), report)


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


def _extract(run: _Training, name: str) -> tuple[list[Record], list[Record]]:
    """Records of one regime, for training and for validation."""
    settings, pair = run.settings, run.pair
    regime = Regime(REGIMES[name], settings.max_new_tokens, settings.k, 0, settings.seed, settings.lookup)
    wide = replace(regime, rollout=settings.longest - 1, seed=settings.seed + 1)
    folder = Path(settings.output) / "extraction"

    def records(prompts: Sequence[Prompt], how: Regime, split: str) -> list[Record]:
        label = f"{name} {split} records"
        return extract(pair.target, run.draft, pair.tokenizer, prompts, how, folder / f"{name}-{split}", label)

    return records(run.training, regime, "training"), records(run.validation, wide, "validation")


def _choose(
    run: _Training, classifier: StopClassifier, records: Sequence[Record], costs: Costs, do_sample: bool
) -> list[Choice]:
    """Choices, fastest first: by simulation, and the front by the clock."""
    settings = run.settings
    ranked = simulated_choices(chances(classifier, records, do_sample), costs, settings.rule_names)
    if not settings.timed_prompts:
        return ranked
    finalists = [c for name in settings.rule_names for c in [c for c in ranked if c.rule == name][:FINALISTS]]
    regime = Regime(do_sample, settings.max_new_tokens, settings.k, 0, settings.seed)
    measured = measured_choice(
        run.pair.target,
        lambda choice: _drafter(run, classifier, choice, choice.tau),
        finalists,
        run.pair.tokenizer,
        run.validation[: settings.timed_prompts + 1],  # the first one warms up
        regime,
    )
    return [measured, *ranked]


def _drafter(run: _Training, classifier: StopClassifier, choice: Choice, tau_sampled: float) -> DiscoDrafter:
    return DiscoDrafter(
        run.draft,
        classifier,
        rule=choice.rule,
        tau=choice.tau,
        tau_sampled=tau_sampled,
        max_draft_tokens=choice.longest,
        lookup=run.settings.lookup,
    )


def _save(run: _Training, drafter: DiscoDrafter, report: dict[str, Any]) -> dict[str, Any]:
    settings, pair = run.settings, run.pair
    if settings.rules == [BUDGET]:
        drafter.config.rule = BUDGET
    names = ", ".join(Path(path).name for path in settings.data)
    f1 = " and ".join(f"{report[name]['quality']['f1']:.2f} ({name})" for name in REGIMES)
    error = " and ".join(f"{report[name]['quality']['calibration_error']:.3f}" for name in REGIMES)
    trained_on = (
        f"The target's own continuations of {len(run.training)} prompts ({names}), "
        f"up to {settings.max_new_tokens} tokens each, greedy and at temperature 1. "
        f"On held-out prompts its F1 is {f1}, its calibration error {error}. "
        f"For rules with a threshold `hf-specdec train disco` chose τ = {drafter.config.tau:.2f} (greedy), "
        f"{drafter.config.tau_sampled:.2f} (sampled) and at most {drafter.config.max_draft_tokens} draft tokens, for a "
        f"draft step that costs {report['draft_seconds'] / report['target_seconds']:.2f} of a target step."
    )
    for name in REGIMES:
        report[name]["choices"] = report[name]["choices"][:10]
    drafter.save_pretrained(settings.output, target=pair.target, tokenizer=pair.tokenizer, trained_on=trained_on)
    (Path(settings.output) / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    return report
