"""`hf-specdec audit`."""

from typer import Exit

from ..audit.findings import AuditSettings
from ..audit.run import run_audit


def audit(settings: AuditSettings) -> None:
    """Ends with 1 where something is wrong."""
    if not all(report.fine for report in run_audit(settings)):
        raise Exit(1)
