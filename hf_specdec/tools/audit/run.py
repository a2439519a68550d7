"""`hf-specdec audit`: load, test, and say what was found."""

import json
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from ..bench.methods import PLAIN
from ..loading.chat import prompt_ids
from ..loading.outputs import writable_file
from ..loading.prompts import Prompt, load_prompts
from .client import Server
from .findings import AuditSettings, Report
from .greedy import Greedy
from .sampled import Sampled
from .samples import SAMPLED_PROMPTS
from .served import Served


def run_audit(settings: AuditSettings) -> list[Report]:
    """Audit every method, or a server, and print a table, its details, and a verdict on each.

    Raises:
        SpeculationError: bad settings, models or a server that do not work, or a file that cannot be written.
    """
    settings.check()
    if settings.output is not None:
        writable_file(settings.output, "output")
    prompts = load_prompts(settings.prompts, settings.limit)
    reports = _methods(settings, prompts) if settings.server is None else [_server(settings, settings.server, prompts)]
    print_reports(reports)
    if settings.output is not None:
        settings.output.write_text(json.dumps([asdict(report) | {"fine": report.fine} for report in reports], indent=2))
    return reports


def _methods(settings: AuditSettings, prompts: list[Prompt]) -> list[Report]:
    """Of each way of decoding."""
    pair = settings.load()
    plainly, *methods = settings.methods(pair, [PLAIN, *(settings.baselines or []), *(settings.drafters or [])])
    ids = [prompt_ids(pair.tokenizer, prompt, settings.raw) for prompt in prompts]
    reports = [Report(method.name) for method in methods]
    with tqdm(total=8 * len(methods), unit="test") as progress:
        progress.set_description("plain decoding")
        greedy = Greedy(pair.target, pair.tokenizer, ids, settings.max_new_tokens, plainly)
        inputs = greedy.inputs[:SAMPLED_PROMPTS]
        pad = pair.tokenizer.pad_token_id
        sampled = Sampled(pair.target, inputs, settings.samples, settings.temperature, settings.seed, pad, plainly)
        for method, report in zip(methods, reports, strict=True):
            progress.set_description(method.name)
            for found in greedy.findings(method):
                report.findings.append(found)
                progress.update()
            report.findings.append(greedy.guarded("sampled distribution", partial(sampled.finding, method)))
            progress.update()
    return reports


def _server(settings: AuditSettings, url: str, prompts: list[Prompt]) -> Report:
    """Of a server with drafts."""
    plain, fields = settings.without_drafts()
    with tqdm(unit="answer", desc=url) as progress:
        common: dict[str, Any] = {"model": settings.model, "timeout": settings.timeout, "raw": settings.raw}
        drafting, plainly = (Server(*each, **common, asked=progress.update) for each in ((url, {}), (plain, fields)))
        served = Served(drafting, plainly, prompts, settings.max_new_tokens)
        findings = list(served.findings(settings.samples, settings.temperature, settings.seed))
    return Report(url, findings)


def print_reports(reports: list[Report]) -> None:
    """A table with a row for each test and a column for each method, then details and verdicts."""
    console = Console(highlight=False)
    table = Table(box=None)
    table.add_column("")
    for report in reports:
        table.add_column(report.method)
    for row in zip(*(report.findings for report in reports), strict=True):
        cells = [f"{'' if found.fine else '[bold red]WRONG[/] '}{found.said}" for found in row]
        table.add_row(row[0].test, *cells)
    console.print(table)
    told: dict[str, list[str]] = {}
    for report in reports:
        for found in report.findings:
            for detail in found.details:
                told.setdefault(f"{found.test}: {detail}", []).append(report.method)
    for detail, names in told.items():
        print(f"{'all' if len(names) == len(reports) > 1 else ', '.join(names)}, {detail}")
    for report in reports:
        print(report.verdict)
