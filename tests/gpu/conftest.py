"""Tests of a GPU: where there is one, or where `DEVICE` names a device (`DEVICE=cpu` is the dry run)."""

import os
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
if os.environ.get("DEVICE") or torch.cuda.is_available():
    sys.path.append(str(HERE))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.real_time)
            # A drafter that fails is dropped with a warning and the text is right all the same: here that is a failure.
            item.add_marker(pytest.mark.filterwarnings("error::hf_specdec.errors.SpeculationWarning"))


def pytest_runtest_logreport(report):
    """Each result as soon as it is there, for the report."""
    here = os.environ.get("OUT") and "PYTEST_XDIST_WORKER" not in os.environ  # workers report to the process above
    if here and (report.when == "call" or report.outcome != "passed"):
        from steps import note

        why = "" if report.outcome == "passed" else _last_line(report)
        note("test", test=report.nodeid.split("/")[-1], outcome=report.outcome, seconds=report.duration, why=why)


def _last_line(report):
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash is not None else report.longreprtext).strip()[:600]
