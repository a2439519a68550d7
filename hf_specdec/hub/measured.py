"""What `hf-specdec bench` measured, as a model card shows it: this drafter beside plain decoding, on its own target."""

import json
from collections.abc import Collection, Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from ..config import DrafterConfig, parse_options
from ..errors import SpeculationError, shown
from .target import SIZES

COLUMNS = ("data", "prompts", "plain tokens/s", "tokens/s", "speed-up (95% interval)", "tokens per call")
PLAIN = "plain"
PACKAGES = ("hf-specdec", "torch", "transformers")
"""those whose versions a card names"""
Facts = dict[str, Any]


def facts(config: DrafterConfig) -> Facts:
    """What tells a drafter from others in a result file: its type and its options."""
    return {"drafter_type": config.drafter_type} | config.chosen()


def measured_section(path: str | Path, config: DrafterConfig, names: Collection[str] = ()) -> str:
    """This drafter's `runs` of a result file as a table, how many texts equal plain decoding's, and where it ran.

    Args:
        config: of the drafter that the card is about.
        names: what else it may be called in the file: its folder, its repo.

    Raises:
        SpeculationError: it is no result file, it measured another target, or it has no row of this drafter.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        runs, provenance = content["runs"], content["provenance"]
        mine = [run for run in runs if _is_of(run["name"], config, names, provenance.get("drafters") or {})]
        plain = {_cell(run): run["tokens_per_second"] for run in runs if run["name"] == PLAIN}
        rows = [_row(run, plain.get(_cell(run))) for run in mine]
        parts = [markdown(COLUMNS, rows), compared_texts(mine), _measured_where(provenance)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpeculationError(
            f"results={str(path)!r} is not a result file of `hf-specdec bench`: {error!r}"
        ) from error
    _check_target(str(path), config.target or {}, provenance)
    if not mine:
        raise SpeculationError(
            f"results={str(path)!r} has no row of this drafter, {shown(facts(config))}; it measured "
            f"{', '.join(dict.fromkeys(run['name'] for run in runs)) or 'nothing'}. Measure it: "
            "hf-specdec bench --drafter <its folder>"
        )
    return "\n\n".join(filter(None, parts))


def compared_texts(runs: Iterable[dict[str, Any]]) -> str:
    """How many greedy texts equal plain decoding's, and where the others part from them; "" if none was compared.

    A text that parts where there is no near tie is named. Batches, and repetitions after the first, are compared as a
    whole: a result file holds whether they differ, but not where.
    """
    greedy = [run for run in runs if run["identical"] is not None]
    located = [run for run in greedy if run["batch_size"] == 1 and (run["identical"] or run.get("differences"))]
    unlocated = [_setting(run) for run in greedy if not run["identical"] and run not in located]
    if not located and not unlocated:
        return "Greedy texts equal plain decoding's." if greedy else ""

    found = [(run, one) for run in located for one in run.get("differences") or []]
    others = ", ".join(_place(run, one) for run, one in found if not one["near_tie"])
    total = sum(run["prompts"] for run in located)
    parted = sum(len({one["prompt"] for one in run.get("differences") or []}) for run in located)
    same = f"{total - parted} of {total}" if parted else f"all {total}"
    parts = [f"Greedy texts: {same} equal plain decoding's"] if located else []
    if any(one["near_tie"] for _, one in found):
        parts.append(
            "differences start at near ties, where rounding decides" + (f", except for {others}" * bool(others))
        )
    elif others:
        parts.append(f"no near tie explains {others}")
    if unlocated:
        parts.append(f"not all texts are equal in {', '.join(unlocated)}, and where they part is not recorded")
    sentence = "; ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]}."


def method_name(spec: str) -> str:
    """A SPEC or argument without the folders of the machine that measured it."""
    return Path(spec).name if spec.startswith(("/", ".", "~")) else spec


def _is_of(name: str, config: DrafterConfig, names: Collection[str], told: dict[str, Facts]) -> bool:
    """Whether a row is this drafter's: by what the file tells of it, or, in older files, by its SPEC. An option that
    there was not yet is taken to have had its default."""
    if name in told:
        defaults = {option.name: option.default for option in fields(config) if option.default is not MISSING}
        mine: Facts = json.loads(json.dumps(facts(config)))
        return {option: told[name].get(option, defaults.get(option)) for option in mine | told[name]} == mine
    if name in names:
        return True
    try:
        drafter_type, options = parse_options(name)
        measured = type(config).from_options(options)
    except SpeculationError:
        return False
    return drafter_type == config.drafter_type and facts(measured) == facts(config)


def _check_target(path: str, wanted: dict[str, Any], provenance: dict[str, Any]) -> None:
    """Refuse figures of another target than the one that the drafter is made for."""
    if not wanted:
        return
    found = _measured_target(provenance)
    comparable = [name for name in ("name", *SIZES) if wanted.get(name) is not None and found.get(name) is not None]
    if not comparable:
        raise SpeculationError(
            f"results={path!r} does not say which target it measured, and this drafter is made for {shown(wanted)}; "
            "measure again with this version"
        )
    for name in comparable:
        theirs, ours = found[name], wanted[name]
        if (Path(theirs).name != Path(ours).name) if name == "name" else theirs != ours:
            raise SpeculationError(
                f"results={path!r} measured another target: its {name} is {shown(theirs)}, and this drafter is made "
                f"for {shown(ours)}; measure the drafter on the model that it is made for"
            )


def _measured_target(provenance: dict[str, Any]) -> dict[str, Any]:
    """What the file says of its target; in older files that is its name, perhaps with folders of that machine."""
    name = (provenance.get("settings") or {}).get("target")
    return provenance.get("target") or ({} if name is None else {"name": name})


def _measured_where(provenance: dict[str, Any]) -> str:
    """Command, device, date, target and versions in one line, without the folders of that machine."""
    command = " ".join(method_name(word) for word in str(provenance.get("command", "")).split())
    threads = provenance.get("threads") if provenance.get("device_type") != "cuda" else None
    target, revision = _measured_target(provenance).get("name"), provenance.get("git_revision")
    versions = provenance.get("versions") or {}
    found = [
        provenance.get("device"),
        threads and f"{threads} thread{'s' * (threads != 1)}",
        str(provenance.get("time") or "")[: len("2026-01-31")],
        target and f"target `{method_name(target)}`",
        *(f"{name} {versions[name]}" for name in PACKAGES if versions.get(name)),
        revision and f"commit {revision}",
    ]
    where = ", ".join(str(fact) for fact in found if fact)
    return " ".join(filter(None, ["Measured", command and f"with `{command}`", where and f"on {where}"])) + "."


def _cell(run: dict[str, Any]) -> tuple[str, int, float]:
    """What was measured; plain decoding and the drafters are compared on the same."""
    return run["dataset"], run["batch_size"], run["temperature"]


def _setting(run: dict[str, Any]) -> str:
    """The data set, with batch size and temperature where they are not 1 and 0."""
    batch, temperature = run["batch_size"], run["temperature"]
    return run["dataset"] + f", batch of {batch}" * (batch > 1) + (f", T={temperature:g}" if temperature else "")


def _row(run: dict[str, Any], plain: float | None) -> list[str]:
    """By `COLUMNS`."""
    return [
        _setting(run),
        str(run["prompts"]),
        "-" if plain is None else f"{plain:.1f}",
        f"{run['tokens_per_second']:.1f}",
        _with_interval(run["speedup"], run.get("speedup_interval")),
        f"{run['mean_acceptance_length']:.2f}",
    ]


def _place(run: dict[str, Any], found: dict[str, Any]) -> str:
    """Which text it is, and the new token at which it parts from plain decoding's."""
    turn = f", turn {found['turn'] + 1}" if found.get("turn") else ""
    return f"{run['dataset']} {found['prompt']}{turn} (token {found['position']})"


def markdown(header: Collection[str], rows: Iterable[Iterable[str]]) -> str:
    """A table: text to the left in the first column, figures to the right in the others."""
    align = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, align, *rows])


def _with_interval(ratio: float, interval: list[float] | None) -> str:
    return f"{ratio:.2f}x" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")
