"""What a test may do where the machine lacks something: `pytest.skip`, with what is missing and why it matters.

A skip is told in one loud line at the end of the run. With CI=true it is a failure: a machine that is meant to
have everything must not pass by leaving tests out. So a test never asks for CI itself:

    if os.geteuid() != 0:
        pytest.skip("mounts nothing without root")
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import pytest

STRICT = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STRICT] = os.environ.get("CI") == "true"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a test's skip into a failure where nothing may be left out."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.stash[STRICT]:
        report.outcome = "failed"
        report.longrepr = f"with CI=true nothing may be skipped: {reason_of(report)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a whole module that skips itself."""
    report = yield
    if report.skipped and collector.config.stash[STRICT]:
        report.outcome = "failed"
        report.longrepr = f"with CI=true nothing may be skipped: {reason_of(report)}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say once for each reason what was not tested."""
    reasons = Counter(reason_of(report) for report in terminalreporter.stats.get("skipped", []))
    for reason, count in reasons.items():
        terminalreporter.write_line(
            f"NOT TESTED on this machine: {count} test{'s' * (count > 1)}: {reason}", yellow=True, bold=True
        )


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the words given to pytest.skip."""
    told = report.longrepr
    return str(told[2] if isinstance(told, tuple) else told).removeprefix("Skipped: ")
