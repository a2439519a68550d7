"""`hf-specdec train disco`: extract, train, choose τ where the rule has one, write a drafter's folder."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from tqdm import tqdm
from typer import Option

from ...drafters.disco.classifier import StopClassifier
from ...drafters.disco.config import DiscoConfig
from ...drafters.disco.drafter import DiscoDrafter
from ...errors import SpeculationError, warn
from ...options import help_of, range_of
from ...stats import SpeculationStats
from ...target.devices import input_device
from ...tools.bench.decoding import decode
from ...tools.bench.method import Method
from ...tools.loading.chat import batch, prompt_ids
from ...tools.loading.checks import SEEDS, Range
from ...tools.loading.models import Pair, PairSettings
from ...tools.loading.outputs import writable_folder
from ...tools.loading.prompts import Prompt, sample_prompts
from ...tools.loading.rows import PROMPT_SOURCES
from ...tools.loading.sampling import sampling_at
from ..folder import interruptible
from ..own_text import texts_option, try_it
from .fitting import Quality, fit, quality
from .records import answers, records_of

REGIMES = {"greedy": False, "sampled": True}
TAUS = (0.1, 0.3, 0.5, 0.7, 0.9)

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


def train_disco(settings: TrainSettings) -> dict[str, Any]:
    """Train a DISCO drafter and save it to `settings.output`; the target's texts stay in its subfolder `training`.

    Run again after an interruption, it goes on where it stopped.

    Returns:
        The content of `training.json`: the settings, and of each regime the classifier's quality and, by rule "token",
        the seconds per token with each τ.

    Raises:
        SpeculationError: bad arguments, data or models.
    """
    settings.check()
    output = writable_folder(settings.output)
    parts = dict(zip(("training", "validation"), _prompts(settings), strict=True))
    with interruptible("run the same command again to continue"):
        pair = settings.load()

        def seen(name: str, part: str) -> Any:
            """Records of one regime; each part has a seed of its own."""
            folder, seed = output / "training" / f"{name}-{part}", settings.seed + (part == "validation")
            texts = answers(pair, parts[part], folder, REGIMES[name], settings.max_new_tokens, seed)
            return records_of(pair, texts, settings.k, settings.lookup, seed)

        learned, held_out = ({REGIMES[name]: seen(name, part) for name in REGIMES} for part in parts)
        classifier = fit(learned, held_out, settings.hidden, settings.epochs, settings.seed)
        report: dict[str, Any] = {"settings": asdict(settings)}
        for name, do_sample in REGIMES.items():
            found = quality(classifier, held_out[do_sample], do_sample)
            _warn_of(name, found)
            report[name] = {"quality": asdict(found)}
            if settings.rule == "token":
                drafters = {tau: _drafter(settings, pair, classifier, tau, tau) for tau in TAUS}
                timed = parts["validation"][: settings.timed_prompts]
                seconds = seconds_per_token(pair, drafters, timed, do_sample, settings.max_new_tokens, settings.seed)
                report[name] |= {"tau": min(seconds, key=seconds.__getitem__), "seconds_per_token": seconds}
        drafter = _drafter(settings, pair, classifier, *(report[name].get("tau", DiscoConfig.tau) for name in REGIMES))
        trained_on = _trained_on(settings, report, len(parts["training"]))
        drafter.save_pretrained(output, target=pair.target, tokenizer=pair.tokenizer, trained_on=trained_on)
        (output / "training.json").write_text(json.dumps(report, indent=2) + "\n")
        return report


def closing(settings: TrainSettings, report: dict[str, Any]) -> Iterator[str]:
    """What the command says at its end."""
    for name in REGIMES:
        found = report[name]["quality"]
        chosen = f", τ {report[name]['tau']:g}" if "tau" in report[name] else ""
        yield (
            f"{name}: F1 {found['f1']:.3f} (always accepting: {found['f1_always']:.3f}), calibration error "
            f"{found['calibration_error']:.3f}{chosen}"
        )
    yield from try_it(settings, "--drafter")


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


def _warn_of(name: str, found: Quality) -> None:
    """Say so where the classifier is worse than none."""
    if found.f1 < found.f1_always:
        warn(
            f"{name}: the classifier's F1, {found.f1:.3f}, is below the {found.f1_always:.3f} of always "
            "accepting: it stops drafts that the target would accept. Texts are not affected, only speed; "
            "give it more prompts or longer texts to learn from, or use a fixed window "
            "(speculation_type='draft_model')"
        )


def seconds_per_token(
    pair: Pair,
    drafters: Mapping[float, DiscoDrafter],
    prompts: Sequence[Prompt],
    do_sample: bool,
    max_new_tokens: int,
    seed: int,
) -> dict[float, float]:
    """Time that decoding the prompts takes with each drafter, by its τ (Appendix E). They take turns at each prompt.

    Args:
        prompts: at least one; the first is decoded once more, before the others, to warm up.
    """
    made, pad = dict.fromkeys(drafters, SpeculationStats()), pair.tokenizer.pad_token_id
    options = {"max_new_tokens": max_new_tokens, "pad_token_id": pad} | sampling_at(float(do_sample))
    for number, prompt in enumerate(tqdm([prompts[0], *prompts], desc="timing τ", unit=" prompts")):
        inputs = batch([prompt_ids(pair.tokenizer, prompt)], pad, input_device(pair.target))
        turn = number % len(drafters)
        for tau in [*drafters][turn:] + [*drafters][:turn]:
            method = Method(f"τ = {tau}", {"assistant_model": drafters[tau]}, drafter=drafters[tau])
            one = decode(pair.target, method, inputs, seed + number, **options)
            made[tau] = made[tau] + one.stats if number else made[tau]
    return {tau: 1 / stats.tokens_per_second for tau, stats in made.items()}


def _drafter(
    settings: TrainSettings, pair: Pair, classifier: StopClassifier, tau: float, tau_sampled: float
) -> DiscoDrafter:
    return DiscoDrafter(
        pair.draft,
        classifier,
        rule=settings.rule,
        tau=tau,
        tau_sampled=tau_sampled,
        max_draft_tokens=settings.max_draft_tokens,
        lookup=settings.lookup,
    )


def _trained_on(settings: TrainSettings, report: dict[str, Any], prompts: int) -> str:
    """For the drafter's card."""
    names = ", ".join(Path(path).name for path in settings.data)
    f1 = " and ".join(f"{report[name]['quality']['f1']:.2f} ({name})" for name in REGIMES)
    error = " and ".join(f"{report[name]['quality']['calibration_error']:.3f}" for name in REGIMES)
    said = (
        f"The target's own continuations of {prompts} prompts ({names}), "
        f"up to {settings.max_new_tokens} tokens each, greedy and at temperature 1. "
        f"On held-out prompts its F1 is {f1}, its calibration error {error}."
    )
    if settings.rule == "token":
        greedy, sampled = (report[name]["tau"] for name in REGIMES)
        said += f" On the machine of the training the fastest thresholds were τ = {greedy:g} (greedy) and {sampled:g}"
        said += " (sampled)."
    return said
