"""`hf-specdec audit`."""

from typer import Exit

from ..tools.audit.findings import AuditSettings
from ..tools.audit.run import run_audit


def audit(settings: AuditSettings) -> None:
    """Ends with 1 where something is wrong.

    Example:

    hf-specdec audit --target smollm2 --drafter prompt_lookup --prompts chat --limit 2

    hf-specdec audit --server http://localhost:8000 --without http://localhost:8001 --prompts chat
    """
    if not all(report.fine for report in run_audit(settings)):
        raise Exit(1)
