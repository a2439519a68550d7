"""What `hf-specdec bench` has measured, as a model card shows it: of this drafter, on its target, ties as ties."""

import json
from collections.abc import Collection, Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from ..config import DrafterConfig, parse_options
from ..errors import SpeculationError, shown
from .target import SIZES

COLUMNS = {
    "method": lambda run: method_name(run["name"]),
    "data": lambda run: run["dataset"],
    "batch": lambda run: str(run["batch_size"]),
    "T": lambda run: f"{run['temperature']:g}",
    "prompts": lambda run: str(run["prompts"]),
    "tokens/s": lambda run: f"{run['tokens_per_second']:.1f}",
    "speed-up": lambda run: _with_interval(run["speedup"], run.get("speedup_interval")),
    "tokens per target call": lambda run: f"{run['mean_acceptance_length']:.2f}",
    "accepted of drafted": lambda run: _rate(run["draft_acceptance_rate"]),
    "same text": lambda run: same_text(run),
}
DIFFERENCES = ("method", "prompt", "new token", "plain's / its own", "gap", "rounding", "near-tie")
"""gap: plain's logit of its own token less that of the other; rounding: one step of the target's dtype there"""
Facts = dict[str, Any]


def facts(config: DrafterConfig) -> Facts:
    """What tells a drafter from others in a result file: its type and its options."""
    options = {name: value for name, value in config.to_dict().items() if name not in ("target", "draft_model")}
    return {"drafter_type": config.drafter_type} | options


def measured_section(path: str | Path, config: DrafterConfig, names: Collection[str] = ()) -> str:
    """The `runs` of a result file as a table, where their texts part from plain decoding's, and where it was measured.

    Args:
        config: of the drafter that the card is about; its rows are set in bold.
        names: what else it may be called in the file: its folder, its repo.

    Raises:
        SpeculationError: it is no result file, it measured another target, or it has no row of this drafter.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        runs, provenance = content["runs"], content["provenance"]
        mine = [_is_of(run["name"], config, names, provenance.get("drafters") or {}) for run in runs]
        rows = [[cell(run) for cell in COLUMNS.values()] for run in runs]
        parted = differences(runs)
        where = _measured_where(provenance)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpeculationError(
            f"results={str(path)!r} is not a result file of `hf-specdec bench`: {error!r}"
        ) from error
    _check_target(str(path), config.target or {}, provenance)
    if not any(mine):
        raise SpeculationError(
            f"results={str(path)!r} has no row of this drafter, {shown(facts(config))}; it measured "
            f"{', '.join(dict.fromkeys(run['name'] for run in runs)) or 'nothing'}. Measure it: "
            "hf-specdec bench --drafter <its folder>"
        )
    rows = [[f"**{row[0]}**" if own else row[0], *row[1:]] for own, row in zip(mine, rows, strict=True)]
    parts = [_markdown(list(COLUMNS), rows)]
    if parted:
        parts += ["Where the text first parts from plain decoding's:", _markdown(list(DIFFERENCES), parted)]
    return "\n\n".join([*parts, where]).rstrip()


def same_text(run: dict[str, Any]) -> str:
    """How many prompts have plain decoding's very tokens, and how many of the others part from it at a near-tie."""
    if run["identical"] is None:
        return "-"
    if run["identical"]:
        return "all"
    parted = run.get("differences") or []
    if run["batch_size"] > 1 or not parted:  # in batches, and in later repetitions, nobody has looked where
        return "not all"
    ties = sum(difference["near_tie"] for difference in parted)
    same = run["prompts"] - len({difference["prompt"] for difference in parted})
    return f"{same}/{run['prompts']}" + (f" ({ties} tie{'s' * (ties != 1)})" if ties else "")


def differences(runs: Iterable[dict[str, Any]]) -> list[list[str]]:
    """A row of `DIFFERENCES` for each first place where a text parts from plain decoding's."""
    return [
        [
            method_name(run["name"]),
            f"{run['dataset']} {found['prompt']}" + (f", turn {found['turn'] + 1}" if found.get("turn") else ""),
            str(found["position"]),
            " / ".join("(ended)" if token is None else str(token) for token in _tokens(found)),
            *("-" if found[name] is None else f"{found[name]:.3g}" for name in ("gap", "rounding")),
            "yes" if found["near_tie"] else "no",
        ]
        for run in runs
        for found in run.get("differences") or []
    ]


def method_name(spec: str) -> str:
    """A SPEC or argument without the folders of the machine that measured it."""
    return Path(spec).name if spec.startswith(("/", ".", "~")) else spec


def _tokens(difference: dict[str, Any]) -> list[int | None]:
    return [difference["plain_token"], difference["other_token"]]


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
    """Target, device, versions and command line, without the folders of that machine."""
    target = _measured_target(provenance).get("name")
    known = provenance | {"target": target and method_name(target)}
    names = ("target", "device", "threads", "git_revision", "time")
    found = [f"{name}: {known[name]}" for name in names if known.get(name) is not None]
    found += provenance.get("pretended") or []
    found += [f"{name} {version}" for name, version in provenance.get("versions", {}).items() if version]
    command = " ".join(method_name(word) for word in str(provenance.get("command", "")).split())
    return "; ".join(found) + (f"\n\n```sh\n{command}\n```" if command else "")


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _with_interval(ratio: float, interval: list[float] | None) -> str:
    return f"{ratio:.2f}x" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0%}"
